"""Writing so that a kill at any instant leaves the old content or the new one, and one live owner per folder.

Imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from ablate.errors import UsageError


def now() -> str:
    """UTC, ISO 8601, to the millisecond; a record, never an identity."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def fsync_folder(folder: Path) -> None:
    """Make a rename or a new name inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """As `replaced`, with the whole content at once."""
    with replaced(path) as stream:
        stream.write(text.encode())


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content takes the place of `path` at the end: written beside, fsynced, renamed.

    Raises:
        UsageError: the folder cannot be written or the disk is full; the message names the path.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written ({error.strerror}); free space or choose another output="
        ) from None
    finally:
        if beside.parent.is_dir():
            beside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """One JSON document, readable by a person."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The document at `path`.

    Raises:
        UsageError: not there, or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: not there") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from None


def _start_time(pid: int) -> int | None:
    """Kernel ticks at which a process started: tells a reused pid from the one that took the lock."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _holder_lives(holder: dict[str, Any]) -> bool:
    if holder["host"] != socket.gethostname():
        return True  # cannot be known from here
    return holder["start"] is not None and _start_time(holder["pid"]) == holder["start"]


def holder_of(path: Path) -> dict[str, Any] | None:
    """Who holds the lock at `path`, if whoever took it may still live."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return holder if _holder_lives(holder) else None


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold `path` as the only live owner of `what`; a lock left by a dead process of this host is taken over.

    Raises:
        UsageError: another live process holds it.
    """
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "start": _start_time(os.getpid()), "since": now()}
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    write_text(beside, json.dumps(mine))
    try:
        _take(beside, path, what)
    finally:
        beside.unlink(missing_ok=True)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _take(beside: Path, path: Path, what: str) -> None:
    for _ in range(3):
        try:
            os.link(beside, path)  # atomic: the lock appears with its content, or not at all
            return
        except FileExistsError:
            holder = holder_of(path)
            if holder is not None:
                raise UsageError(
                    f"{what} is held by process {holder['pid']} on {holder['host']} since {holder['since']}; "
                    f"wait for it, or if that process is gone: rm '{path}'"
                ) from None
            path.unlink(missing_ok=True)
            time.sleep(0.05)
    raise UsageError(f"{what}: two processes contend for {path}; try again")
