"""Numbers out of records, for the checks: values by step, shares over updates, what a flat run looks like.

Imports no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

from ablate.record import Row
from ablate.select import Candidate, Selection, ema, select
from ablate.validity.records import RunRecord
from ablate.validity.table import Table

LAST = 10
"""Rollout steps that stand for the end of a run."""


def number(value: Any) -> float | None:
    """A finite number, else None: a key that is missing, null, text or not finite says nothing."""
    if isinstance(value, bool):
        return float(value)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def by_step(run: RunRecord, key: str) -> dict[int, float]:
    """A metric of the rollout steps from 1 on, where it has a value."""
    if isinstance(run.rows, Table):
        steps, found_ = run.rows.numbers("step"), run.rows.numbers(key)
        kept = (steps > 0) & ~np.isnan(found_)
        return dict(zip(steps[kept].astype(int).tolist(), found_[kept].tolist(), strict=True))
    found = ((int(r["step"]), number(r.get(key))) for r in run.rows)
    return {step: value for step, value in found if step > 0 and value is not None}


def values(run: RunRecord, key: str) -> list[float]:
    """As `by_step`, without the steps."""
    return list(by_step(run, key).values())


def at_step(run: RunRecord, key: str) -> dict[int, float]:
    """As `by_step`, with step 0."""
    if isinstance(run.rows, Table):
        found = zip(steps_of(run), run.rows.numbers(key).tolist(), strict=True)
        return {step: value for step, value in found if value == value}
    return {int(r["step"]): v for r in run.rows if (v := number(r.get(key))) is not None}


def steps_of(run: RunRecord) -> list[int]:
    """The steps of all rows, 0 among them."""
    if isinstance(run.rows, Table):
        return run.rows.numbers("step").astype(int).tolist()
    return [int(r["step"]) for r in run.rows]


def per_update(run: RunRecord, key: str) -> list[float]:
    """A metric of all optimizer updates, in order, where it has a value."""
    if isinstance(run.rows, Table):
        found = run.rows.updates.numbers(key)
        return found[~np.isnan(found)].tolist()
    return [v for u in _updates(run.rows) if (v := number(u.get(key))) is not None]


def update_keys(run: RunRecord) -> list[str]:
    """The metrics that any update has."""
    if isinstance(run.rows, Table):
        return run.rows.updates.keys()
    return list(dict.fromkeys(key for u in _updates(run.rows) for key in u))


def _updates(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        found = row.get("updates")
        yield from (u for u in found if isinstance(u, dict)) if isinstance(found, list) else ()


def mean(found: Iterable[float]) -> float | None:
    """The mean, None of nothing."""
    found = list(found)
    return fmean(found) if found else None


def last(run: RunRecord, key: str, count: int = LAST) -> float | None:
    """Mean of a metric over the last `count` rollout steps; None for shorter runs."""
    found = values(run, key)
    return fmean(found[-count:]) if len(found) >= count else None


def by_arm(runs: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs that have begun to train, by arm."""
    arms: dict[str, list[RunRecord]] = {}
    for run in runs:
        if any(step > 0 for step in steps_of(run)):
            arms.setdefault(run.arm, []).append(run)
    return arms


def to_common_step(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs up to the last step that all of them have: totals and means over a run then mean the same."""
    started = [run for arm in by_arm(runs).values() for run in arm]
    lengths = [max(steps_of(run)) for run in started]
    end = min(lengths, default=0)
    return [
        run if longest == end else replace(run, rows=Table(r for r in run.rows if int(r["step"]) <= end))
        for run, longest in zip(started, lengths, strict=True)
    ]


Measure = Callable[[RunRecord], float | None]


def extremes(runs: Sequence[RunRecord], measure: Measure) -> tuple[tuple[str, float], tuple[str, float]] | None:
    """The arms with the lowest and the highest mean of a measure over seeds; None unless two arms have one."""
    found = {arm: mean(v for run in some if (v := measure(run)) is not None) for arm, some in by_arm(runs).items()}
    known = sorted(((v, arm) for arm, v in found.items() if v is not None), key=lambda x: x[0])
    return ((known[0][1], known[0][0]), (known[-1][1], known[-1][0])) if len(known) > 1 else None


def clipped_share(run: RunRecord) -> float | None:
    """Share of the updates whose gradient was scaled down; None without clipping or any update."""
    limit = run.config.optim.grad_clip
    flags = per_update(run, "optim/clipped")
    if not flags and limit > 0:
        flags = [float(norm > limit) for norm in per_update(run, "optim/grad_norm")]
    return fmean(flags) if flags and limit > 0 else None


def trained_tokens(run: RunRecord) -> float | None:
    """Tokens that entered the loss, over all updates."""
    found = values(run, "tokens/trained") or per_update(run, "reduction/tokens")
    return sum(found) if found else None


def selection(run: RunRecord) -> Selection:
    """The reported step as `ablate select` picks it."""
    c = run.config
    heldout = at_step(run, "heldout/greedy")
    return select(
        by_step(run, "reward/mean"),
        run.exported,
        heldout,
        span=c.select.span,
        interval=c.export.interval,
        cap=c.selection_cap,
    )


def reported(run: RunRecord) -> Candidate | None:
    """The reported step of a run, None while it has none."""
    return selection(run).reported


def averages(run: RunRecord) -> dict[int, float]:
    """The selecting EMA of the training reward, by rollout step."""
    rewards = by_step(run, "reward/mean")
    return dict(zip(rewards, ema(list(rewards.values()), run.config.select.span), strict=True))


def step_error(run: RunRecord) -> float | None:
    """Standard error of one step's mean reward, clustered by prompt, as root mean square over the run.

    Where `reward/se` was not recorded: as if all rollouts of a prompt were alike, which is at most too large.
    """
    errors = values(run, "reward/se")
    if not errors:
        errors = [s / math.sqrt(run.config.train.prompts_per_step) for s in values(run, "reward/std")]
    return math.sqrt(fmean(e * e for e in errors)) if errors else None


@lru_cache(maxsize=256)
def flat_drop(steps: int, span: int, simulations: int = 4000) -> float:
    """95th percentile, over flat runs with unit noise per step, of the EMA's peak minus its final value.

    The first `span` steps are left out of the peak: an EMA begins with a single reward. Deterministic.
    """
    noise = np.random.Generator(np.random.Philox(key=np.array([steps, span], dtype=np.uint64)))
    alpha = 2.0 / (span + 1.0)
    average = noise.standard_normal(simulations)
    peak = np.full(simulations, -np.inf)
    for step in range(1, steps):
        average += alpha * (noise.standard_normal(simulations) - average)
        if step >= span:
            np.maximum(peak, average, out=peak)
    return float(np.quantile(peak - average, 0.95))


def drop_from_peak(run: RunRecord) -> tuple[float, float] | None:
    """How far the final EMA lies under its peak, and what flat runs reach in 1 of 20; None for short runs."""
    span, curve_ = run.config.select.span, list(averages(run).values())
    error = step_error(run)
    if len(curve_) < 4 * span or error is None:
        return None
    return max(curve_[span:]) - curve_[-1], error * flat_drop(len(curve_), span)


def step_tags(run: RunRecord) -> dict[int, tuple[str, ...]]:
    """Steps that are not like the others, and why.

    cold-start: the first step of a run. post-resume: the first of a later attempt. epoch-boundary: the first of an
    epoch. duplicated: written by several attempts, the last one counts. past-cap: beyond train.max_steps.
    low-entropy: under 10% of the run's first entropy, which a solved task does and which is no fault.
    """
    steps = sorted(step for step in steps_of(run) if step > 0)
    entropy = _first_entropy(run)
    start = next(iter(entropy.values()), 0.0)
    held = {
        "cold-start": {1},
        "post-resume": _changes(steps, by_step(run, "attempt")),
        "epoch-boundary": _changes(steps, by_step(run, "epoch")),
        "duplicated": _written_twice(run),
        "past-cap": {step for step in steps if step > run.config.train.max_steps},
        "low-entropy": {step for step, value in entropy.items() if value < 0.1 * start},
    }
    tagged = sorted(set().union(*held.values()) & {*steps})
    return {step: tuple(name for name, some in held.items() if step in some) for step in tagged}


def _changes(steps: Sequence[int], found: Mapping[int, float]) -> set[int]:
    """The steps at which a value is another than at the step before."""
    return {b for a, b in pairwise(steps) if a in found and b in found and found[a] != found[b]}


def _written_twice(run: RunRecord) -> set[int]:
    """Steps that more than one attempt wrote."""
    if isinstance(run.all_rows, Table):
        written = set(zip(run.all_rows.numbers("step"), run.all_rows.numbers("attempt"), strict=True))
    else:
        written = {(float(r["step"]), float(r["attempt"])) for r in run.all_rows}
    count = Counter(int(step) for step, _ in written)
    return {step for step, times in count.items() if times > 1}


def _first_entropy(run: RunRecord) -> dict[int, float]:
    """Entropy per token at each step's first update: that of the weights that drew the step's rollouts."""
    if isinstance(run.rows, Table):
        found = run.rows.first_updates("entropy/mean").tolist()
    else:
        found = [number(next(_updates([row]), {}).get("entropy/mean")) for row in run.rows]
    pairs = zip(steps_of(run), found, strict=True)
    return {step: value for step, value in pairs if step > 0 and value is not None and value == value}


def rho_z(run: RunRecord) -> tuple[float, float] | None:
    """Mean of rho over all tokens of the run, minus 1, and its standard error (the larger of that within steps and that
    between them); None where it was not recorded."""
    keys = ("mismatch/rho_mean", "mismatch/rho_std", "mismatch/tokens")
    rho_, std_, tokens_ = (by_step(run, k) for k in keys)
    steps = [step for step in rho_ if step in std_ and tokens_.get(step, 0) > 0]
    if len(steps) < 2:
        return None
    rho, std, tokens = (np.array([column[step] for step in steps]) for column in (rho_, std_, tokens_))
    total = tokens.sum()
    off = float(((rho - 1) * tokens).sum() / total)
    within = math.sqrt(float((tokens * std**2).sum())) / total
    between = math.sqrt(float((tokens**2 * (rho - 1 - off) ** 2).sum())) / total
    return off, max(within, between)


def growth(run: RunRecord, key: str) -> tuple[float, float] | None:
    """Median of a metric over the first and over the last ten steps; None for runs shorter than twice that."""
    found = values(run, key)
    return (median(found[:LAST]), median(found[-LAST:])) if len(found) >= 2 * LAST else None
