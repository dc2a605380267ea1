"""Advantages by hand, against the plain-Python reference, and faults known from similar systems."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_support import level, level_names
from torch import Tensor

from ablate.objective import advantage
from ablate.objective.loss import bind_advantage

ALL = level_names("advantage")


def credit(name: str, rewards: list[float], prompts: list[int], included: list[bool] | None = None) -> Tensor:
    kept = torch.tensor([True] * len(rewards) if included is None else included, dtype=torch.bool)
    values = torch.tensor(rewards, dtype=torch.float64)
    return bind_advantage(level("advantage", name))(values, torch.tensor(prompts, dtype=torch.long), kept)


def test_values_by_hand() -> None:
    rewards, prompts = [1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0]
    std = math.sqrt(1 / 3)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    expected = {
        "grpo": 0.5 / (std + 1e-6),
        "grpo_no_std": 0.5,
        "rloo": 2 / 3,
        "rloo_n": 2 / 3,
        "maxrl": 1 / 1.000002,
    }
    for name, size in expected.items():
        torch.testing.assert_close(credit(name, rewards, prompts), signs * size)


group = st.tuples(
    st.integers(-3, 3),
    st.one_of(st.sampled_from([0.0, 1.0, 0.5, 1.0 + 1e-6, math.nan, math.inf]), st.floats(0, 10)),
    st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(group, max_size=24), st.sampled_from(ALL))
def test_any_order_size_and_exclusion_agrees_with_the_reference(rows: list[tuple[int, float, bool]], name: str) -> None:
    prompts, rewards, included = ([r[k] for r in rows] for k in range(3))
    values = torch.tensor(rewards, dtype=torch.float64)
    ids, kept = torch.tensor(prompts, dtype=torch.long), torch.tensor(included, dtype=torch.bool)
    found = bind_advantage(level("advantage", name))(values, ids, kept)
    wanted = torch.tensor(
        reference.advantages(level("advantage", name), rewards, prompts, included), dtype=torch.float64
    )
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_interleaved_and_uneven_groups_are_told_apart_by_id(name: str) -> None:
    first, second = [1.0, 0.0, 0.0, 1.0, 0.5], [0.2, 0.9, 0.4, 0.1]
    alone = torch.cat([credit(name, first, [42] * 5), credit(name, second, [7] * 4)])
    order = [0, 5, 1, 6, 2, 7, 3, 8, 4]
    rewards = [(first + second)[i] for i in order]
    prompts = [([42] * 5 + [7] * 4)[i] for i in order]
    torch.testing.assert_close(credit(name, rewards, prompts), alone[order], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "rewards",
    [[1, 1, 1, 1 + 1e-6], [1, 1, 1, 1 + 1e-5], [0, 0, 0, 1e-5], [0.3] * 4, [1e6, 1e6, 1e6, 1e6 + 1e-6]],
)
def test_near_constant_groups_get_exactly_nothing(name: str, dtype: torch.dtype, rewards: list[float]) -> None:
    function = bind_advantage(level("advantage", name))
    found = function(
        torch.tensor(rewards, dtype=dtype), torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.bool)
    )
    assert found.dtype == dtype and not found.any()


@pytest.mark.parametrize("name", ALL)
def test_a_real_spread_just_above_the_limit_counts(name: str) -> None:
    assert credit(name, [1.0, 1.0, 1.0, 1.0 + 1.1e-5], [0] * 4)[3] > 0


@pytest.mark.parametrize("name", ALL)
def test_a_group_of_one_gets_nothing(name: str) -> None:
    assert not credit(name, [0.3, 1.0, 0.0], [1, 2, 3]).any()
    found = credit(name, [0.3, 1.0, 0.0], [1, 1, 1], [True, False, False])
    assert not found.any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_failed_rewards_are_out_of_mean_std_and_n(name: str, fault: float) -> None:
    rest = credit(name, [1.0, 0.0, 0.5, 0.25], [0] * 4)
    for flagged in (True, False):  # said to be excluded, or only not finite
        found = credit(name, [1.0, fault, 0.0, 0.5, 0.25], [0] * 5, [True, not flagged, True, True, True])
        torch.testing.assert_close(found[[0, 2, 3, 4]], rest, rtol=1e-14, atol=0)
        assert found[1] == 0


@pytest.mark.parametrize("name", ALL)
def test_an_excluded_reward_that_is_finite_has_no_influence(name: str) -> None:
    one = credit(name, [1.0, 0.0, 0.5, 0.25, 9.0], [0] * 5, [True] * 4 + [False])
    two = credit(name, [1.0, 0.0, 0.5, 0.25, -9.0], [0] * 5, [True] * 4 + [False])
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert one[4] == 0


def test_rloo_n_needs_its_minimum_of_included_rollouts() -> None:
    rewards, prompts = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0], [1] * 4 + [2] * 4
    found = credit("rloo_n", rewards, prompts, [True, True, True, False] + [True] * 4)
    assert not found[:4].any()
    torch.testing.assert_close(found[4:], credit("rloo", rewards, prompts)[4:])
    function = bind_advantage(level("advantage", "rloo_n", min_group_size=3))
    kept = torch.tensor([True, True, True, False] + [True] * 4)
    three = function(torch.tensor(rewards, dtype=torch.float64), torch.tensor(prompts), kept)
    torch.testing.assert_close(three[:4], torch.tensor([0.5, -1.0, 0.5, 0.0], dtype=torch.float64))


def test_maxrl_refuses_negative_rewards_but_not_excluded_ones() -> None:
    with pytest.raises(ValueError, match="rewards >= 0"):
        credit("maxrl", [1.0, -1.0], [0, 0])
    assert not credit("maxrl", [1.0, -1.0], [0, 0], [True, False]).any()


def test_float32_rewards_lose_nothing_to_large_means() -> None:
    rewards = torch.tensor([1000.5, 1000.0, 1000.5, 1000.0])
    found = advantage.grpo_no_std(rewards, torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.bool))
    torch.testing.assert_close(found, torch.tensor([0.25, -0.25, 0.25, -0.25]), rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_no_rollouts_at_all(name: str) -> None:
    assert credit(name, [], [], None).shape == (0,)
    assert not credit(name, [math.nan, math.nan], [0, 0]).any()
