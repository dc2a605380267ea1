"""IQM, censored steps to a threshold: against scipy's trimmed mean and values worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import trim_mean

from ablate.stats import effects, iqm, restricted_steps, threshold_summary


@pytest.mark.parametrize("n", [4, 5, 7, 8, 13, 100])
def test_iqm_is_the_trimmed_mean(n: int) -> None:
    x = np.random.default_rng(n).normal(size=n)
    assert iqm(x) == pytest.approx(trim_mean(x, 0.25), abs=1e-12)


def test_iqm_by_hand() -> None:
    assert iqm([0, 1, 2, 100]) == 1.5
    assert iqm([9, 1, 2, 3, -50]) == 2.0
    assert iqm([1, 2, 3]) is None
    assert iqm([1, 2, 3, math.nan, None]) is None  # type: ignore[list-item]
    assert iqm([1, 2, 3, 4, math.nan]) == 2.5


def test_restricted_steps_stop_at_the_common_horizon() -> None:
    steps, reached = [10, 30, 40, 25], [True, True, False, False]
    assert restricted_steps(steps, reached).tolist() == [10, 25, 25, 25]
    assert restricted_steps(steps, reached, 20).tolist() == [10, 20, 20, 20]
    assert restricted_steps([10, 30], [True, True]).tolist() == [10, 30]
    unwatched = restricted_steps(steps, reached, 30)
    assert unwatched[:3].tolist() == [10, 30, 30] and math.isnan(unwatched[3])
    missing = restricted_steps([10, math.nan, 30], [True, False, False])
    assert missing[[0, 2]].tolist() == [10, 30] and math.isnan(missing[1])


def frame() -> pd.DataFrame:
    return pd.DataFrame({
        "clip": ["sym"] * 3 + ["asym"] * 3, "seed": [0, 1, 2] * 2, "steps_to_threshold": [40, 20, 40, 10, 30, 20],
        "reached": [False, True, False, True, True, True], "heldout_reported": 0.5,
    })  # fmt: skip


def test_the_restricted_mean_and_the_share_that_reached_it() -> None:
    summary = threshold_summary(frame(), ["clip"])
    assert summary.to_dict("list") == {
        "arm": ["clip=sym", "clip=asym"], "restricted_mean": [pytest.approx(100 / 3), 20.0],
        "share_reached": [pytest.approx(1 / 3), 1.0], "runs": [3, 3], "horizon": [40.0, 40.0],
    }  # fmt: skip
    shorter = threshold_summary(frame(), ["clip"], horizon=25)
    assert shorter["share_reached"].tolist() == [pytest.approx(1 / 3), pytest.approx(2 / 3)]
    assert shorter["restricted_mean"].tolist() == [pytest.approx(70 / 3), pytest.approx(55 / 3)]


def test_a_run_without_steps_is_missing() -> None:
    lost = frame().astype({"steps_to_threshold": float})
    lost.loc[0, "steps_to_threshold"] = math.nan
    summary = threshold_summary(lost, ["clip"])
    assert summary["runs"].tolist() == [2, 3] and summary["share_reached"].tolist() == [0.5, 1.0]
    (effect,) = effects(lost, ["clip"], "steps_to_threshold")
    assert (effect.n, effect.dropped) == (2, 1)


def test_an_effect_on_censored_steps_is_one_on_restricted_means() -> None:
    (effect,) = effects(frame(), ["clip"], "steps_to_threshold")
    assert effect.estimate == pytest.approx(20 - 100 / 3)
    assert effect.exploratory
    (shorter,) = effects(frame(), ["clip"], "steps_to_threshold", horizon=25)
    assert shorter.estimate == pytest.approx(55 / 3 - 70 / 3)
