"""Bootstrap intervals against scipy's and a plain loop; nothing infinite or invented where resamples have no spread."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as reference

from ablate.stats.intervals import bca, bootstrap_t, contrast_fit


def sample(n: int, key: int = 0) -> np.ndarray:
    return np.random.default_rng(key).exponential(1.0, n)


def test_bca_agrees_with_scipy() -> None:
    x = sample(25)
    theirs = reference.bootstrap(
        (x,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(1)
    ).confidence_interval
    # both are Monte Carlo: at the 2.5% tails of 5,000 draws a limit wanders by about 5% of the standard error
    assert bca(x) == pytest.approx((theirs.low, theirs.high), abs=0.15 * x.std() / 5)


def test_bootstrap_t_agrees_with_a_loop() -> None:
    x, n = sample(12), 12
    noise = np.random.default_rng(2)
    draws = []
    for _ in range(20_000):
        again = x[noise.integers(0, n, n)]
        draws.append((again.mean() - x.mean()) / (again.std(ddof=1) / math.sqrt(n)))
    low, high = np.quantile(draws, [0.025, 0.975])
    se = x.std(ddof=1) / math.sqrt(n)
    # the left tail of a skewed sample is long: compare on the scale of the limits themselves
    assert bootstrap_t(x) == pytest.approx((x.mean() - high * se, x.mean() - low * se), rel=0.1)


@pytest.mark.parametrize("interval", [bootstrap_t, bca])
def test_intervals_move_and_scale_with_the_data_and_stack(interval) -> None:  # type: ignore[no-untyped-def]
    x = sample(20)
    base = interval(x)
    assert interval(3 + 2 * x) == pytest.approx(3 + 2 * base)
    stacked = interval(np.stack([x, sample(20, 1)]))
    assert stacked[0] == pytest.approx(base) and stacked[1] == pytest.approx(interval(sample(20, 1)))
    assert base[0] < x.mean() < base[1]


def test_many_equal_effects_give_an_unbounded_limit_not_a_wrong_one() -> None:
    """Nine of ten equal: in a third of the resamples there is nothing to studentise by."""
    assert not np.isfinite(bootstrap_t(np.array([0.0] * 9 + [1.0]))).all()
    assert np.isnan(bca(np.zeros(20))).all()


def test_contrasts_of_a_stack_are_those_of_its_parts() -> None:
    values = np.random.default_rng(4).normal(size=(3, 4, 5))
    weights = np.array([-0.5, -0.5, 0.5, 0.5])
    together = contrast_fit(values, weights)
    for k in range(3):
        alone = contrast_fit(values[k], weights)
        assert [float(a[k]) for a in together] == pytest.approx([float(a) for a in alone])
