"""How many seeds does a question need, and what can those at hand see? Noncentral t. Imports no torch.

`sd` is always the standard deviation, over seeds, of the paired effect itself (the difference within a seed), in the
outcome's unit. A pilot knows it badly: plan with `sd_upper`, not with the pilot's own figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.stats import chi2, nct, t

from ablate.errors import UsageError
from ablate.stats.effects import contrasts_of
from ablate.stats.intervals import residual_variance


def power_to_detect(effect: float, sd: float, seeds: int, *, alpha: float = 0.05, arms: int = 2) -> float:
    """Probability that the two-sided test at `alpha` finds an effect of this size, with (arms-1)(seeds-1) df."""
    _check(sd, alpha)
    df = (arms - 1) * (seeds - 1)
    if df < 1:
        return 0.0
    shift = abs(effect) * np.sqrt(seeds) / sd
    critical = t.ppf(1 - alpha / 2, df)
    # the wrong-sided tail is under Phi(-shift), 1e-9 from 6 on, where scipy's is at times NaN
    wrong_side = nct.cdf(-critical, df, shift) if shift < 6 else 0.0
    return float(nct.sf(critical, df, shift) + wrong_side)


def smallest_detectable_effect(
    sd: float, seeds: int, *, alpha: float = 0.05, power: float = 0.8, arms: int = 2
) -> float:
    """The effect that is found with probability `power`; infinite with one seed."""
    _check(sd, alpha, power)
    df = (arms - 1) * (seeds - 1)
    if df < 1:
        return float("inf")
    scale = sd / np.sqrt(seeds)
    # at twice this shift the noncentral t has passed the critical value with near certainty, whatever df
    high = 2.0
    while power_to_detect(high * scale, sd, seeds, alpha=alpha, arms=arms) < power:
        high *= 2
    return float(
        scale * brentq(lambda x: power_to_detect(x * scale, sd, seeds, alpha=alpha, arms=arms) - power, 0.0, high)
    )


def seeds_needed(
    sd: float, effect: float, *, alpha: float = 0.05, power: float = 0.8, arms: int = 2, most: int = 100_000
) -> int:
    """The fewest seeds (at least 2) that find `effect` with probability `power`.

    Raises:
        UsageError: more than `most` would be needed, or an argument is out of range.
    """
    _check(sd, alpha, power)
    if not effect or not np.isfinite(effect):
        raise UsageError(f"effect={effect}: must be a finite number other than 0")

    def enough(seeds: int) -> bool:
        return power_to_detect(effect, sd, seeds, alpha=alpha, arms=arms) >= power

    low, high = 1, 2
    while not enough(high):
        low, high = high, 2 * high
        if low > most:
            raise UsageError(f"effect={effect}: more than {most} seeds at sd={sd:.3g}; ask for a larger effect")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def sd_upper(sd: float, df: int, level: float = 0.8) -> float:
    """Upper one-sided limit of a standard deviation estimated with `df` degrees of freedom (chi-square).

    With 2 df (three seeds, two arms) the true spread can well be twice what the pilot shows.
    """
    if df < 1:
        return float("inf")
    return float(sd * np.sqrt(df / chi2.ppf(1 - level, df)))


def power_table(
    table: pd.DataFrame,
    factors: Sequence[str],
    outcome: str,
    effect: float | None = None,
    *,
    base: Mapping[str, object] | str | None = None,
    alpha: float = 0.05,
    power: float = 0.8,
    level: float = 0.8,
) -> pd.DataFrame:
    """What a finished sweep or pilot says about the seeds that each of its contrasts needs.

    Columns factor, contrast, seeds, df, sd (of the paired effect), sd_upper, smallest_detectable (at the seeds at hand)
    and seeds_needed for `effect`, both planned with sd_upper; NaN without an effect or a spread.

    Raises:
        UsageError: no seed is complete, fewer than two are, or a column is not there.
    """
    blocks, contrasts = contrasts_of(table, factors, outcome, base)
    if blocks.df < 1:
        raise UsageError(
            f"{outcome}: {blocks.n} complete seeds of {len(blocks.arms)} arms show no spread; run 2 or more"
        )
    variance, arms = float(residual_variance(blocks.values)), len(blocks.arms)
    rows = []
    for c in contrasts:
        sd = float(np.sqrt(variance * (c.weights**2).sum()))
        upper = sd_upper(sd, blocks.df, level)
        spread = upper > 0
        rows.append({
            "factor": c.factor, "contrast": c.label, "seeds": blocks.n, "df": blocks.df, "sd": sd, "sd_upper": upper,
            "smallest_detectable":
                smallest_detectable_effect(upper, blocks.n, alpha=alpha, power=power, arms=arms) if spread else np.nan,
            "seeds_needed":
                seeds_needed(upper, effect, alpha=alpha, power=power, arms=arms) if spread and effect else np.nan,
        })  # fmt: skip
    return pd.DataFrame(rows)


def _check(sd: float, alpha: float, power: float = 0.5) -> None:
    if not (np.isfinite(sd) and sd > 0):
        raise UsageError(f"sd={sd}: must be a finite number above 0")
    if not 0 < alpha < 1:
        raise UsageError(f"alpha={alpha}: must lie between 0 and 1")
    if not alpha < power < 1:
        raise UsageError(f"power={power}: must lie between alpha={alpha} and 1")
