"""W&B's files, read back and compared with metrics.jsonl: after kills, after resumes, and when W&B cannot be used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mirror_support import (
    SWEEP,
    expected,
    history,
    lines,
    make_run,
    records,
    wait_for,
    wandb_folders,
    without_clock,
    write_step,
)

from ablate import files, record
from ablate.errors import UsageError
from ablate.mirror import end_mirrors, start_mirror
from ablate.sync import sync

pytestmark = pytest.mark.slow


def finish(run: Path, attempt: int, step: int, outcome: str = "done") -> None:
    record.end_attempt(run, attempt, outcome, step)
    if outcome == "done":
        files.write_json(run / "done.json", {"outcome": "done", "last_step": step})


def mirror(run: Path, attempt: int | None = None, mode: str = "offline") -> subprocess.Popen[bytes]:
    process = start_mirror(run, mode, attempt)
    assert process is not None
    return process


def same_as_the_record(run: Path, folder: Path) -> None:
    rows = lines(run)
    seen = history(folder)
    assert without_clock(seen) == [expected(row) for row in rows]
    assert [item["_step"] for item in seen] == list(range(len(rows)))


def test_a_run_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under an environment that would make another run of it."""
    for name, value in {
        "WANDB_RUN_ID": "evil", "WANDB_SWEEP_ID": "evil", "WANDB_MODE": "disabled", "WANDB_TAGS": "evil",
        "WANDB_NAME": "evil", "WANDB_RESUME": "must", "WANDB_DIR": str(tmp_path / "evil"), "WANDB_PROJECT": "evil",
        "HOME": str(tmp_path / "missing"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    run = make_run(tmp_path / SWEEP, project="some project", tags=["mine"])
    before = time.monotonic()
    process = mirror(run, 1)
    assert time.monotonic() - before < 1.0
    assert os.getsid(process.pid) != os.getsid(0)
    assert record.start_attempt(run, None) == 1
    for step in range(6):
        write_step(run, 1, step)
        time.sleep(0.3)
    finish(run, 1, 5)
    assert end_mirrors({run: process}, 60) == [] and process.returncode == 0
    assert (run / "logs" / "mirror.log").read_text() == ""
    (folder,) = wandb_folders(run)
    same_as_the_record(run, folder)
    said = {r["type"]: r[r["type"]] for r in records(folder) if r["type"] in ("run", "exit")}
    assert said["run"]["run_group"] == SWEEP and said["run"]["project"] == "some project"
    assert said["run"]["job_type"] == "clip=sym,tis=on" and said["run"]["display_name"] == "clip=sym,tis=on/seed=0"
    assert {"clip=sym", "seed=0", "mine"} < set(said["run"]["tags"]) and "evil" not in said["run"]["tags"]
    assert said["run"]["run_id"] in folder.name and "evil" not in said["run"]["run_id"]
    assert said["run"]["config"]["update"]["clip"] == {"name": "clip", "clip_low": 0.2}
    assert said["exit"].get("exit_code", 0) == 0
    metrics = [r["metric"] for r in records(folder) if r["type"] == "metric"]
    assert {"glob_name": "*", "options": {"defined": True, "step_sync": True}, "step_metric": "rollout_step"} in metrics


def test_a_killed_mirror_has_lost_next_to_nothing_and_the_next_one_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / SWEEP)
    record.start_attempt(run, None)
    process = mirror(run, 1)
    for step in range(5):
        write_step(run, 1, step)
    wait_for(lambda: wandb_folders(run) and len(history(wandb_folders(run)[0])) == 5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (killed,) = wandb_folders(run)
    assert without_clock(history(killed)) == [expected(row) for row in lines(run)]
    write_step(run, 1, 5)
    second = mirror(run, 1)
    write_step(run, 1, 6)
    finish(run, 1, 6)
    assert second.wait(60) == 0
    (whole,) = wandb_folders(run)
    assert whole != killed
    same_as_the_record(run, whole)


def three_attempts(run: Path, *, kill_mirrors: bool) -> None:
    """1: steps 0-7, killed while writing; 2: resumes after step 4, fails at 9; 3: resumes after step 6, to the end."""
    for attempt, first, last in ((1, 0, 7), (2, 5, 9), (3, 7, 12)):
        process = mirror(run, attempt)
        assert record.start_attempt(run, None) == attempt
        for step in range(first, last + 1):
            write_step(run, attempt, step)
        if attempt == 1:
            with (run / "metrics.jsonl").open("ab") as stream:
                stream.write(b'{"attempt": 1, "step": 8, "rew')
        if kill_mirrors and attempt < 3:
            wait_for(lambda: wandb_folders(run))
            process.kill()
        finish(run, attempt, last, "done" if attempt == 3 else "failed")
        assert (process.wait(60) == 0) != (kill_mirrors and attempt < 3)


@pytest.mark.parametrize("kill_mirrors", [False, True], ids=["mirrors end", "mirrors killed"])
def test_two_resumes(tmp_path: Path, kill_mirrors: bool) -> None:
    """Steps that go back are all there in the mirrored run; the rebuilt one is the lineage."""
    run = make_run(tmp_path / SWEEP)
    three_attempts(run, kill_mirrors=kill_mirrors)
    whole = [line for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    assert len(whole) == 8 + 5 + 6
    (folder,) = wandb_folders(run)
    seen = history(folder)
    rows = record.read_lines(run / "metrics.jsonl").rows
    assert without_clock(seen) == [expected(row) for row in rows]
    assert [i["rollout_step"] for i in seen] == [*range(8), *range(5, 10), *range(7, 13)]
    assert [i["_step"] for i in seen] == [*range(8), *range(9, 20)]  # line 8 is the torn one

    (line,) = sync(tmp_path / SWEEP)
    command, verb, path = line.split(" ", 2)
    assert (command, verb) == ("wandb", "sync")
    clean = history(Path(path.strip("'")))
    attempt_of = dict.fromkeys(range(5), 1) | dict.fromkeys((5, 6), 2) | dict.fromkeys(range(7, 13), 3)
    by_key = {(row["attempt"], row["step"]): row for row in rows}
    assert without_clock(clean) == [expected(by_key[attempt_of[step], step]) for step in range(13)]
    assert [i["_step"] for i in clean] == list(range(13))
    clock = [by_key[attempt_of[step], step]["time"] for step in range(13)]
    assert [time.strftime("%H:%M:%S", time.gmtime(i["_timestamp"])) for i in clean] == [t[11:19] for t in clock]
    ids = {r["run"]["run_id"] for f in (folder, Path(path.strip("'"))) for r in records(f) if r["type"] == "run"}
    assert len(ids) == 1


def test_sync_rebuilds_every_run_and_replaces_what_it_built(tmp_path: Path) -> None:
    sweep = tmp_path / "with space"
    runs = [make_run(sweep, arm, seed) for arm in ("a b'c;$(d)", "y" * 90) for seed in (0, 1)]
    make_run(sweep, "not started")
    for run in runs:
        for step in range(3):
            write_step(run, 1, step)
    first = sync(sweep)
    again = sync(sweep)
    assert len(first) == len(again) == 4
    assert sorted(p.name for p in sweep.glob("*wandb*")) == ["wandb"] and not (sweep / "sync.lock").exists()
    dry = subprocess.run(
        f"PATH={Path(sys.executable).parent}:$PATH; " + "; ".join(f"{line} --dry-run" for line in again),
        shell=True, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = dry.stdout + dry.stderr
    for line, run in zip(again, runs, strict=True):
        folder = Path(line.removeprefix("wandb sync ").strip("'"))
        assert folder.parent == sweep / "wandb" and f"{folder.name}/run-" in said
        assert without_clock(history(folder)) == [expected(row) for row in lines(run)]


def test_sync_says_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no sweep \(plan.json\)"):
        sync(tmp_path)
    run = make_run(tmp_path / SWEEP)
    with pytest.raises(UsageError, match="no run has a recorded row"):
        sync(tmp_path / SWEEP)
    write_step(run, 1, 0)
    (line,) = sync(tmp_path / SWEEP)
    monkeypatch.setenv("PYTHONPATH", str(broken_wandb(tmp_path)))
    with pytest.raises(UsageError, match="no binary here"):
        sync(tmp_path / SWEEP)
    assert Path(line.removeprefix("wandb sync ")).is_dir(), "a failed sync keeps what an earlier one built"
    assert sorted(p.name for p in (tmp_path / SWEEP).glob("*wandb*")) == ["wandb"]


def broken_wandb(folder: Path) -> Path:
    (folder / "broken" / "wandb").mkdir(parents=True)
    (folder / "broken" / "wandb" / "__init__.py").write_text("raise ImportError('wandb-core:\\nno binary here')\n")
    return folder / "broken"


def a_file_in_the_way(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "wandb").write_text("")


def broken_package(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(broken_wandb(run.parents[2])))


def broken_settings(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "never")


def bad_project(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("wandb: {}", "wandb: {project: 'a/b'}"))


def no_config(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "config.yaml").unlink()


@pytest.mark.parametrize("fault", [a_file_in_the_way, broken_package, broken_settings, bad_project, no_config])
def test_an_unusable_wandb_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    run = make_run(tmp_path / SWEEP)
    fault(run, monkeypatch)
    process = mirror(run, 1)
    for step in range(3):
        write_step(run, 1, step)
    (warning,) = end_mirrors({run: process}, 60)
    assert process.returncode == 1 and f"{run}/logs/mirror.log" in warning
    (said,) = (run / "logs" / "mirror.log").read_text().splitlines()
    assert "W&B cannot be used" in said and "Traceback" not in said
    assert [row["step"] for row in lines(run)] == [0, 1, 2]


def test_the_death_of_wandbs_own_process_is_said_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / SWEEP)
    record.start_attempt(run, None)
    process = mirror(run, 1)
    write_step(run, 1, 0)
    wait_for(lambda: wandb_folders(run))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    cores = [int(pid) for pid in children if "wandb-core" in Path(f"/proc/{pid}/comm").read_text()]
    assert cores
    for pid in cores:
        os.kill(pid, signal.SIGKILL)
    write_step(run, 1, 1)
    finish(run, 1, 1)
    assert process.wait(60) == 1
    said = (run / "logs" / "mirror.log").read_text().splitlines()
    assert len([line for line in said if "W&B cannot be used" in line]) == 1 and len(said) <= 3, said
    write_step(run, 1, 2)
    assert [row["step"] for row in lines(run)] == [0, 1, 2]


def test_no_account_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Online without a key is refused at once by W&B; nobody is asked for one."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    run = make_run(tmp_path / SWEEP)
    process = mirror(run, 1, "online")
    assert process.wait(120) == 1
    assert len((run / "logs" / "mirror.log").read_text().splitlines()) == 1


def test_nothing_is_started_when_disabled_or_impossible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / SWEEP)
    assert start_mirror(run, "disabled") is None and not (run / "logs").exists()
    (run / "logs").write_text("")
    assert start_mirror(run, "offline") is None
    assert "no W&B mirror" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["parent dies", "SIGTERM", "folder removed"])
def test_a_mirror_whose_run_has_no_end_ends_by_itself(tmp_path: Path, how: str) -> None:
    run = make_run(tmp_path / SWEEP)
    record.start_attempt(run, None)
    write_step(run, 1, 0)
    program = (
        "import sys, time; from pathlib import Path; from ablate.mirror import start_mirror; "
        "print(start_mirror(Path(sys.argv[1]), 'offline', 1).pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(run)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        wait_for(lambda: wandb_folders(run))
        os.kill(pid, signal.SIGHUP)  # not meant for it
        os.kill(pid, signal.SIGUSR1)
        time.sleep(1.5)
        assert running(pid)
        if how == "parent dies":
            parent.kill()
        elif how == "SIGTERM":
            os.kill(pid, signal.SIGTERM)
        else:
            (tmp_path / SWEEP).rename(tmp_path / "elsewhere")
        wait_for(lambda: not running(pid), 30)
    finally:
        parent.kill()
        parent.wait()
    moved = tmp_path / "elsewhere" / run.relative_to(tmp_path / SWEEP)
    if how != "folder removed":
        same_as_the_record(run, wandb_folders(run)[0])
    else:
        assert [row["step"] for row in lines(moved)] == [0]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_training_works_where_wandb_cannot_be_imported() -> None:
    """Nothing that a trainer's process loads needs wandb, nor does what starts a mirror."""
    program = (
        "import sys; sys.modules['wandb'] = None; import ablate.train, ablate.launch.worker; "
        "import ablate.mirror, ablate.sync; print([m for m in sys.modules if m.split('.')[0].startswith('wandb')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['wandb']"
