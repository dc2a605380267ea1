"""The commands as users type them: every mistake is one line with the remedy, exit code 1, and nothing is launched."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton

from ablate.cli import main
from ablate.run import main as main_run

MISTAKES = [
    (["clip=symm,asym"], "clip=symm: no such level; did you mean sym?"),
    (["clip=symm"], "clip=symm: no such level; did you mean sym?"),
    (["optim.lrr=1"], "optim.lrr: unknown key; did you mean lr?"),
    (["optimm.lr=1"], "optimm.lr: unknown key; did you mean optim?"),
    (["optim.lr=abc"], "optim.lr=abc: must be a valid number"),
    (["optim.lr=-1"], "optim.lr=-1: must be greater than 0"),
    (["clip.clip_low=1.5"], "clip.clip_low=1.5: must be less than 1"),
    (["train.max_steps=0"], "train.max_steps=0: must be greater than or equal to 1"),
    (["rollout=vllm"], "rollout=vllm can be planned but not trained yet"),
    (["task=pymethods2test"], "task=pymethods2test can be planned but not trained here"),
    (["model=qwen3_8b"], "model.path=Qwen3-8B is not a model folder"),
    (["+sweep=nothing"], "sweep=nothing: no such level"),
    (["clip"], "clip: not an override; write key=value"),
    (["clip=sym,asym", "train.passes=1"], "this plan cannot answer its question; nothing was launched"),
    (["task.reward=share_of_tests"], "task.reward=share_of_tests: task=reverse is scored right or wrong"),
    (["task.min_digits=5", "task.max_digits=2"], "task.min_digits=5: above task.max_digits=2"),
    (["seed=99999999999999999999999"], "must be a whole number from 0 to 2^63 - 1"),
    (["seed=0,99999999999999999999999"], "must be a whole number from 0 to 2^63 - 1"),
    (["clip=[sym,asym]"], "a run has one level; for one run each write clip=sym,asym"),
    (["output=null"], "must be a folder, such as output=outputs"),
    (["output=a,b"], "output: holds for the whole sweep and cannot be a factor"),
    (["hydra/launcher=basic"], "hydra/launcher=basic: cannot carry out a plan; use local"),
    (["hydra.mode=RUN"], "every command goes through ablate's own sweeper"),
    (["sweep=clip_x_tis"], "a sweep file is run by +sweep=NAME"),
]


@pytest.fixture
def hydra_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable:
    """`python -m ablate.run` in this process: Hydra's own main and all that it calls."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["ablate.run", *arguments])
        before = Singleton.get_state()
        GlobalHydra.instance().clear()
        with pytest.raises(SystemExit) as ended:
            main_run()
        Singleton.set_state(before)
        return int(ended.value.code or 0), capsys.readouterr().err

    return run


@pytest.mark.parametrize("full", ["", "1"], ids=["", "HYDRA_FULL_ERROR"])
@pytest.mark.parametrize(("arguments", "said"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_one_line(
    hydra_run: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], said: str, full: str
) -> None:
    if full:
        monkeypatch.setenv("HYDRA_FULL_ERROR", full)
    code, error = hydra_run(*(("-m",) if "hydra.mode=RUN" not in arguments else ()), *arguments)
    assert code == 1, error
    assert said in error
    assert len([line for line in error.splitlines() if line.startswith("ablate:")]) == 1
    assert [p.name for p in tmp_path.iterdir()] == []


def test_a_mistake_in_a_process_of_its_own_leaves_no_traceback(command: Callable, tmp_path: Path) -> None:
    for environment in ({}, {"HYDRA_FULL_ERROR": "1"}):
        done = command("ablate.run", "-m", "clip=symm,asym", **environment)
        assert done.returncode == 1
        assert done.stderr.startswith("ablate: clip=symm: no such level; did you mean sym?")
        assert len(done.stderr.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == []


def test_an_output_that_cannot_be_written(command: Callable, tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file where a folder should be")
    done = command("ablate.run", "-m", "train.max_steps=1")
    assert done.returncode == 1
    assert "outputs/single-" in done.stderr
    assert "cannot be written (Not a directory); free space or choose another output=" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_holds_another_sweep(command: Callable, tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "mine"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("precious")
    done = command("ablate.run", "-m", "sweep.name=mine", "train.max_steps=1")
    assert done.returncode == 1
    assert "outputs/mine: holds files that are no sweep; choose another sweep.name=" in done.stderr
    (folder / "notes.txt").unlink()
    (folder / "plan.json").write_text(json.dumps({"base_digest": "other", "command": ["optim.lr=1"], "runs": []}))
    done = command("ablate.run", "-m", "sweep.name=mine", "train.max_steps=1")
    assert done.returncode == 1
    assert "outputs/mine: holds another sweep (optim.lr=1), whose base differs" in done.stderr


def test_help_lists_every_factor_with_its_levels(command: Callable) -> None:
    text = command("ablate.run", "--help").stdout
    for level in ("sym ", "asym ", "gspo ", "prompt_mean ", "icepop ", "rloo_n ", "k1_in_reward ", "symclip "):
        assert f"    {level}" in text
    assert "python -m ablate.run -m clip=sym,asym tis=on,off" in text


def test_cfg_job_shows_the_resolved_config(command: Callable) -> None:
    done = command("ablate.run", "--cfg", "job", "clip=asym")
    assert "clip_high: 0.28" in done.stdout
    assert "ablate_help" not in done.stdout


def test_flags_and_overrides_come_in_any_order(hydra_run: Callable, tmp_path: Path) -> None:
    (tmp_path / "own" / "clip").mkdir(parents=True)
    (tmp_path / "own" / "clip" / "wide.yaml").write_text("name: clip\nclip_low: 0.4\nclip_high: 0.4\n")
    code, error = hydra_run("clip=sym,wide", "--config-dir", "own", "train.passes=1", "-m")
    assert (code, "inert-clip" in error) == (1, True)
    assert hydra_run("clip=sym", "--no-such-flag")[0] == 1


def test_one_run_needs_no_multirun_flag(command: Callable) -> None:
    done = command("ablate.run", "optim.lr=-1")
    assert "optim.lr=-1: must be greater than 0" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["preset=symclip"], ["preset=symclip_literal"], ["model=qwen3_8b"], ["sweeps/clip_x_tis.yaml"]]
)
def test_plan_prints_a_table(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(["plan", *arguments]) == 0
    assert "digest" in capsys.readouterr().out


def test_plan_of_the_published_series_shows_what_differs_and_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "+sweep=symclip_series"]) == 1
    out = capsys.readouterr().out
    assert "12 arms x 1 seed = 12 runs" in out
    assert "optim.lr=1.6e-05" in out
    assert "unequal-caps" in out


def test_cfg_job_takes_the_flag_for_several_runs_too(command: Callable) -> None:
    assert "clip_high: 0.28" in command("ablate.run", "-m", "--cfg", "job", "clip=asym").stdout
    done = command("ablate.run", "--cfg", "job", "clip=sym,asym")
    assert (done.returncode, done.stderr) == (1, "ablate: --cfg shows one run: give every key one value\n")


def test_broken_yaml_is_one_line(hydra_run: Callable, tmp_path: Path) -> None:
    (tmp_path / "own" / "clip").mkdir(parents=True)
    (tmp_path / "own" / "clip" / "wide.yaml").write_text("name: clip\n  clip_low: [0.4\n")
    code, error = hydra_run("--config-dir", "own", "clip=wide")
    assert (code, len(error.splitlines())) == (1, 1)
    assert "not YAML" in error


@pytest.mark.parametrize("text", ["[]", "null", '{"runs": [{"x": 1}]}', "{", ""])
@pytest.mark.parametrize("verb", ["select", "status"])
def test_a_damaged_plan_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert main([verb, str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert (len(error.splitlines()), "plan.json" in error) == (1, True)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a: [1"])
def test_a_damaged_config_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes) -> None:
    (tmp_path / "digest").write_text("0123456789abcdef\n")
    (tmp_path / "config.yaml").write_bytes(content)
    assert main(["status", str(tmp_path)]) == 1
    assert "config.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["bogus"], [], ["select"]])
def test_usage_mistakes_are_one_line_and_not_some_failed(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(arguments) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_file_of_sweeps_elsewhere_is_not_mistaken_for_ours(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", str(tmp_path / "clip_x_tis.yaml")]) == 1
    assert "not there" in capsys.readouterr().err
    (tmp_path / "clip_x_tis.yaml").write_text("factors: {}\n")
    assert main(["plan", str(tmp_path / "clip_x_tis.yaml")]) == 1
    assert "--config-dir FOLDER +sweep=clip_x_tis" in capsys.readouterr().err


def test_a_preset_shows_what_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "preset=symclip"]) == 0
    out = capsys.readouterr().out
    assert "differs from the default in:" in out
    assert "optim.lr=8e-06" in out
    assert "optim.eps" not in out


def test_help_lists_own_levels(command: Callable, tmp_path: Path) -> None:
    (tmp_path / "own" / "clip").mkdir(parents=True)
    (tmp_path / "own" / "clip" / "wide.yaml").write_text("# wide open\nname: none\n")
    assert "wide open" in command("ablate.run", "--help", "--config-dir", "own").stdout


def test_a_folder_that_is_no_sweep(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["select", str(tmp_path)]) == 1
    assert "neither a sweep (plan.json) nor a run" in capsys.readouterr().err
