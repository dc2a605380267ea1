"""What does each factor do? Paired contrasts over seeds, with intervals and adjusted p values. Imports no torch.

    frame = pd.DataFrame({"clip": [...], "tis": [...], "seed": [...], "heldout_reported": [...]})
    for e in effects(frame, ["clip", "tis"], "heldout_reported"):
        print(e.contrast, e.estimate, e.low, e.high)

The model has one parameter per arm and one per seed; the residual is pooled over arms, so a contrast has
(arms - 1)(seeds - 1) degrees of freedom. n is the number of seeds: the cells of one seed are not replicates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
import pandas as pd

from ablate.errors import UsageError, nearest
from ablate.stats.blocks import Blocks, Floats, complete_blocks
from ablate.stats.intervals import bca, bootstrap_t, contrast_fit, paired_t, pooling_p

PRIMARY = "heldout_reported"
BOOTSTRAP_FROM = 8  # under 8 seeds a resample of seeds has too few distinct values to have tails
BCA_FROM = 20
POOLING_ALPHA = 0.05


_PAIRS = ("paired", "bootstrap", "bca")


@dataclass(frozen=True)
class Effect:
    """One contrast of one outcome.

    Example: Effect("clip", "asym - sym", "heldout_reported", estimate=0.021, low=0.004, high=0.038, p=0.02,
    p_adjusted=0.06, n=4, df=9, method="t, 4 seeds as blocks, pooled residual", exploratory=False,
    pooled_ok=True, paired=(-0.003, 0.045), bootstrap=None, bca=None, se=0.0075, dropped=1)

    `n` counts seeds, `dropped` seeds that not every arm finished. `p_adjusted` is Holm's over the declared contrasts of
    the primary outcome; NaN for what is exploratory. With one seed, or no spread at all, only the estimate is a number.
    The pooled residual supposes that every contrast scatters alike over seeds; `paired` (seeds - 1 df), `bootstrap`
    (bootstrap-t, from 8 seeds) and `bca` (from 20) use this contrast's own scatter and suppose nothing of the kind.
    `pooled_ok` is False where an F test at 5% finds that it scatters more than the rest: then read `paired`.
    """

    factor: str
    contrast: str
    outcome: str
    estimate: float
    low: float
    high: float
    p: float
    p_adjusted: float
    n: int
    df: int
    method: str
    exploratory: bool
    pooled_ok: bool
    paired: tuple[float, float] | None
    bootstrap: tuple[float, float] | None
    bca: tuple[float, float] | None
    se: float
    dropped: int

    @property
    def name(self) -> str:
        """How a contrast is declared: `clip: asym - sym`."""
        return f"{self.factor}: {self.contrast}"


@dataclass(frozen=True)
class Contrast:
    """Weights over the arms of a block, summing to 0. Example: Contrast("clip", "asym - sym", [-.5, -.5, .5, .5])"""

    factor: str
    label: str
    weights: Floats

    @property
    def name(self) -> str:
        return f"{self.factor}: {self.label}"


def main_effects(
    table: pd.DataFrame,
    factors: Sequence[str],
    outcome: str,
    *,
    base: Mapping[str, object] | None = None,
    level: float = 0.95,
) -> list[Effect]:
    """Each level of each factor against the factor's base level, averaged over the other factors' levels.

    Needs a full grid of arms. Arguments as for `effects`; nothing is adjusted here.
    """
    blocks = _grid_blocks(table, factors, outcome)
    return _estimate_all(blocks, _main_contrasts(blocks, _base_levels(blocks, base)), level)


def interactions(
    table: pd.DataFrame,
    factors: Sequence[str],
    outcome: str,
    *,
    base: Mapping[str, object] | None = None,
    level: float = 0.95,
) -> list[Effect]:
    """Difference of differences for every two factors: does the effect of one depend on the other's level?

    Needs a full grid of arms. Arguments as for `effects`; nothing is adjusted here.
    """
    blocks = _grid_blocks(table, factors, outcome)
    return _estimate_all(blocks, _interaction_contrasts(blocks, _base_levels(blocks, base)), level)


def _grid_blocks(table: pd.DataFrame, factors: Sequence[str], outcome: str) -> Blocks:
    blocks = complete_blocks(table, factors, outcome)
    if not is_grid(blocks):
        raise UsageError(f"{outcome}: the arms are no full grid of {', '.join(factors)}; effects() compares arm by arm")
    return blocks


def effects(
    table: pd.DataFrame,
    factors: Sequence[str],
    outcome: str,
    *,
    primary: str = PRIMARY,
    declared: Iterable[str] | None = None,
    base: Mapping[str, object] | str | None = None,
    level: float = 0.95,
    horizon: float | None = None,
) -> list[Effect]:
    """All contrasts of one outcome: main effects and two-way interactions of a grid, else each arm against the base.

    Args:
        table: one row per run (see the package); a column `arm` names the arms where they are no grid.
        factors: the columns that vary by design.
        outcome: the column to explain; `steps_to_threshold` is restricted to the common horizon first.
        primary: the outcome whose contrasts were declared before running; every other outcome is exploratory.
        declared: names such as `clip: asym - sym`; by default all contrasts returned here. p values are Holm-adjusted
            over these, the rest is exploratory.
        base: base level by factor for a grid, the base arm's name for a list; the first in the table by default.
        level: of the intervals.
        horizon: of `steps_to_threshold`, in rollout steps.

    Raises:
        UsageError: unknown column, contrast, level or arm; two runs of one arm and seed.
    """
    blocks = complete_blocks(table, factors, outcome, horizon=horizon)
    contrasts = _contrasts(blocks, base)
    found = _estimate_all(blocks, contrasts, level)
    if outcome != primary:
        return found
    names = [e.name for e in found]
    wanted = set(names) if declared is None else set(declared)
    # of contrasts that an arm without any run took away nothing can be said, so they are not held against the caller
    if not blocks.dropped_arms and (unknown := sorted(wanted - set(names))):
        raise UsageError(f"{unknown[0]}: no such contrast; {nearest(unknown[0], names)}")
    return _adjust(found, wanted)


def contrasts_of(
    table: pd.DataFrame, factors: Sequence[str], outcome: str, base: Mapping[str, object] | str | None = None
) -> tuple[Blocks, list[Contrast]]:
    """The block of an outcome and the contrasts that `effects` estimates in it."""
    blocks = complete_blocks(table, factors, outcome)
    return blocks, _contrasts(blocks, base)


def _contrasts(blocks: Blocks, base: Mapping[str, object] | str | None) -> list[Contrast]:
    if len(blocks.arms) < 2:
        return []
    if is_grid(blocks) and not isinstance(base, str):
        levels = _base_levels(blocks, base)
        return [*_main_contrasts(blocks, levels), *_interaction_contrasts(blocks, levels)]
    return _arm_contrasts(blocks, base if isinstance(base, str) else None)


def is_grid(blocks: Blocks) -> bool:
    """True if the arms are every combination of their factors' levels, once each."""
    if not blocks.factors:
        return False
    seen = [set(column) for column in zip(*blocks.arms.values(), strict=True)]
    combinations = set(blocks.arms.values())
    return len(combinations) == len(blocks.arms) == math.prod(len(s) for s in seen)


def _base_levels(blocks: Blocks, base: Mapping[str, object] | None) -> dict[str, str]:
    """The level that the others are compared with, by factor: the table's first that has a run, unless given."""
    chosen = {f: _levels_of(blocks, i)[0] for i, f in enumerate(blocks.factors)}
    for factor, wanted in (base or {}).items():
        if factor not in chosen:
            raise UsageError(f"base {factor}={wanted}: no such factor; {nearest(factor, chosen)}")
        valid = _levels_of(blocks, blocks.factors.index(factor))
        if str(wanted) not in valid:
            raise UsageError(f"base {factor}={wanted}: no run at this level; {nearest(str(wanted), valid)}")
        chosen[factor] = str(wanted)
    return chosen


def _levels_of(blocks: Blocks, factor: int) -> list[str]:
    return list(dict.fromkeys(levels[factor] for levels in blocks.arms.values()))


def _indicator(blocks: Blocks, factor: int, level: str, base: str) -> Floats:
    """+1 for arms at `level`, -1 for arms at `base`, 0 elsewhere."""
    column = [levels[factor] for levels in blocks.arms.values()]
    return np.array([float(v == level) - float(v == base) for v in column])


def _main_contrasts(blocks: Blocks, base: Mapping[str, str]) -> list[Contrast]:
    found = []
    for i, factor in enumerate(blocks.factors):
        for level in _levels_of(blocks, i):
            if level != base[factor]:
                signs = _indicator(blocks, i, level, base[factor])
                found.append(Contrast(factor, f"{level} - {base[factor]}", 2 * signs / np.abs(signs).sum()))
    return found


def _interaction_contrasts(blocks: Blocks, base: Mapping[str, str]) -> list[Contrast]:
    found = []
    for (i, f), (j, g) in itertools.combinations(enumerate(blocks.factors), 2):
        for a, b in itertools.product(_levels_of(blocks, i), _levels_of(blocks, j)):
            if a != base[f] and b != base[g]:
                signs = _indicator(blocks, i, a, base[f]) * _indicator(blocks, j, b, base[g])
                label = f"({a} - {base[f]}) at {b} - ({a} - {base[f]}) at {base[g]}"
                found.append(Contrast(f"{f} x {g}", label, 4 * signs / np.abs(signs).sum()))
    return found


def _arm_contrasts(blocks: Blocks, base: str | None) -> list[Contrast]:
    names = list(blocks.arms)
    if base is not None and base not in names:
        raise UsageError(f"base arm {base}: no run of it has this outcome; {nearest(base, names)}")
    first = names.index(base) if base is not None else 0
    found = []
    for k, name in enumerate(names):
        if k != first:
            weights = np.zeros(len(names))
            weights[[first, k]] = -1.0, 1.0
            found.append(Contrast(_difference(blocks, names[first], name), f"{name} - {names[first]}", weights))
    return found


def _difference(blocks: Blocks, first: str, other: str) -> str:
    """The factors in which two arms differ, `clip+tis`; `arm` if only their names do."""
    pairs = zip(blocks.factors, blocks.arms[first], blocks.arms[other], strict=True)
    return "+".join(f for f, a, b in pairs if a != b) or "arm"


def _estimate_all(blocks: Blocks, contrasts: Sequence[Contrast], level: float) -> list[Effect]:
    return [_estimate(blocks, contrast, level) for contrast in contrasts]


def _estimate(blocks: Blocks, contrast: Contrast, level: float) -> Effect:
    fit = contrast_fit(blocks.values, contrast.weights, level)
    known = bool(np.isfinite(fit.low))
    pooled_ok = not known or bool(pooling_p(blocks.values, contrast.weights) > POOLING_ALPHA)
    per_seed = contrast.weights @ blocks.values
    spread = known and bool(np.ptp(per_seed) > 0)
    return Effect(
        factor=contrast.factor,
        contrast=contrast.label,
        outcome=blocks.outcome,
        estimate=float(fit.estimate) if blocks.n else math.nan,
        low=float(fit.low),
        high=float(fit.high),
        p=float(fit.p),
        p_adjusted=math.nan,
        n=blocks.n,
        df=blocks.df,
        method=_method(blocks, known, pooled_ok),
        exploratory=True,
        pooled_ok=pooled_ok,
        paired=_limits(paired_t(per_seed, level)) if spread else None,
        bootstrap=_limits(bootstrap_t(per_seed, level)) if spread and blocks.n >= BOOTSTRAP_FROM else None,
        bca=_limits(bca(per_seed, level)) if spread and blocks.n >= BCA_FROM else None,
        se=float(fit.se),
        dropped=len(blocks.dropped_seeds),
    )


def _limits(pair: Floats) -> tuple[float, float] | None:
    return (float(pair[0]), float(pair[1])) if np.isfinite(pair).all() else None


def _method(blocks: Blocks, known: bool, pooled_ok: bool) -> str:
    left_out = f", {len(blocks.dropped_seeds)} incomplete left out" if blocks.dropped_seeds else ""
    if blocks.n == 0:
        return f"no seed that every arm finished{left_out}"
    if blocks.n == 1:
        return f"difference, 1 seed{left_out}: no interval can be given"
    if not known:
        return f"difference, {blocks.n} seeds{left_out}: no spread, so no interval can be given"
    doubt = "" if pooled_ok else ", which is too small for this contrast: read its paired interval"
    return f"t, {blocks.n} seeds as blocks{left_out}, pooled residual{doubt}"


def _adjust(found: Sequence[Effect], declared: Iterable[str]) -> list[Effect]:
    wanted = set(declared)
    adjusted = iter(holm([e.p for e in found if e.name in wanted]))
    return [replace(e, p_adjusted=next(adjusted), exploratory=False) if e.name in wanted else e for e in found]


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down p values: they hold the family-wise error rate whatever the dependence.

    The k-th smallest of m is multiplied by m - k + 1, then made monotone and cut to 1. A missing p stays missing and
    still counts in m.
    """
    order = sorted((i for i, value in enumerate(p) if not math.isnan(value)), key=lambda i: p[i])
    adjusted = [math.nan] * len(p)
    running = 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = running
    return adjusted


def effects_frame(found: Iterable[Effect]) -> pd.DataFrame:
    """Effects as a tidy table, an interval in two columns."""
    rows = []
    for e in found:
        row = asdict(e)
        for key in _PAIRS:
            row[f"{key}_low"], row[f"{key}_high"] = row.pop(key) or (math.nan, math.nan)
        rows.append(row)
    names = [f.name for f in fields(Effect) if f.name not in _PAIRS]
    return pd.DataFrame(rows, columns=[*names, *(f"{key}_{end}" for key in _PAIRS for end in ("low", "high"))])
