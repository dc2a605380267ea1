"""From a tidy table of runs to a complete block of arms x seeds, and summaries of it. Imports no torch.

A seed is a block: all arms of one seed share prompts and, until they diverge, sampling noise. Only seeds that every arm
finished can be compared within, so the others are left out and counted; `n` is always a number of seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ablate.errors import UsageError, nearest

CENSORED = "steps_to_threshold"
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Blocks:
    """One outcome of all arms at the seeds that every arm has.

    Example: Blocks("heldout_reported", ("clip",), {"clip=sym": ("sym",), "clip=asym": ("asym",)}, (0, 1),
    values=[[.70, .72], [.71, .75]], dropped_seeds=(2,), dropped_arms=())

    `values` is [arms, seeds]; `arms` gives the levels of each arm as text, in the table's order. An arm without any
    value is in `dropped_arms`; a seed that another arm lacks is in `dropped_seeds`.
    """

    outcome: str
    factors: tuple[str, ...]
    arms: dict[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    values: Floats
    dropped_seeds: tuple[int, ...]
    dropped_arms: tuple[str, ...]

    @property
    def n(self) -> int:
        """Number of seeds, the only replicates there are."""
        return len(self.seeds)

    @property
    def df(self) -> int:
        """Degrees of freedom of the residual after arms and seeds."""
        return max(len(self.arms) - 1, 0) * max(self.n - 1, 0)

    def note(self) -> str | None:
        """What was left out, as a line for the report, or None."""
        parts = []
        if self.dropped_arms:
            parts.append(f"no run of {', '.join(self.dropped_arms)} has this outcome")
        if self.dropped_seeds:
            seeds = ", ".join(map(str, self.dropped_seeds))
            parts.append(f"seed {seeds} left out: not every arm has it" if self.n else f"no seed is complete ({seeds})")
        return f"{self.outcome}: {'; '.join(parts)}" if parts else None


def complete_blocks(
    table: pd.DataFrame, factors: Sequence[str], outcome: str, *, horizon: float | None = None
) -> Blocks:
    """Arrange one outcome as arms x seeds. Values that are not finite count as missing.

    `steps_to_threshold` is restricted to the common horizon first (see `restricted_steps`).

    Raises:
        UsageError: a column is not there, or two runs have the same arm and seed.
    """
    for column in (*factors, "seed", outcome):
        if column not in table.columns:
            raise UsageError(f"{column}: no such column; {nearest(column, table.columns)}")
    column_values = table[outcome].to_numpy(dtype=float, na_value=np.nan)
    if outcome == CENSORED:
        column_values = restricted_steps(column_values, table["reached"].to_numpy(dtype=bool), horizon)
    arms: dict[str, tuple[str, ...]] = {}
    found: dict[tuple[str, int], float] = {}
    for arm, levels, seed, value in zip(
        _arm_names(table, factors), _levels(table, factors), table["seed"], column_values, strict=True
    ):
        arms.setdefault(arm, levels)
        if (arm, int(seed)) in found:
            raise UsageError(f"{arm} seed={seed}: two runs of one arm and seed; compare sweeps arm by arm instead")
        found[arm, int(seed)] = float(value)
    return _drop_incomplete(outcome, tuple(factors), arms, found)


def _drop_incomplete(
    outcome: str, factors: tuple[str, ...], arms: dict[str, tuple[str, ...]], found: dict[tuple[str, int], float]
) -> Blocks:
    seeds = sorted({seed for _, seed in found})
    grid = np.array([[found.get((arm, seed), np.nan) for seed in seeds] for arm in arms]).reshape(len(arms), len(seeds))
    there = np.isfinite(grid)
    kept_arms = there.any(axis=1)
    kept_seeds = there[kept_arms].all(axis=0) if kept_arms.any() else np.zeros(len(seeds), dtype=bool)
    return Blocks(
        outcome,
        factors,
        {arm: levels for (arm, levels), kept in zip(arms.items(), kept_arms, strict=True) if kept},
        tuple(s for s, kept in zip(seeds, kept_seeds, strict=True) if kept),
        grid[np.ix_(kept_arms, kept_seeds)],
        tuple(s for s, kept in zip(seeds, kept_seeds, strict=True) if not kept),
        tuple(arm for arm, kept in zip(arms, kept_arms, strict=True) if not kept),
    )


def _levels(table: pd.DataFrame, factors: Sequence[str]) -> list[tuple[str, ...]]:
    columns = [[str(v) for v in table[f]] for f in factors]
    return list(zip(*columns, strict=True)) if columns else [()] * len(table)


def _arm_names(table: pd.DataFrame, factors: Sequence[str]) -> list[str]:
    """The table's own names where it has a column `arm`; otherwise `clip=sym,tis=on`."""
    if "arm" in table.columns:
        return [str(a) for a in table["arm"]]
    return [",".join(f"{f}={v}" for f, v in zip(factors, row, strict=True)) for row in _levels(table, factors)]


def restricted_steps(steps: ArrayLike, reached: ArrayLike, horizon: float | None = None) -> Floats:
    """Steps until a threshold, each at most the horizon: their mean is the restricted mean (area under survival).

    A run that never reached it is right-censored: its `steps` is the last step that was observed. The horizon is the
    earliest such end unless given, so that every run was watched for at least as long; later arrivals are cut to it.
    Leave unfinished runs out: one that was stopped at step 3 would set everyone's horizon to 3. Missing (NaN) is a run
    without steps, or one that neither reached the threshold nor was watched up to the horizon given.
    """
    steps, reached = np.asarray(steps, dtype=float), np.asarray(reached, dtype=bool)
    ends = steps[~reached & np.isfinite(steps)]
    if horizon is None:
        horizon = float(ends.min()) if len(ends) else np.inf
    known = np.isfinite(steps) & (reached | (steps >= horizon))
    return np.where(known, np.minimum(steps, horizon), np.nan)


def threshold_summary(table: pd.DataFrame, factors: Sequence[str], *, horizon: float | None = None) -> pd.DataFrame:
    """Per arm: restricted mean of the steps to the threshold, share of runs that reached it, runs, and the horizon.

    Columns arm, restricted_mean, share_reached (within the horizon), runs, horizon (the largest value where no run was
    censored). Runs without a value are left out of all of them.
    """
    table = table[table[CENSORED].notna()]
    steps, reached = table[CENSORED].to_numpy(dtype=float), table["reached"].to_numpy(dtype=bool)
    restricted = restricted_steps(steps, reached, horizon)
    limit = float(restricted.max()) if len(restricted) else np.nan
    frame = pd.DataFrame(
        {"arm": _arm_names(table, factors), "steps": restricted, "reached": reached & (steps <= limit)}
    )
    grouped = frame.groupby("arm", sort=False)
    summary = grouped.agg(restricted_mean=("steps", "mean"), share_reached=("reached", "mean"), runs=("steps", "size"))
    return summary.reset_index().assign(horizon=limit)


def arm_correlation(table: pd.DataFrame, factors: Sequence[str], outcome: str) -> pd.DataFrame:
    """Pearson correlation between arms over the complete seeds; all NaN under 3 seeds.

    High: sharing seeds pays, because what a seed does to one arm it does to the other. Near 0: pairing bought nothing.
    """
    blocks = complete_blocks(table, factors, outcome)
    names = list(blocks.arms)
    matrix = np.full((len(names), len(names)), np.nan)
    if blocks.n >= 3:
        centred = blocks.values - blocks.values.mean(axis=1, keepdims=True)
        norm = np.sqrt((centred**2).sum(axis=1))
        product = np.outer(norm, norm)
        np.divide(centred @ centred.T, product, out=matrix, where=product > 0)
    return pd.DataFrame(matrix, index=names, columns=names)


def iqm(values: Iterable[float]) -> float | None:
    """Interquartile mean: the 25% trimmed mean, as rliable's `aggregate_iqm`; None under 4 finite values.

    floor(n/4) values go at each end. With fewer than 4 nothing would be trimmed and the name would mislead.
    """
    kept = np.sort(np.array([v for v in values if v is not None and np.isfinite(v)], dtype=float))
    if len(kept) < 4:
        return None
    cut = len(kept) // 4
    return float(kept[cut : len(kept) - cut].mean())
