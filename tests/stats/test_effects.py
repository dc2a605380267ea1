"""Effects against scipy's paired t-test, an explicit least-squares fit, and values worked by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from scipy import stats as reference

from ablate.errors import UsageError
from ablate.stats import arm_correlation, complete_blocks, effects, effects_frame, holm, interactions, main_effects
from ablate.stats.intervals import pooling_p

Y = "heldout_reported"


def table(values: np.ndarray, **factors: Sequence[object]) -> pd.DataFrame:
    """One row per run from values [arms, seeds], the arms being the grid of `factors` with the last varying fastest."""
    rows = [
        {**dict(zip(factors, levels, strict=True)), "seed": seed, Y: values[arm, seed]}
        for arm, levels in enumerate(itertools.product(*factors.values()))
        for seed in range(values.shape[1])
    ]
    return pd.DataFrame(rows)


def random(arms: int, seeds: int, key: int = 0) -> np.ndarray:
    noise = np.random.default_rng(key)
    return 0.7 + noise.normal(0, 0.05, (1, seeds)) + noise.normal(0, 0.02, (arms, seeds))


@pytest.mark.parametrize("seeds", [2, 3, 8, 21])
def test_two_arms_give_the_paired_t_interval(seeds: int) -> None:
    values = random(2, seeds)
    expected = reference.ttest_rel(values[1], values[0])
    interval = expected.confidence_interval(0.95)
    (effect,) = effects(table(values, clip=["sym", "asym"]), ["clip"], Y)
    assert (effect.factor, effect.contrast, effect.n, effect.df) == ("clip", "asym - sym", seeds, seeds - 1)
    assert effect.estimate == pytest.approx((values[1] - values[0]).mean(), abs=1e-14)
    assert (effect.low, effect.high) == pytest.approx((interval.low, interval.high), abs=1e-12)
    assert effect.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert effect.p_adjusted == effect.p and not effect.exploratory


def test_a_grid_worked_by_hand() -> None:
    """2 x 2 arms, 2 seeds. Cell means (sym on, sym off, asym on, asym off) = 10, 12, 14, 20; residuals all +-1/2."""
    values = np.array([[10.5, 9.5], [11.5, 12.5], [13.5, 14.5], [20.5, 19.5]])
    found = {e.name: e for e in effects(table(values, clip=["sym", "asym"], tis=["on", "off"]), ["clip", "tis"], Y)}
    clip, tis = found["clip: asym - sym"], found["tis: off - on"]
    both = found["clip x tis: (asym - sym) at off - (asym - sym) at on"]
    assert (clip.estimate, tis.estimate, both.estimate) == (6.0, 4.0, 4.0)
    # the seed means are equal, so the residuals are the deviations: 8 times 1/4 over (4-1)(2-1) df
    variance = 8 * 0.25 / 3
    assert {e.df for e in found.values()} == {3} and {e.n for e in found.values()} == {2}
    assert clip.se == pytest.approx(math.sqrt(variance * 4 * 0.25 / 2)) == pytest.approx(tis.se)
    assert both.se == pytest.approx(math.sqrt(variance * 4 / 2))
    assert clip.high - clip.estimate == pytest.approx(3.182446305284263 * clip.se)  # t(0.975, 3) from a table


def test_the_pooled_fit_is_least_squares_with_seed_blocks() -> None:
    """Against an explicit design matrix with a column per arm and per seed, 3 x 2 arms, 5 seeds."""
    values = random(6, 5, key=3)
    frame = table(values, clip=["sym", "asym", "asym_low"], tis=["on", "off"])
    arms, seeds = values.shape
    design = np.zeros((arms * seeds, arms + seeds - 1))
    for row, (arm, seed) in enumerate(itertools.product(range(arms), range(seeds))):
        design[row, arm] = 1
        if seed:
            design[row, arms + seed - 1] = 1
    y = values.ravel()
    coefficients, rss, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    df = len(y) - rank
    covariance = rss[0] / df * np.linalg.inv(design.T @ design)
    contrast = np.zeros(design.shape[1])
    contrast[:arms] = [-0.5, -0.5, 0, 0, 0.5, 0.5]
    half = reference.t.ppf(0.975, df) * math.sqrt(contrast @ covariance @ contrast)
    effect = {e.name: e for e in effects(frame, ["clip", "tis"], Y)}["clip: asym_low - sym"]
    assert effect.df == df == 20
    assert effect.estimate == pytest.approx(contrast @ coefficients, abs=1e-12)
    assert (effect.low, effect.high) == pytest.approx((effect.estimate - half, effect.estimate + half), abs=1e-12)


def test_main_effects_and_interactions_are_the_parts_of_effects() -> None:
    frame = table(random(6, 4), clip=["sym", "asym", "asym_low"], tis=["on", "off"])
    parts = [*main_effects(frame, ["clip", "tis"], Y), *interactions(frame, ["clip", "tis"], Y)]
    whole = effects(frame, ["clip", "tis"], Y)
    assert [(e.name, e.estimate, e.p) for e in parts] == [(e.name, e.estimate, e.p) for e in whole]
    assert [e.name for e in whole] == [
        "clip: asym - sym", "clip: asym_low - sym", "tis: off - on",
        "clip x tis: (asym - sym) at off - (asym - sym) at on",
        "clip x tis: (asym_low - sym) at off - (asym_low - sym) at on",
    ]  # fmt: skip


def test_what_a_seed_does_to_all_arms_does_not_widen_the_interval() -> None:
    values = random(4, 6)
    shifted = values + np.random.default_rng(1).normal(0, 10, (1, 6))
    kwargs = {"clip": ["sym", "asym"], "tis": ["on", "off"]}
    calm = effects(table(values, **kwargs), ["clip", "tis"], Y)
    wild = effects(table(shifted, **kwargs), ["clip", "tis"], Y)
    assert [e.se for e in wild] == pytest.approx([e.se for e in calm], rel=1e-9)


def test_the_paired_interval_pools_nothing() -> None:
    """scipy's one-sample t interval of each seed's own contrast, in a grid whose arms scatter differently."""
    values = random(4, 5) * np.array([[1.0], [1.3], [0.7], [2.0]])
    found = effects(table(values, clip=["sym", "asym"], tis=["on", "off"]), ["clip", "tis"], Y)
    weights = [[-0.5, -0.5, 0.5, 0.5], [-0.5, 0.5, -0.5, 0.5], [1, -1, -1, 1]]
    for effect, w in zip(found, weights, strict=True):
        interval = reference.ttest_1samp(np.array(w) @ values, 0).confidence_interval(0.95)
        assert effect.paired == pytest.approx((interval.low, interval.high), abs=1e-12)


def test_copies_of_an_arm_are_no_replicates() -> None:
    """An inert second factor repeats every run: the paired interval is that of two arms, n stays the seeds."""
    two = effects(table(random(2, 3), clip=["sym", "asym"]), ["clip"], Y)[0]
    doubled = table(np.repeat(random(2, 3), 2, axis=0), clip=["sym", "asym"], tis=["on", "off"])
    four = effects(doubled, ["clip", "tis"], Y)[0]
    assert four.n == two.n == 3 and four.estimate == pytest.approx(two.estimate)
    assert four.paired == pytest.approx((two.low, two.high))
    assert two.pooled_ok and not four.pooled_ok and "read its paired interval" in four.method


def test_pooling_is_doubted_in_5_percent_of_clean_tables() -> None:
    """The F test against its own definition, by orthonormal contrasts, and its size by simulation."""
    values = np.random.default_rng(0).normal(size=(20_000, 4, 3))
    weights = np.array([-0.5, -0.5, 0.5, 0.5])
    p = pooling_p(values, weights)
    assert (p <= 0.05).mean() == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 20_000))
    others = np.array([[-0.5, 0.5, -0.5, 0.5], [0.5, -0.5, -0.5, 0.5]])
    own, rest = (weights @ values[0]).var(ddof=1), np.mean((others @ values[0]).var(axis=1, ddof=1))
    assert p[0] == pytest.approx(reference.f.sf(own / rest, 2, 4))


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    with_missing = holm([0.01, math.nan])
    assert with_missing[0] == 0.02 and math.isnan(with_missing[1])


def test_only_declared_contrasts_of_the_primary_outcome_are_adjusted() -> None:
    frame = table(random(4, 5), clip=["sym", "asym"], tis=["on", "off"]).assign(auc=lambda f: 2 * f[Y])
    found = effects(frame, ["clip", "tis"], Y, declared=["clip: asym - sym", "tis: off - on"])
    assert [e.exploratory for e in found] == [False, False, True]
    assert [e.p_adjusted for e in found[:2]] == pytest.approx(holm([e.p for e in found[:2]]))
    assert math.isnan(found[2].p_adjusted)
    others = effects(frame, ["clip", "tis"], "auc")
    assert all(e.exploratory and math.isnan(e.p_adjusted) for e in others)
    assert all(not e.exploratory for e in effects(frame, ["clip", "tis"], "auc", primary="auc"))


def test_one_seed_gives_an_estimate_and_no_interval() -> None:
    (effect,) = effects(table(np.array([[0.5], [0.75]]), clip=["sym", "asym"]), ["clip"], Y)
    assert (effect.estimate, effect.n, effect.df) == (0.25, 1, 0)
    assert all(math.isnan(v) for v in (effect.low, effect.high, effect.p, effect.p_adjusted, effect.se))
    assert effect.bootstrap is None and "no interval" in effect.method


def test_no_spread_gives_no_interval_rather_than_certainty() -> None:
    """Arms that always differ by the same amount, up to rounding: n = 4 cannot make that p = 0."""
    values = np.array([[0.1, 0.2, 0.3, 0.7], [0.2, 0.3, 0.4, 0.8]])
    (effect,) = effects(table(values, clip=["sym", "asym"]), ["clip"], Y)
    assert effect.estimate == pytest.approx(0.1)
    assert math.isnan(effect.low) and math.isnan(effect.p) and "no spread" in effect.method


def test_incomplete_seeds_are_left_out_and_counted() -> None:
    values = random(4, 6)
    frame = table(values, clip=["sym", "asym"], tis=["on", "off"])
    frame = frame.drop(index=frame.index[(frame["clip"] == "asym") & (frame.tis == "on") & (frame.seed == 2)])
    frame.loc[(frame["clip"] == "sym") & (frame.tis == "off") & (frame.seed == 4), Y] = math.inf
    found = effects(frame, ["clip", "tis"], Y)
    kept = values[:, [0, 1, 3, 5]]
    expected = effects(table(kept, clip=["sym", "asym"], tis=["on", "off"]), ["clip", "tis"], Y)
    assert [(e.n, e.dropped) for e in found] == [(4, 2)] * 3
    assert [(e.estimate, e.low) for e in found] == [(e.estimate, e.low) for e in expected]
    assert "2 incomplete left out" in found[0].method
    assert complete_blocks(frame, ["clip", "tis"], Y).note() == f"{Y}: seed 2, 4 left out: not every arm has it"


def test_an_arm_without_runs_is_left_out_and_the_rest_compared_arm_by_arm() -> None:
    frame = table(random(4, 3), clip=["sym", "asym"], tis=["on", "off"])
    frame.loc[(frame["clip"] == "asym") & (frame.tis == "off"), Y] = math.nan
    found = effects(frame, ["clip", "tis"], Y, declared=["clip: asym - sym"])
    assert [e.name for e in found] == [
        "tis: clip=sym,tis=off - clip=sym,tis=on", "clip: clip=asym,tis=on - clip=sym,tis=on",
    ]  # fmt: skip
    assert all(e.n == 3 and e.dropped == 0 for e in found)
    note = complete_blocks(frame, ["clip", "tis"], Y).note()
    assert note == f"{Y}: no run of clip=asym,tis=off has this outcome"
    with pytest.raises(UsageError, match="no full grid"):
        main_effects(frame, ["clip", "tis"], Y)


def test_without_the_base_level_the_next_is_the_base() -> None:
    values = random(3, 4)
    frame = table(values, clip=["sym", "asym", "dual"])
    frame.loc[frame["clip"] == "sym", Y] = math.nan
    (effect,) = effects(frame, ["clip"], Y)
    assert effect.contrast == "dual - asym"
    assert effect.estimate == pytest.approx((values[2] - values[1]).mean())


def test_no_complete_seed_and_no_run_at_all() -> None:
    frame = table(random(2, 2), clip=["sym", "asym"])
    frame.loc[[0, 3], Y] = math.nan
    (effect,) = effects(frame, ["clip"], Y)
    assert effect.n == 0 and math.isnan(effect.estimate) and "no seed" in effect.method
    frame[Y] = math.nan
    assert effects(frame, ["clip"], Y) == []
    assert effects(frame.iloc[:0], ["clip"], Y) == []
    assert effects(table(random(1, 3), clip=["sym"]), ["clip"], Y) == []


def test_the_base_can_be_chosen() -> None:
    frame = table(random(3, 4), clip=["sym", "asym", "dual"])
    assert [e.contrast for e in effects(frame, ["clip"], Y, base={"clip": "dual"})] == ["sym - dual", "asym - dual"]
    assert [e.contrast for e in effects(frame, ["clip"], Y, base="clip=asym")] == [
        "clip=sym - clip=asym", "clip=dual - clip=asym",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="no run at this level; did you mean dual"):
        effects(frame, ["clip"], Y, base={"clip": "duall"})


def test_a_list_of_arms_is_compared_with_its_first() -> None:
    values = random(3, 4)
    names = np.repeat(["control", "tis", "both"], 4)
    frame = table(values, arm=["control", "tis", "both"]).assign(
        clip=np.where(names == "both", "asym", "sym"), tis=np.where(names == "control", "off", "on")
    )
    found = effects(frame, ["clip", "tis"], Y)
    assert [(e.factor, e.contrast) for e in found] == [("tis", "tis - control"), ("clip+tis", "both - control")]
    assert [e.estimate for e in found] == pytest.approx([(values[k] - values[0]).mean() for k in (1, 2)])
    assert {e.df for e in found} == {6}


def test_mistakes_are_said_in_one_line() -> None:
    frame = table(random(2, 3), clip=["sym", "asym"])
    with pytest.raises(UsageError, match="no such column; did you mean heldout_reported"):
        effects(frame, ["clip"], "heldout_report")
    with pytest.raises(UsageError, match="no such contrast; did you mean clip: asym - sym"):
        effects(frame, ["clip"], Y, declared=["clip: asym-sym"])
    with pytest.raises(UsageError, match="two runs of one arm and seed"):
        effects(pd.concat([frame, frame]), ["clip"], Y)


def test_bootstrap_appears_at_8_seeds_and_bca_at_20() -> None:
    def shown(seeds: int) -> tuple[bool, bool]:
        (e,) = effects(table(random(2, seeds), clip=["sym", "asym"]), ["clip"], Y)
        return e.bootstrap is not None, e.bca is not None

    assert [shown(n) for n in (1, 7, 8, 19, 20)] == [
        (False, False), (False, False), (True, False), (True, False), (True, True),
    ]  # fmt: skip


def test_the_same_table_gives_the_same_numbers_in_any_row_order() -> None:
    frame = table(random(4, 8), clip=["sym", "asym"], tis=["on", "off"])
    first = effects(frame, ["clip", "tis"], Y)
    assert (
        effects(frame.sort_values(["seed", "clip", "tis"], ascending=[True, False, False]), ["clip", "tis"], Y) == first
    )


def test_levels_may_be_numbers_or_missing() -> None:
    values = random(2, 3)
    (effect,) = effects(table(values, **{"optim.lr": [1e-4, 2e-4]}), ["optim.lr"], Y)
    assert effect.contrast == "0.0002 - 0.0001"
    (effect,) = effects(table(values, **{"select.cap": [None, 80]}), ["select.cap"], Y)
    assert effect.contrast == "80.0 - nan"


def test_correlation_between_arms() -> None:
    values = random(3, 6)
    frame = table(values, clip=["sym", "asym", "dual"])
    matrix = arm_correlation(frame, ["clip"], Y)
    assert matrix.to_numpy() == pytest.approx(np.corrcoef(values), abs=1e-12)
    assert list(matrix.columns) == ["clip=sym", "clip=asym", "clip=dual"]
    assert arm_correlation(frame[frame.seed < 2], ["clip"], Y).isna().all(axis=None)


def test_the_frame_holds_every_effect() -> None:
    found = effects(table(random(2, 8), clip=["sym", "asym"]), ["clip"], Y)
    frame = effects_frame(found)
    assert frame.loc[0, "estimate"] == found[0].estimate
    assert (frame.loc[0, "bootstrap_low"], frame.loc[0, "bootstrap_high"]) == found[0].bootstrap
    assert math.isnan(frame.loc[0, "bca_low"])
    assert list(effects_frame([]).columns) == list(frame.columns)
