"""Power against simulated tests, published tables and the definitions inverted."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats as reference

from ablate.errors import UsageError
from ablate.stats import effects, power_table, power_to_detect, sd_upper, seeds_needed, smallest_detectable_effect


@pytest.mark.parametrize(("seeds", "effect"), [(2, 2.0), (3, 1.5), (4, 1.0), (12, 0.8)])
def test_power_is_how_often_simulated_paired_tests_reject(seeds: int, effect: float) -> None:
    x = np.random.default_rng(seeds).normal(effect, 1.0, (200_000, seeds))
    rejected = (reference.ttest_1samp(x, 0, axis=1).pvalue < 0.05).mean()
    # 4 standard errors of 200,000 simulations
    assert power_to_detect(effect, 1.0, seeds) == pytest.approx(rejected, abs=4 * math.sqrt(0.25 / 200_000))


def test_a_pooled_residual_has_the_power_of_its_degrees_of_freedom() -> None:
    """2 x 2 arms, 3 seeds: the p values that `effects` gives, on simulated tables."""
    from ablate.stats.intervals import contrast_fit

    weights = np.array([-0.5, -0.5, 0.5, 0.5])
    values = np.random.default_rng(0).normal(0, 1, (100_000, 4, 3)) + 1.5 * (weights > 0)[:, None]
    rejected = (contrast_fit(values, weights).p < 0.05).mean()
    sd = math.sqrt((weights**2).sum())
    assert power_to_detect(1.5, sd, 3, arms=4) == pytest.approx(rejected, abs=4 * math.sqrt(0.25 / 100_000))


def test_textbook_sample_sizes() -> None:
    """Cohen 1988, paired t, two-sided 5%, power 80%: d = 0.5 takes 34 pairs, 0.8 takes 15, 0.2 takes 199."""
    assert [seeds_needed(1.0, d) for d in (0.5, 0.8, 0.2)] == [34, 15, 199]


@pytest.mark.parametrize("seeds", [2, 3, 4, 8, 50])
def test_the_smallest_detectable_effect_has_the_power_asked_for(seeds: int) -> None:
    effect = smallest_detectable_effect(0.03, seeds, power=0.8)
    assert power_to_detect(effect, 0.03, seeds) == pytest.approx(0.8, abs=1e-9)
    assert seeds_needed(0.03, effect * 1.0001) <= seeds < seeds_needed(0.03, effect * 0.9)
    assert smallest_detectable_effect(0.06, seeds) == pytest.approx(2 * effect)


def test_the_upper_limit_of_a_spread_covers_it_in_80_percent() -> None:
    df = 3
    found = np.random.default_rng(1).normal(0, 1.0, (100_000, df + 1)).std(axis=1, ddof=1)
    covered = np.mean(found * sd_upper(1.0, df) >= 1.0)
    assert covered == pytest.approx(0.8, abs=4 * math.sqrt(0.16 / 100_000))
    assert sd_upper(1.0, 0) == math.inf
    assert sd_upper(2.0, 2) == pytest.approx(2 * math.sqrt(2 / 0.44628710262841953))  # chi2(0.2; 2) = -2 ln 0.8


def test_one_seed_sees_nothing() -> None:
    assert smallest_detectable_effect(0.1, 1) == math.inf
    assert power_to_detect(5.0, 0.1, 1) == 0.0


def test_mistakes_are_said_in_one_line() -> None:
    with pytest.raises(UsageError, match="sd=0"):
        smallest_detectable_effect(0, 3)
    with pytest.raises(UsageError, match="power=1"):
        seeds_needed(1, 1, power=1)
    with pytest.raises(UsageError, match="effect=0"):
        seeds_needed(1, 0)
    with pytest.raises(UsageError, match="more than 100000 seeds"):
        seeds_needed(1.0, 1e-6)


def frame(seeds: int) -> pd.DataFrame:
    noise = np.random.default_rng(5)
    return pd.DataFrame([
        {"clip": c, "tis": t, "seed": s, "heldout_reported": 0.7 + noise.normal(0, 0.02)}
        for c in ("sym", "asym") for t in ("on", "off") for s in range(seeds)
    ])  # fmt: skip


def test_the_table_of_a_pilot() -> None:
    table = power_table(frame(4), ["clip", "tis"], "heldout_reported", 0.02)
    found = effects(frame(4), ["clip", "tis"], "heldout_reported")
    assert table["sd"].tolist() == pytest.approx([e.se * 2 for e in found])  # se = sd / sqrt(4)
    assert (table["seeds"] == 4).all() and (table["df"] == 9).all()
    first = table.iloc[0]
    assert first["sd_upper"] == pytest.approx(sd_upper(first["sd"], 9))
    assert first["smallest_detectable"] == pytest.approx(smallest_detectable_effect(first["sd_upper"], 4, arms=4))
    assert first["seeds_needed"] == seeds_needed(first["sd_upper"], 0.02, arms=4)
    assert power_table(frame(4), ["clip", "tis"], "heldout_reported")["seeds_needed"].isna().all()
    with pytest.raises(UsageError, match="1 complete seeds of 4 arms"):
        power_table(frame(1), ["clip", "tis"], "heldout_reported", 0.02)


def test_the_figures_of_the_page() -> None:
    """docs/statistics.md: multiples of the pilot's spread, and what seeds find in standard deviations."""
    assert [round(sd_upper(1.0, df), 2) for df in (1, 2, 3, 6, 9, 20)] == [3.95, 2.12, 1.73, 1.4, 1.29, 1.17]
    assert [round(smallest_detectable_effect(1.0, n), 2) for n in (3, 5, 8, 20)] == [3.26, 1.68, 1.16, 0.66]
    assert round(smallest_detectable_effect(0.01, 4), 3) == 0.021 and seeds_needed(0.01, 0.02) == 5
