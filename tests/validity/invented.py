"""Records of runs that never ran, in memory: a healthy sweep of the default with changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ablate.compose import Composer
from ablate.plan import Run, make_plan
from ablate.validity import RunRecord
from fake_sweep import metrics_row

CODE = {"ablate": "0.1.0", "commit": "3f0c", "dirty": None, "machine": "x86_64", "versions": {"torch": "2.13"}}


def rising(run: Run, step: int) -> float:
    """Learns from .2 to .85 with noise of a hundredth."""
    noise = np.random.default_rng((run.seed, step)).normal(0, 0.01)
    return float(np.clip(0.2 + 0.65 * (1 - np.exp(-step / 15)) + noise, 0, 1))


def invent(
    composer: Composer,
    *arguments: str,
    reward: Callable[[Run, int], float] = rising,
    steps: int = 60,
    changes: dict[str, Any] | None = None,
) -> list[RunRecord]:
    """A record per run of a plan; `changes` are values, or functions of (run, step), of a row from step 1 on."""
    plan = make_plan(composer, [f"train.max_steps={steps}", *arguments])
    return [_record(run, reward, steps, changes or {}) for run in plan.runs]


def _record(run: Run, reward: Callable[[Run, int], float], steps: int, changes: dict[str, Any]) -> RunRecord:
    rows = []
    for step in range(steps + 1):
        score = reward(run, step) if step % run.config.eval.interval == 0 else None
        row = {"attempt": 1, **metrics_row(run, step, reward(run, step) if step else None, score)}
        if step:
            # sampling noise around 1, as a sampler that is as recorded has it
            noise = np.random.default_rng((run.seed, step, 1)).normal() * 0.0035 / 640**0.5
            row["mismatch/rho_mean"] = 1 + noise
            row |= {k: v(run, step) if callable(v) else v for k, v in changes.items()}
        rows.append(row)
    exported = tuple(s for s in range(1, steps + 1) if s % run.config.export.interval == 0)
    return RunRecord(run.arm, run.seed, run.levels, run.config, rows, rows, [], CODE, exported)


def every_update(record: RunRecord, **changes: Any) -> RunRecord:
    """The record with changes of every update's row."""
    rows = [
        row if not row.get("updates") else {**row, "updates": [{**u, **changes} for u in row["updates"]]}
        for row in record.rows
    ]
    return replace(record, rows=rows, all_rows=rows)
