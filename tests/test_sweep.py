"""A whole sweep with real parts: four arms under ZeRO-3, their files, what a second command and a failure do."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ablate.record import attempts, read_lines, read_metrics

pytestmark = pytest.mark.slow

SHORT = [
    "train.max_steps=4", "train.prompts_per_step=8", "eval.interval=2", "eval.prompts=16",
    "export.interval=2", "checkpoint.interval=2", "launch.progress_seconds=0.5",
]  # fmt: skip
GRID = ["-m", "clip=sym,asym", "tis=on,off", "sweep.name=demo", *SHORT]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ablate.run", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def first(folder: Path) -> subprocess.CompletedProcess[str]:
    return run(folder, *GRID)


@pytest.fixture(scope="module")
def sweep(folder: Path, first: subprocess.CompletedProcess[str]) -> Path:
    assert first.returncode == 0, first.stderr + first.stdout
    return folder / "outputs" / "demo"


def runs(sweep: Path) -> list[Path]:
    return [sweep / r["folder"] for r in json.loads((sweep / "plan.json").read_text())["runs"]]


def test_plain_lines_and_the_table_of_arms(first: subprocess.CompletedProcess[str], sweep: Path) -> None:
    assert "clip=sym,tis=on seed=0 step 4/4 reward EMA" in first.stderr
    assert "steps/s ETA" in first.stderr
    for word in ("reported step", "EMA reward", "held-out at step 0", "held-out at reported", "single-seed"):
        assert word in first.stdout
    assert f"records: {sweep.relative_to(sweep.parents[1])}" in first.stdout
    assert "next: python -m ablate.run clip=sym,asym tis=on,off" in first.stdout


def test_every_run_folder_holds_what_it_should(sweep: Path) -> None:
    assert [r.relative_to(sweep).as_posix() for r in runs(sweep)] == [
        f"clip={clip},tis={tis}/seed=0" for clip in ("sym", "asym") for tis in ("on", "off")
    ]
    for folder in runs(sweep):
        names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
        assert {
            "config.yaml", "digest", "code.json", "done.json", "metrics.jsonl", "attempts.jsonl",
            "rollouts/000001-000002.parquet", "rollouts/000003-000004.parquet", "checkpoints/step_4/complete",
            "export/step_2/model.safetensors", "export/step_4/config.json", "export/step_4/tokenizer.json",
            "logs/attempt-1.log",
        } <= names  # fmt: skip
        assert not [n for n in names if ".tmp" in n or n == "lock"]
        assert json.loads((folder / "done.json").read_text())["last_step"] == 4


def test_rows_have_one_set_of_keys_and_one_row_per_step(sweep: Path) -> None:
    keys = set()
    for folder in runs(sweep):
        rows = read_lines(folder / "metrics.jsonl").rows
        assert [r["step"] for r in rows] == [0, 1, 2, 3, 4]
        keys |= {tuple(sorted(r)) for r in rows}
        assert [len(r["updates"]) for r in rows[1:]] == [2] * 4
        assert len({tuple(u) for r in rows[1:] for u in r["updates"]}) == 1
        assert rows[0]["heldout/greedy"] is not None
        assert [r["heldout/greedy"] is None for r in rows[1:]] == [True, False, True, False]
        assert [r["global_step"] for r in rows[1:]] == [2, 4, 6, 8]
    assert len(keys) == 1


def test_arms_share_base_prompts_and_noise_until_they_diverge(sweep: Path) -> None:
    tables = [pq.read_table(r / "rollouts" / "000001-000002.parquet").to_pylist() for r in runs(sweep)]
    step1 = [
        [(x["prompt_id"], x["sample"], x["response_ids"], x["logprobs"]) for x in t if x["step"] == 1] for t in tables
    ]
    assert all(rows == step1[0] for rows in step1)
    assert len(step1[0]) == 8 * 8
    hashes = [[r["prompts_hash"] for r in read_metrics(folder)][1:] for folder in runs(sweep)]
    assert all(h == hashes[0] for h in hashes)
    starts = {read_metrics(folder)[0]["heldout/greedy"] for folder in runs(sweep)}
    assert len(starts) == 1


def test_levels_act(sweep: Path) -> None:
    by_name = {r.parent.name: read_metrics(r) for r in runs(sweep)}
    on, off = by_name["clip=sym,tis=on"], by_name["clip=sym,tis=off"]
    assert {u["tis/weight_mean"] for r in off[1:] for u in r["updates"]} == {1.0}
    assert all(u["tis/weight_min"] < 1 < u["tis/weight_max"] for r in on[1:] for u in r["updates"])
    # the first update of a step starts from its own old log-probabilities
    assert {r["updates"][0]["ratio/max"] for r in on[1:]} == {1.0}
    assert all(r["updates"][1]["ratio/max"] > 1 for r in on[1:])


def test_the_same_command_again_only_prints_the_table(folder: Path, sweep: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in sweep.rglob("*") if p.is_file() and p.name != "plan.json"}
    done = run(folder, *GRID)
    assert done.returncode == 0
    assert "reported step" in done.stdout
    assert "to do" not in done.stderr
    assert {p: p.stat().st_mtime_ns for p in sweep.rglob("*") if p.is_file() and p.name != "plan.json"} == before


def test_without_done_json_that_run_alone_goes_on(folder: Path, sweep: Path) -> None:
    target, *others = runs(sweep)
    (target / "done.json").unlink()
    done = run(folder, *GRID)
    assert done.returncode == 0
    assert "1 of 4 runs to do" in done.stderr
    assert [a["outcome"] for a in attempts(target)] == ["done", "done"]
    assert [r["step"] for r in read_lines(target / "metrics.jsonl").rows] == [0, 1, 2, 3, 4]
    assert all(len(attempts(o)) == 1 for o in others)


def test_more_seeds_train_only_the_new_runs_with_a_live_table(folder: Path, sweep: Path) -> None:
    arguments = ["-m", "clip=sym", "tis=on", "seed=0,1", "sweep.name=solo", *SHORT]
    assert run(folder, *(a if not a.startswith("seed") else "seed=0" for a in arguments)).returncode == 0
    screen = _in_a_terminal(folder, arguments)
    assert "1 of 2 runs to do" in screen
    assert "steps/s" in screen
    assert "running" in screen
    document = json.loads((folder / "outputs" / "solo" / "plan.json").read_text())
    assert [(r["seed"], len(attempts(folder / "outputs" / "solo" / r["folder"]))) for r in document["runs"]] == [
        (0, 1),
        (1, 1),
    ]


def _in_a_terminal(folder: Path, arguments: list[str]) -> str:
    """What a person sees: the command on a pseudo-terminal of 160 columns."""
    primary, secondary = pty.openpty()
    environment = {**os.environ, "COLUMNS": "160", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ablate.run", *arguments],
        cwd=folder, env=environment, stdout=secondary, stderr=secondary, stdin=secondary,
    )  # fmt: skip
    os.close(secondary)
    seen = b""
    try:
        while block := os.read(primary, 65536):
            seen += block
    except OSError:  # the other side has closed
        pass
    assert process.wait(timeout=60) == 0, seen.decode()
    return seen.decode()


def test_a_failing_arm_stops_no_other(folder: Path) -> None:
    done = run(folder, "-m", "optim.lr=1e30,2e-4", "sweep.name=broken", *SHORT)
    assert done.returncode == 2, done.stderr
    assert "failed lr=1e+30/seed=0" in done.stdout
    assert "failed lr=1e+30/seed=0 at step 1: the policy has diverged: its logits are not finite" in done.stdout
    assert "logs/attempt-1.log" in done.stdout
    assert (folder / "outputs/broken/lr=0.0002/seed=0/done.json").is_file()
    again = run(folder, "-m", "optim.lr=1e30,2e-4", "sweep.name=broken", *SHORT)
    assert again.returncode == 2
    assert "1 of 2 runs to do" in again.stderr
    assert len(attempts(folder / "outputs/broken/lr=1e+30/seed=0")) == 2


def test_all_failed_is_told_apart(folder: Path) -> None:
    assert run(folder, "-m", "optim.lr=1e30", "sweep.name=hopeless", *SHORT).returncode == 3


def test_a_crash_is_named_with_its_log_and_the_log_has_the_traceback(folder: Path) -> None:
    # a task of one digit more than the base's positions allow crashes inside the run
    done = run(folder, "-m", "sweep.name=crash", *SHORT, "model.kv_heads=3")
    assert done.returncode == 3
    log = folder / "outputs/crash/base/seed=0/logs/attempt-1.log"
    assert str(log.relative_to(folder)) in done.stdout
    assert "Traceback" in log.read_text()
    assert "Traceback" not in done.stderr


def test_a_pilot_runs_a_few_steps_of_every_arm_apart(folder: Path, sweep: Path) -> None:
    done = run(folder, *GRID, "seed=0,1", "launch.pilot=1")
    assert done.returncode == 0, done.stderr
    pilot = sweep / "pilot"
    assert [(r.parent.name, json.loads((r / "done.json").read_text())["last_step"]) for r in runs(pilot)] == [
        (f"clip={clip},tis={tis}", 1) for clip in ("sym", "asym") for tis in ("on", "off")
    ]
    assert not (sweep / "clip=sym,tis=on" / "seed=1").exists()
    for word in ("pilot: for planning, not for answers", "s/step", "peak MiB (host)", "sd over steps"):
        assert word in done.stdout
    assert "next: python -m ablate.run clip=sym,asym tis=on,off" in done.stdout
    assert "launch.pilot" not in done.stdout.split("next:")[1]
    # another length replaces it
    assert run(folder, *GRID, "launch.pilot=2").returncode == 0
    assert {json.loads((r / "done.json").read_text())["last_step"] for r in runs(pilot)} == {2}


def test_a_launcher_that_is_killed_leaves_no_run_unwatched_and_a_second_one_changes_nothing(folder: Path) -> None:
    arguments = ["-m", "tis=on", "sweep.name=orphan", *SHORT, "train.max_steps=2000"]
    process = subprocess.Popen([sys.executable, "-m", "ablate.run", *arguments], cwd=folder, stderr=subprocess.DEVNULL)
    target = folder / "outputs/orphan/base/seed=0"
    try:
        _wait_for(lambda: len(read_lines(target / "metrics.jsonl").rows) > 2)
        before = (folder / "outputs/orphan/plan.json").read_text()
        second = run(folder, *arguments[:1], "tis=on,off", *arguments[2:])
    finally:
        process.kill()
    assert second.returncode == 1
    assert "sweep orphan is held by process" in second.stderr
    assert (folder / "outputs/orphan/plan.json").read_text() == before
    _wait_for(lambda: not (target / "lock").exists())
    assert attempts(target)[-1]["outcome"] == "stopped"


def _wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_starts(folder: Path, sweep: Path) -> None:
    target = runs(sweep)[1]
    (target / "done.json").unlink()
    description = target / "checkpoints" / "step_4" / "engine.json"
    whole = description.read_text()
    other = json.loads(whole)
    name = next(iter(other["parameters"]))
    other["parameters"][name] = [1, 2, 3]
    description.write_text(json.dumps(other))
    done = run(folder, *GRID)
    assert done.returncode == 1
    assert "does not fit the model in outputs/.bases" in done.stderr
    assert f"{name} has shape [1, 2, 3] in the checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    description.write_text(whole)
    done = run(folder, *GRID, "cluster.ranks_per_node=2")
    assert done.returncode == 1
    assert "saved by 1 ranks, this command has 2; set cluster.ranks_per_node=1" in done.stderr
    assert run(folder, *GRID).returncode == 0


def test_select_prints_and_stores_the_table(folder: Path, sweep: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ablate.cli", "select", "outputs/demo"],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.count("reported: ") == 4
    stored = json.loads((runs(sweep)[0] / "selection.json").read_text())
    assert stored["reported"]["step"] == 4
    assert [c["step"] for c in stored["candidates"]] == [4]
