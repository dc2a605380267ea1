"""A sweep as tidy tables: one row per run, one row per rollout step. Imports no torch.

runs    arm, one column per factor, seed, state, reported_step and the outcomes the statistics compare
steps   arm, one column per factor, seed, step, every scalar of metrics.jsonl (updates averaged as update/<key>)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from ablate.errors import UsageError
from ablate.record import Row, read_lines
from ablate.runs import State, load_config, read_plan, state
from ablate.select import Selection, curve, ema, select_run
from ablate.validity.curves import step_tags
from ablate.validity.records import RunRecord, load_record

OUTCOMES = ("heldout_reported", "ema_reported", "auc", "final", "steps_to_threshold")


@dataclass(frozen=True)
class RunData:
    """One run as its folder tells it: `digest` is what the plan wants there, `torn` counts unreadable rows."""

    path: Path
    digest: str
    record: RunRecord
    state: State
    selection: Selection
    torn: int

    @property
    def name(self) -> str:
        return self.record.folder


@dataclass(frozen=True)
class SweepData:
    """A sweep's plan.json and its runs; `problems` says what could not be read and what was shown instead."""

    folder: Path
    document: dict[str, Any]
    runs: tuple[RunData, ...]
    problems: tuple[str, ...]

    @property
    def name(self) -> str:
        return str(self.document["name"])

    @property
    def factors(self) -> list[str]:
        return list(self.document["factors"])

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(r["arm"] for r in self.document["runs"]))


def load_sweep(folder: Path) -> SweepData:
    """Read a sweep, whole or half-written; a run that cannot be read is a problem to show, not an error.

    Raises:
        UsageError: `folder` holds no plan.json, or one that is no plan.
    """
    document = read_plan(folder)
    if not document["runs"]:
        raise UsageError(f"{folder}: its plan.json plans no run")
    runs: list[RunData] = []
    problems: list[str] = []
    for planned in document["runs"]:
        where = folder / str(planned.get("folder"))
        if not (where / "config.yaml").is_file():
            problems.append(f"{planned.get('folder')}: not started")
            continue
        try:
            run = _load_run(where, planned)
        except UsageError as error:
            problems.append(str(error))
            continue
        runs.append(run)
        problems += _run_problems(run)
    return SweepData(folder, document, tuple(runs), tuple(problems))


def _load_run(where: Path, planned: Mapping[str, Any]) -> RunData:
    config = load_config(where)
    record = load_record(where, str(planned["arm"]), int(planned["seed"]), dict(planned["levels"]), config)
    lines = read_lines(where / "metrics.jsonl")
    torn = lines.torn + len(lines.rows) - len(record.all_rows)
    current = state(where, config.train.max_steps)
    return RunData(where, str(planned["digest"]), record, current, select_run(where, config), torn)


def _run_problems(run: RunData) -> list[str]:
    name, rows = run.name, run.record.rows
    found = []
    written = (run.path / "digest").read_text().strip() if (run.path / "digest").is_file() else "none"
    if written != run.digest:
        found.append(f"{name}: the folder holds digest {written}, the plan wants {run.digest}: another run's records")
    if run.torn:
        found.append(f"{name}: {run.torn} torn or unreadable row(s) of metrics.jsonl left out")
    if rows[1:] and all(r.get("reward/mean") is None for r in rows):
        found.append(f"{name}: no row has reward/mean")
    if run.state.word != "done":
        found.append(f"{name}: {run.state.word} at step {run.state.step}/{run.state.max_steps}, shown as far as it got")
    return found


def runs_table(sweep: SweepData, threshold: float) -> pd.DataFrame:
    """One row per run. `steps_to_threshold` is the first step whose EMA reward reaches `threshold` (`reached` says if).

    Outcomes: heldout_reported (primary) and ema_reported at the reported step; auc, the mean reward over all rollout
    steps; final, the held-out score last measured.
    """
    return pd.DataFrame([_run_row(run, threshold) for run in sweep.runs])


def _run_row(run: RunData, threshold: float) -> dict[str, Any]:
    rewards = curve(run.record.rows)
    steps = sorted(rewards)
    averages = ema([rewards[s] for s in steps], run.record.config.select.span)
    over = [s for s, average in zip(steps, averages, strict=True) if average >= threshold]
    heldout = [float(r["heldout/greedy"]) for r in run.record.rows if r.get("heldout/greedy") is not None]
    reported = run.selection.reported
    return {
        "arm": run.record.arm,
        **run.record.levels,
        "seed": run.record.seed,
        "state": run.state.word,
        "steps": steps[-1] if steps else 0,
        "reported_step": reported.step if reported else None,
        "ema_reported": reported.ema if reported else None,
        "heldout_start": _at(run.record.rows, 0),
        "heldout_reported": reported.heldout if reported else None,
        "auc": fmean(rewards.values()) if rewards else None,
        "final": heldout[-1] if heldout else None,
        "steps_to_threshold": over[0] if over else (steps[-1] if steps else None),
        "reached": bool(over),
        "attempts": len(run.record.attempts),
        "digest": run.digest,
    }


def _at(rows: Iterable[Row], step: int) -> float | None:
    return next((r["heldout/greedy"] for r in rows if r["step"] == step and r.get("heldout/greedy") is not None), None)


def steps_table(sweep: SweepData) -> pd.DataFrame:
    """One row per run and rollout step, with `ema` beside the raw reward and the step's `tags`."""
    rows = [row for run in sweep.runs for row in _step_rows(run)]
    return pd.DataFrame(rows)


def _step_rows(run: RunData) -> list[dict[str, Any]]:
    rewards = curve(run.record.rows)
    steps = sorted(rewards)
    averages = dict(zip(steps, ema([rewards[s] for s in steps], run.record.config.select.span), strict=True))
    tags = step_tags(run.record)
    return [
        {
            "arm": run.record.arm,
            **run.record.levels,
            "seed": run.record.seed,
            "ema": averages.get(int(row["step"])),
            "tags": ",".join(tags.get(int(row["step"]), ())),
            **_scalars(row),
        }
        for row in run.record.rows
    ]


def _scalars(row: Row) -> dict[str, Any]:
    flat = {k: v for k, v in row.items() if not isinstance(v, (list, dict))}
    updates: Sequence[Row] = row.get("updates") or ()
    keys = dict.fromkeys(k for u in updates for k in u)
    for key in keys:
        values = [float(u[key]) for u in updates if u.get(key) is not None]
        flat[f"update/{key}"] = fmean(values) if values else None
    return flat


def newest_sweep(output: Path = Path("outputs")) -> Path:
    """The sweep planned last below `output`; $ABLATE_SWEEP names another one.

    Raises:
        UsageError: there is none.
    """
    if named := os.environ.get("ABLATE_SWEEP"):
        return Path(named)
    plans = sorted(output.glob("*/plan.json"), key=lambda p: p.stat().st_mtime)
    if not plans:
        raise UsageError(f"{output}: holds no sweep; run one (make demo) or set ABLATE_SWEEP to a sweep's folder")
    return plans[-1].parent
