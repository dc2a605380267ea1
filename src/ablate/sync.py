"""`ablate sync`: each run of a sweep rebuilt from its records as one clean W&B run, by a process that imports wandb."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ablate import files, record
from ablate.errors import UsageError
from ablate.mirror import close_run, give_up, open_run
from ablate.wandb_view import identity, scalars, written_at


def sync(sweep: Path) -> list[str]:
    """Rebuild every run of a sweep as one clean offline W&B run in <sweep>/wandb; returns a `wandb sync` line for each.

    A run is its lineage: one row per rollout step, the last attempt's, with the rollout step as W&B's step too. What an
    earlier call built there is replaced.

    Raises:
        UsageError: no sweep, no row recorded yet, or W&B cannot be used.
    """
    if not (sweep / "plan.json").is_file():
        raise UsageError(f"{sweep}: no sweep (plan.json); give the folder of a sweep")
    with files.locked(sweep / "sync.lock", f"sync of {sweep}"):
        fresh, target = sweep / f".wandb.{os.getpid()}", sweep / "wandb"
        try:
            for left in sweep.glob(".wandb.*"):  # by a sync that was killed
                shutil.rmtree(left)
            command = [sys.executable, "-m", "ablate.sync", str(sweep), str(fresh)]
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
            if done.returncode:
                raise UsageError(f"{sweep}: {(done.stderr.strip() or 'the mirror failed').splitlines()[-1]}")
            target.mkdir(exist_ok=True)
            for old in target.glob("offline-run-*"):
                shutil.rmtree(old)
            built = [(fresh / "wandb" / name).rename(target / name) for name in done.stdout.split()]
        except OSError as error:
            raise UsageError(f"{target}: cannot be written ({error.strerror})") from None
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    if not built:
        raise UsageError(f"{sweep}: no run has a recorded row yet")
    return [f"wandb sync {shlex.quote(str(path.resolve()))}" for path in built]


def rebuild(sweep: Path, into: Path) -> Iterator[str]:
    """Write each recorded run of a sweep below `into`, in the order of the plan; yields the names of their folders."""
    for entry in files.read_json(sweep / "plan.json")["runs"]:
        folder = sweep / entry["folder"]
        rows = record.read_metrics(folder) if (folder / "config.yaml").is_file() else []
        if rows:
            run = open_run(identity(folder), into, "offline")
            for row in rows:
                run.log({**scalars(row), **written_at(row)}, step=int(row["step"]), commit=True)
            close_run(run, folder)
            yield Path(run.settings.sync_dir).name


def main(sweep: str, into: str) -> int:
    """The process that holds wandb: prints the folder of each run it wrote, or one line on stderr that says why not."""
    try:
        for name in rebuild(Path(sweep).resolve(), Path(into).resolve()):
            print(name, flush=True)
    except BaseException as error:  # wandb raises of every kind
        give_up(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
