"""Intervals of a contrast between arms: t with a pooled residual or without, bootstrap-t, BCa. Imports no torch.

Shapes: A arms, S seeds, any leading axes in front (the coverage study has one for its simulations).
All functions are exact in what they were given; when to show which is decided in effects.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.stats import f as f_distribution
from scipy.stats import norm, t

from ablate.stats.blocks import Floats

DRAWS = 4999  # (draws + 1) * 0.025 is whole
# a residual this far under the values' own size is rounding, not spread
_NO_SPREAD = 1e-12


class Fit(NamedTuple):
    """Estimate, standard error, limits and p of a contrast; all but the estimate NaN where no interval can be given."""

    estimate: Floats
    se: Floats
    low: Floats
    high: Floats
    p: Floats


def residual_variance(values: Floats) -> Floats:
    """Mean square of what arms and seeds leave, values [..., A, S] -> [...]; NaN with one arm or one seed.

    Least squares with a parameter per arm and per seed; with a complete block its residuals are y - y_a - y_s + y.
    """
    arms, seeds = values.shape[-2:]
    df = (arms - 1) * (seeds - 1)
    if df == 0:
        return np.full(values.shape[:-2], np.nan)
    residual = (
        values
        - values.mean(axis=-1, keepdims=True)
        - values.mean(axis=-2, keepdims=True)
        + values.mean(axis=(-1, -2), keepdims=True)
    )
    return np.asarray((residual**2).sum(axis=(-1, -2)) / df)


def contrast_fit(values: Floats, weights: Floats, level: float = 0.95) -> Fit:
    """The contrast sum_a weights_a * mean_a, values [..., A, S], weights [A] that sum to 0.

    With two arms this is the paired t interval exactly.
    """
    arms, seeds = values.shape[-2:]
    if seeds == 0:
        return Fit(*[np.full(values.shape[:-2], np.nan)] * 5)
    df = (arms - 1) * (seeds - 1)
    estimate = np.asarray(np.einsum("...as,a->...", values, weights) / seeds)
    size = np.abs(values).max(axis=(-1, -2))
    variance = residual_variance(values)
    variance = np.where(variance > (_NO_SPREAD * size) ** 2, variance, np.nan)
    se = np.sqrt(variance * (weights**2).sum() / seeds)
    half = t.ppf(0.5 + level / 2, max(df, 1)) * se
    return Fit(estimate, se, estimate - half, estimate + half, 2 * t.sf(np.abs(estimate) / se, max(df, 1)))


def pooling_p(values: Floats, weights: Floats) -> Floats:
    """Does this contrast scatter over seeds more than the others do? p of the one-sided F test, [..., A, S] -> [...].

    Its own (S-1) degrees of freedom against the (A-2)(S-1) left. Small: the pooled residual is too small for it, as
    when another factor is inert and its arms repeat each other's runs. 1 where there is nothing to compare.
    """
    arms, seeds = values.shape[-2:]
    if arms < 3 or seeds < 2:
        return np.ones(values.shape[:-2])
    pooled = residual_variance(values)
    own = np.einsum("...as,a->...s", values, weights).var(axis=-1, ddof=1) / (weights**2).sum()
    rest = np.maximum(pooled * (arms - 1) - own, 0.0) / (arms - 2)
    negligible = (_NO_SPREAD * np.abs(values).max(axis=(-1, -2))) ** 2
    ratio = np.where(own > negligible, own / np.maximum(rest, 1e-300), 0.0)
    return np.asarray(f_distribution.sf(ratio, seeds - 1, (arms - 2) * (seeds - 1)))


def paired_t(effects: Floats, level: float = 0.95) -> Floats:
    """t interval of a mean over seeds from its own spread, effects [..., n] of one contrast -> [..., 2]; n - 1 df.

    Pools nothing: right whatever the arms' spreads and correlations, and wide where seeds are few.
    """
    n = effects.shape[-1]
    mean = effects.mean(axis=-1)
    half = t.ppf(0.5 + level / 2, n - 1) * effects.std(axis=-1, ddof=1) / np.sqrt(n)
    return np.stack([mean - half, mean + half], axis=-1)


@lru_cache(maxsize=16)
def _resamples(n: int, draws: int) -> Floats:
    """How often each of n seeds was drawn, [draws, n]; the same resamples every time, so a report can be replayed."""
    noise = np.random.Generator(np.random.Philox(key=n))
    return noise.multinomial(n, np.full(n, 1 / n), size=draws).astype(float)


def bootstrap_t(effects: Floats, level: float = 0.95, draws: int = DRAWS) -> Floats:
    """Bootstrap-t interval of a mean over seeds, effects [..., n] of one contrast -> [..., 2].

    Resamples seeds and studentises each resample (Efron and Tibshirani 1993, 12.5). Limits are infinite where too many
    resamples have no spread to divide by.
    """
    n = effects.shape[-1]
    mean = effects.mean(axis=-1, keepdims=True)
    centred = effects - mean
    counts = _resamples(n, draws) / n
    shift = centred @ counts.T
    spread = np.sqrt(np.maximum((centred**2) @ counts.T - shift**2, 0.0) / (n - 1))
    tiny = 1e-9 * np.abs(centred).max(axis=-1, keepdims=True)
    flat = np.where(np.abs(shift) > tiny, np.copysign(np.inf, shift), 0.0)
    studentised = np.where(spread > tiny, shift / np.where(spread > tiny, spread, 1.0), flat)
    tail = (1 - level) / 2
    upper, lower = _order_statistics(studentised, np.array([1 - tail, tail]))
    se = centred.std(axis=-1, ddof=1) / np.sqrt(n)
    return np.stack([mean[..., 0] - upper * se, mean[..., 0] - lower * se], axis=-1)


def bca(effects: Floats, level: float = 0.95, draws: int = DRAWS) -> Floats:
    """Bias-corrected accelerated bootstrap interval of a mean over seeds, effects [..., n] -> [..., 2].

    Efron 1987; the acceleration is the jackknife's. NaN where the effects have no spread.
    """
    n = effects.shape[-1]
    mean = effects.mean(axis=-1, keepdims=True)
    centred = effects - mean
    shift = np.sort(centred @ (_resamples(n, draws) / n).T, axis=-1)
    below = ((shift < 0).mean(axis=-1) + (shift <= 0).mean(axis=-1)) / 2
    bias = norm.ppf(np.clip(below, 1 / (draws + 1), draws / (draws + 1)))
    power = (centred**2).sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        # of a mean the jackknife's deviations are the centred values over n - 1: the skewness over 6 sqrt(n)
        acceleration = (centred**3).sum(axis=-1) / (6 * power**1.5)
    limits = []
    for z in norm.ppf([(1 - level) / 2, (1 + level) / 2]):
        share = norm.cdf(bias + (bias + z) / (1 - acceleration * (bias + z)))
        limits.append(_row_quantile(shift, share))
    return np.asarray(mean + np.stack(limits, axis=-1))


def _order_statistics(values: Floats, shares: Floats) -> tuple[Floats, ...]:
    """Order statistics of rank share * (draws + 1) along the last axis; interpolating would trip over infinities."""
    draws = values.shape[-1]
    ranks = np.clip(np.rint(shares * (draws + 1)).astype(int) - 1, 0, draws - 1)
    ordered = np.partition(values, np.unique(ranks), axis=-1)
    return tuple(ordered[..., r] for r in ranks)


def _row_quantile(ordered: Floats, share: Floats) -> Floats:
    """Each row's own share of its sorted values."""
    draws = ordered.shape[-1]
    known = np.isfinite(share)
    rank = np.clip(np.rint(np.where(known, share, 0.5) * (draws + 1)).astype(int) - 1, 0, draws - 1)
    found = np.take_along_axis(ordered, rank[..., None], axis=-1)[..., 0]
    return np.where(known, found, np.nan)
