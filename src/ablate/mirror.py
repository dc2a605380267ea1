"""W&B as a mirror of metrics.jsonl, kept by a process of its own. Imports no torch, and wandb only in that process.

    python -m ablate.mirror RUN_FOLDER        follows a run until it has ended

The records are the truth. The trainer neither imports wandb nor talks to the mirror: a mirror that fails, hangs or is
killed changes nothing but what W&B shows, and `sync` rebuilds that from the records at any time.

A row's W&B step is its line number in metrics.jsonl. Lines are only ever appended, so a resumed attempt whose rollout
steps go back is still ahead for W&B, which drops rows that are not; charts use `rollout_step` as their axis.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from ablate import files, record
from ablate.wandb_view import AXIS, Identity, identity, scalars, written_at

_POLL_SECONDS = 0.5
_FINISH_SECONDS = 300.0
# These would make another run of the one described here; a set WANDB_SWEEP_ID even replaces its id and project.
_FOREIGN = (
    "WANDB_DISABLED", "WANDB_DIR", "WANDB_JOB_TYPE", "WANDB_LAUNCH", "WANDB_MODE", "WANDB_NAME", "WANDB_NOTES",
    "WANDB_PROJECT", "WANDB_RESUME", "WANDB_RUN_GROUP", "WANDB_RUN_ID", "WANDB_SERVICE", "WANDB_SWEEP_ID",
    "WANDB_SWEEP_PARAM_PATH", "WANDB_TAGS",
)  # fmt: skip


@dataclass
class Tail:
    """The whole lines that were appended to a file since the last look, numbered from 0 over the file."""

    path: Path
    offset: int = 0
    number: int = 0

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """A last line without its end is left for the next look."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                yield self.number, line
                self.offset += len(line)
                self.number += 1


def start_mirror(folder: Path, mode: str, attempt: int | None = None) -> subprocess.Popen[bytes] | None:
    """Start the mirror of a run without waiting for it; None if there is nothing to start or it cannot be started.

    It has a session of its own, so that no signal to the caller's group reaches it, and ends by itself soon after
    `attempt` (None: the newest) has its end in attempts.jsonl, done.json appears or the calling process is gone.
    Never raises an OSError: training does not depend on it.
    """
    if mode == "disabled":
        return None
    command = [sys.executable, "-m", "ablate.mirror", str(folder), "--mode", mode, "--parent", str(os.getpid())]
    command += [] if attempt is None else ["--attempt", str(attempt)]
    try:
        (folder / "logs").mkdir(exist_ok=True)
        with (folder / "logs" / "mirror.log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )  # fmt: skip
    except OSError as error:
        print(f"{folder}: no W&B mirror ({error}); training goes on", file=sys.stderr, flush=True)
        return None


def end_mirrors(mirrors: Mapping[Path, subprocess.Popen[bytes]], seconds: float = 10.0) -> list[str]:
    """Give the mirrors of ended runs (by run folder) a moment to finish; a line for each that failed."""
    until = time.monotonic() + seconds
    for mirror in mirrors.values():
        try:
            mirror.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            continue  # it goes on alone, in its own session
    failed = [folder for folder, mirror in mirrors.items() if mirror.returncode]
    return [
        f"{folder}: its W&B mirror failed, the record is complete; see {folder}/logs/mirror.log" for folder in failed
    ]


def follow(folder: Path, mode: Literal["offline", "online"], attempt: int | None, parent: int | None) -> None:
    """Log every row as it is written, until the run has ended; then finish the W&B run.

    Offline, every mirror starts from line 0 in a folder of its own, so the newest always holds the whole run and the
    older ones go once it is finished. Online, W&B says with which line to go on.
    """
    stop: list[int] = []
    for asked in (signal.SIGTERM, signal.SIGINT):
        signal.signal(asked, lambda n, _: stop.append(n))
    for ignored in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)  # they are meant for the trainer
    who, tail = identity(folder), Tail(folder / "metrics.jsonl")
    run = open_run(who, folder, mode)
    last = False
    while not last:
        # asked before reading: what was written before the end is then read after it
        last = bool(stop) or _ended(folder, attempt) or (parent is not None and os.getppid() != parent)
        for number, line in tail.lines():
            if number >= run.starting_step:
                _log(run, number, line)
        time.sleep(0.0 if last else _POLL_SECONDS)
    _give_up_after(_FINISH_SECONDS)
    close_run(run, folder)
    for old in (folder / "wandb").glob(f"offline-run-*-{who.id}-*"):
        if old != Path(run.settings.sync_dir):
            shutil.rmtree(old, ignore_errors=True)


def open_run(who: Identity, folder: Path, mode: Literal["offline", "online"]) -> Any:
    """A W&B run whose files lie in `folder`/wandb; the folder must be absolute."""
    for name in _FOREIGN:
        os.environ.pop(name, None)
    os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    import wandb

    (folder / "wandb").mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(
        console="off", disable_code=True, disable_git=True, save_code=False, silent=True, symlink=False,
        use_dot_wandb=False, x_disable_meta=True, x_disable_stats=True, x_save_requirements=False,
        # killed with the default of 15 s, a run loses its last rows; two that start in one second share a folder
        x_transaction_log_flush_interval=1.0, x_sync_dir_suffix=str(os.getpid()),
    )  # fmt: skip
    run = wandb.init(
        id=who.id, name=who.name, group=who.group, job_type=who.job_type, project=who.project, entity=who.entity,
        tags=who.tags, config=who.config, dir=folder, mode=mode, resume="allow" if mode == "online" else None,
        reinit="create_new", settings=settings,
    )  # fmt: skip
    if not Path(run.settings.sync_dir).is_relative_to(folder):  # it falls back to a temporary folder, silently
        raise OSError(f"{folder}/wandb: cannot be written")
    run.define_metric(AXIS)
    run.define_metric("*", step_metric=AXIS)
    return run


def _log(run: Any, number: int, line: bytes) -> None:
    try:
        row = json.loads(line)
        values: dict[str, float] = scalars(row)
    except (ValueError, TypeError, KeyError, AttributeError):  # a kill tore it
        return
    run.log({**values, **written_at(row)}, step=number, commit=True)


def _ended(folder: Path, attempt: int | None) -> bool:
    tries = record.attempts(folder)
    watched = tries[-1:] if attempt is None else [a for a in tries if int(a["attempt"]) >= attempt]
    return (folder / "done.json").is_file() or any("outcome" in a for a in watched) or not folder.is_dir()


def close_run(run: Any, folder: Path) -> None:
    """Finish a W&B run with the outcome that the record of `folder` has; W&B's own logs of it go."""
    failed = any(a.get("outcome") == "failed" for a in record.attempts(folder)[-1:])
    run.finish(exit_code=int(failed))
    for scratch in ("logs", "tmp"):
        shutil.rmtree(Path(run.settings.sync_dir) / scratch, ignore_errors=True)


def _give_up_after(seconds: float) -> None:
    """W&B may wait for its server without end."""
    timer = threading.Timer(seconds, give_up, (TimeoutError(f"not finished after {seconds:.0f} s"),))
    timer.daemon = True
    timer.start()


def give_up(error: BaseException) -> NoReturn:
    """Say once what W&B could not do, and end here: its own handlers at exit would wait and print tracebacks."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    print(f"{files.now()} W&B cannot be used ({text}); the records are complete", file=sys.stderr, flush=True)
    os._exit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """The mirror process; returns 0, or ends with 1 after one line that says what W&B could not do."""
    parser = argparse.ArgumentParser(prog="python -m ablate.mirror", description="Mirror a run to W&B.")
    parser.add_argument("folder", type=Path, help="a run's folder")
    parser.add_argument("--mode", choices=("offline", "online"), default="offline")
    parser.add_argument("--attempt", type=int, help="end when this attempt has ended (default: the newest)")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    try:
        if parsed.parent is not None:
            os.nice(10)  # the trainer goes first
        follow(parsed.folder.resolve(), parsed.mode, parsed.attempt, parsed.parent)
    except BaseException as error:  # wandb raises of every kind; whatever it is, it is said once and ends here
        give_up(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
