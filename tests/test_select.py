"""The EMA selector against pandas and against the published rule, worked by hand."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.select import ema, select


@given(st.lists(st.floats(0, 1), min_size=1, max_size=100), st.integers(1, 20))
def test_ema_is_pandas_ewm_without_adjustment(rewards: list[float], span: int) -> None:
    expected = pd.Series(rewards).ewm(span=span, adjust=False).mean()
    assert ema(rewards, span) == pytest.approx(expected.tolist(), rel=1e-12, abs=1e-15)


def test_ema_by_hand() -> None:
    # alpha = 1/3: 0.3; 0.3*2/3 + 0.6/3 = 0.4; 0.4*2/3 + 0/3
    assert ema([0.3, 0.6, 0.0], 5) == pytest.approx([0.3, 0.4, 0.8 / 3])


def test_candidates_are_exported_steps_from_twice_the_interval_to_the_cap() -> None:
    rewards = {s: s / 100 for s in range(1, 101)}
    chosen = select(rewards, range(5, 101, 5), {}, span=5, interval=5, cap=80)
    assert [c.step for c in chosen.candidates] == list(range(10, 81, 5))
    assert chosen.reported is not None
    assert chosen.reported.step == 80


def test_the_ema_sees_all_steps_not_only_candidates() -> None:
    rewards = {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.9, 5: 0.0, 6: 0.0}
    chosen = select(rewards, [2, 4, 6], {4: 0.7}, span=5, interval=2, cap=6)
    assert chosen.reported is not None
    assert (chosen.reported.step, chosen.reported.heldout) == (4, 0.7)
    assert chosen.reported.ema == pytest.approx(0.3)


def test_ties_go_to_the_earliest() -> None:
    chosen = select(dict.fromkeys(range(1, 31), 0.5), range(5, 31, 5), {}, span=5, interval=5, cap=30)
    assert chosen.reported is not None
    assert chosen.reported.step == 10


def test_a_step_without_exported_weights_is_no_candidate_however_good() -> None:
    rewards = dict.fromkeys(range(1, 21), 0.1) | {10: 1.0}
    chosen = select(rewards, [15, 20], {}, span=1, interval=5, cap=20)
    assert chosen.reported is not None
    assert chosen.reported.step == 15


def test_nothing_to_select_yet() -> None:
    assert select({1: 0.2}, [], {}, span=5, interval=5, cap=10).reported is None
    assert select({}, [10], {}, span=5, interval=5, cap=10).reported is None


def test_the_seeds_published_collapse_still_gets_a_step() -> None:
    """The rule always returns something, even for a run that fell to zero: that is the validity checks' business."""
    known = {1: 0.080, 4: 0.041, 8: 0.023, 10: 0.0, 15: 0.0, 16: 0.035, 17: 0.0}
    chosen = select(known, [10, 15], {}, span=5, interval=5, cap=17)
    assert chosen.reported is not None
    assert chosen.reported.step == 10
