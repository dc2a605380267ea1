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
    code, error = hydra_run("-m", *arguments)
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
    assert "plan.json: cannot be written" in done.stderr
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


def test_a_folder_that_is_no_sweep(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["select", str(tmp_path)]) == 1
    assert "neither a sweep (plan.json) nor a run" in capsys.readouterr().err
