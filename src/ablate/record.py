"""The record of a run: append-only JSON lines, rollouts as parquet, lineage. Our files are the truth. Imports no torch.

metrics.jsonl    one row per (attempt, rollout_step), the same keys in every row; step 0 holds the evaluation only
attempts.jsonl   one row when an attempt starts and one when it ends
rollouts/        one parquet file per checkpoint interval, written with the checkpoint
done.json        last written; without it the run has work left
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ablate.files import fsync_folder, now

Row = dict[str, Any]


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row and fsync it. A torn last line of a killed writer is ended first, so that it spoils no new row."""
    with path.open("a+b") as stream:
        if stream.tell() and _last_byte(stream) != b"\n":
            stream.write(b"\n")
        stream.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def _last_byte(stream: Any) -> bytes:
    stream.seek(-1, os.SEEK_END)
    return bytes(stream.read(1))


def finite(row: Mapping[str, Any]) -> Row:
    """The row as valid JSON: NaN and infinities become null, and `nonfinite` lists their keys."""
    bad: list[str] = []

    def clean(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: clean(f"{key}/{k}" if key else str(k), v) for k, v in value.items()}
        if isinstance(value, list):
            return [clean(f"{key}.{i}", v) for i, v in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            bad.append(key)
            return None
        return value

    return {**clean("", row), "nonfinite": bad}


@dataclass(frozen=True)
class Lines:
    """What a JSON lines file holds: whole rows in file order, and how many lines could not be read."""

    rows: list[Row]
    torn: int


def read_lines(path: Path) -> Lines:
    """Every whole row of an append-only file; a torn line (a kill while writing) is counted and dropped."""
    lines = [line for line in path.read_bytes().splitlines() if line.strip()] if path.is_file() else []
    try:
        # one document is read faster than its lines, and holds each key once
        values = json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        values = []
    if len(values) != len(lines):
        values = [_loaded(line) for line in lines]
    rows = [value for value in values if isinstance(value, dict)]
    return Lines(rows, len(lines) - len(rows))


def _loaded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def lineage(rows: Iterable[Row]) -> list[Row]:
    """One row per rollout step, in order of steps: the last attempt's, because the kept weights come from it."""
    latest: dict[int, Row] = {}
    for row in rows:
        if not isinstance(row.get("step"), int) or not isinstance(row.get("attempt"), int):
            continue
        step = int(row["step"])
        if step not in latest or int(row["attempt"]) >= int(latest[step]["attempt"]):
            latest[step] = row
    return [latest[step] for step in sorted(latest)]


def read_metrics(run: Path) -> list[Row]:
    """The run's curve: one row per rollout step, last attempt wins."""
    return lineage(read_lines(run / "metrics.jsonl").rows)


def attempts(run: Path) -> list[Row]:
    """One row per attempt: its start, joined with its end if it reached one."""
    joined: dict[int, Row] = {}
    for row in read_lines(run / "attempts.jsonl").rows:
        if isinstance(number := row.get("attempt"), int):
            joined[number] = {**joined.get(number, {}), **row}
    return [joined[k] for k in sorted(joined)]


def next_attempt(run: Path) -> int:
    """The number that the next attempt will have, from 1 on."""
    return max((int(a["attempt"]) for a in attempts(run)), default=0) + 1


def start_attempt(run: Path, job: str | None) -> int:
    """Number this attempt and write that it started."""
    number = next_attempt(run)
    append_line(run / "attempts.jsonl", {"attempt": number, "job": job, "pid": os.getpid(), "started": now()})
    return number


def end_attempt(run: Path, number: int, outcome: str, last_step: int, error: str | None = None) -> None:
    """Write how an attempt ended: `done`, `failed` or `stopped`."""
    row = {"attempt": number, "outcome": outcome, "last_step": last_step, "ended": now(), "error": error}
    append_line(run / "attempts.jsonl", row)


def append_row(run: Path, attempt: int, row: Mapping[str, Any]) -> None:
    """Append one row of metrics.jsonl for a rollout step."""
    job = os.environ.get("SLURM_JOB_ID")
    append_line(run / "metrics.jsonl", {"attempt": attempt, "job": job, "time": now(), **finite(row)})


def hash_ids(ids: Iterable[int]) -> str:
    """A short fingerprint of prompt ids in order: paired arms must agree on it at every rollout step."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


ROLLOUT_COLUMNS = (
    "step", "prompt_id", "sample", "prompt_ids", "response_ids", "logprobs", "prompt", "response", "reward",
    "advantage", "finish_reason", "policy_version",
)  # fmt: skip


def write_rollouts(run: Path, first: int, last: int, rows: Sequence[Row]) -> None:
    """Rollouts of steps `first`..`last` as one parquet file, written beside and renamed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = run / "rollouts"
    folder.mkdir(exist_ok=True)
    path = folder / f"{first:06d}-{last:06d}.parquet"
    beside = folder / f".{path.name}.tmp"
    table = pa.table({name: [row[name] for row in rows] for name in ROLLOUT_COLUMNS})
    with beside.open("wb") as stream:
        pq.write_table(table, stream, compression="zstd")
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(path)
    fsync_folder(folder)
