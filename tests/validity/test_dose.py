"""Coefficients against finite differences of the loss, and doses against hand-worked ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from ablate.objective.dose import Arm, Update, bind_alternatives, bind_arm, coefficients, dose, doses
from ablate.objective.loss import Tokens, per_token, reduce, weigh

SECTIONS: dict[str, Any] = {
    "clip": {"name": "clip", "clip_low": 0.2, "clip_high": 0.2},
    "reduction": {"name": "token_mean", "scope": "global"},
    "tis": {"name": "off", "renormalize": False},
    "advantage": {"name": "grpo_no_std"},
    "kl": {"name": "none", "kl_coef": 0.0, "place": "loss"},
    "objective": {"entropy_coef": 0.0, "max_response_len": 8, "old_logprobs": "trainer", "loss_scale": 1.0},
}
WIDE = {**SECTIONS, "clip": {"name": "clip", "clip_low": 0.2, "clip_high": 0.28}}


def hand_worked() -> Update:
    """Two rollouts of one prompt, rewards 1 and 0, so A = +-1/2; two tokens each."""
    start = torch.full((2, 2), -1.0, dtype=torch.float64)
    ratio = torch.tensor([[1.25, 1.1], [1.0, 0.7]], dtype=torch.float64)
    return Update(
        logprobs=start + ratio.log(),
        start_logprobs=start,
        rollout_logprobs=start - math.log(1.5),
        loss_mask=torch.ones(2, 2, dtype=torch.bool),
        rewards=torch.tensor([1.0, 0.0], dtype=torch.float64),
        prompts=torch.tensor([7, 7]),
        included=torch.ones(2, dtype=torch.bool),
    )


def test_coefficients_of_a_worked_example() -> None:
    # -A * ratio / 4 per token, 0 where clipped: 1.25 > 1.2 with A > 0, and 0.7 < 0.8 with A < 0
    expected = torch.tensor([[0.0, -0.5 * 1.1 / 4], [0.5 / 4, 0.0]], dtype=torch.float64)
    found = coefficients(bind_arm(SECTIONS), hand_worked())
    assert torch.allclose(found[0], expected, atol=1e-15)
    assert not found[1].any()


def test_a_detached_ratio_weighs_without_being_moved() -> None:
    # cispo holds the ratio fixed, so the coefficient is -A * min(ratio, 1.2) / 4 and nothing is lost
    cispo = {**SECTIONS, "clip": {"name": "cispo", "clip_low": 1.0, "clip_high": 0.2}}
    expected = torch.tensor([[-1.2, -1.1], [1.0, 0.7]], dtype=torch.float64) * 0.5 / 4
    assert torch.allclose(coefficients(bind_arm(cispo), hand_worked())[0], expected, atol=1e-15)


def test_the_dose_of_a_wider_clip_is_the_gradient_it_lets_through() -> None:
    # the wider range lets 1.25 through: |0.5 * 1.25 / 4| over |0.5 * 1.1 / 4| + |0.5 / 4|
    share = doses(bind_arm(SECTIONS), bind_alternatives({"clip=asym": WIDE, "clip=sym": None}), hand_worked())
    assert share == {"dose/clip=asym": pytest.approx(1.25 / 2.1), "dose/clip=sym": 0.0}


def test_the_dose_of_tis_at_a_constant_ratio() -> None:
    # rho is 1.5 on every token: weights of 1.5 instead of 1 change half of everything
    on = {**SECTIONS, "tis": {"name": "token", "cap": 2.0, "renormalize": False}}
    assert doses(bind_arm(SECTIONS), bind_alternatives({"tis=on": on}), hand_worked()) == {
        "dose/tis=on": pytest.approx(0.5)
    }


def test_what_cannot_be_evaluated_is_nan_and_what_cannot_be_bound_is_left_out() -> None:
    kl = {**SECTIONS, "kl": {"name": "k2", "kl_coef": 0.01, "place": "loss"}}
    nonsense = {**SECTIONS, "kl": {"name": "none", "kl_coef": 0.01, "place": "loss"}}
    bound = bind_alternatives({"kl=k2": kl, "kl.kl_coef=0.01": nonsense})
    assert list(bound) == ["kl=k2"]
    assert math.isnan(doses(bind_arm(SECTIONS), bound, hand_worked())["dose/kl=k2"])
    with pytest.raises(ValueError, match="reference"):
        coefficients(bind_arm(kl), hand_worked())
    flat = replace(hand_worked(), rewards=torch.ones(2, dtype=torch.float64))
    own = coefficients(bind_arm(SECTIONS), flat)
    assert math.isnan(dose(own, own))


REST = SECTIONS["objective"]
SEQUENCES = {"name": "sequence_mean", "scope": "global"}
TOKEN = {"name": "token", "cap": 2.0, "renormalize": False}
ICEPOP = {"name": "icepop", "low": 0.5, "high": 1.2, "renormalize": True}
CASES: list[dict[str, Any]] = [
    {},
    {"clip": {"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.05}},
    {"clip": {"name": "dual_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}, "advantage": {"name": "grpo"}},
    {"reduction": SEQUENCES, "tis": TOKEN},
    {"tis": ICEPOP, "kl": {"name": "k3", "kl_coef": 0.1, "place": "loss"}},
    {"kl": {"name": "k1", "kl_coef": 0.1, "place": "reward"}, "objective": {**REST, "entropy_coef": 0.02}},
    {"objective": {**REST, "old_logprobs": "rollout", "loss_scale": 0.125}},
]


@pytest.mark.parametrize("changes", CASES)
def test_coefficients_are_the_derivative_of_the_loss(changes: dict[str, Any]) -> None:
    arm, update = bind_arm({**SECTIONS, **changes}), ragged()
    found = coefficients(arm, update)
    step = 1e-6
    for i, t in ((0, 0), (1, 2), (3, 1), (5, 0)):
        moved = torch.zeros_like(update.logprobs)
        moved[i, t] = step
        slope = (_loss(arm, update, moved, 0) - _loss(arm, update, -moved, 0)) / (2 * step)
        assert float(found[0, i, t]) == pytest.approx(slope, abs=1e-8)
        slope = (_loss(arm, update, 0, moved) - _loss(arm, update, 0, -moved)) / (2 * step)
        assert float(found[1, i, t]) == pytest.approx(slope, abs=1e-8)


def ragged() -> Update:
    """Two groups of three, lengths 1 to 4; masked positions hold NaN."""
    draw = torch.Generator().manual_seed(1)
    mask = torch.arange(4) < torch.tensor([4, 3, 1, 2, 4, 1])[:, None]

    def noise(size: float) -> torch.Tensor:
        return torch.where(mask, size * torch.randn(6, 4, generator=draw, dtype=torch.float64), torch.nan)

    start = -1 + noise(0.2)
    return Update(
        start + noise(0.15), start, start + noise(0.2), mask,
        torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64), torch.tensor([3, 3, 3, 5, 5, 5]),
        torch.ones(6, dtype=torch.bool), start + noise(0.3),
    )  # fmt: skip


def _loss(arm: Arm, u: Update, logprob_step: Any, entropy_step: Any) -> float:
    """The loss of the trainer's own composition, with fixed advantages."""
    o, old = arm.objective, u.rollout_logprobs if arm.anchored_at_sampler else u.start_logprobs
    rewards = u.rewards
    if o.kl_place == "reward":
        gap = torch.where(u.loss_mask, u.start_logprobs - u.ref_logprobs, 0.0)
        rewards = rewards - o.kl_coef * gap.sum(-1)
    credit = arm.advantage(rewards, u.prompts, u.included)
    tokens = Tokens(
        u.logprobs + logprob_step, old, u.rollout_logprobs, credit[:, None].expand_as(u.loss_mask), u.loss_mask,
        u.ref_logprobs, torch.ones_like(u.logprobs) + entropy_step,
    )  # fmt: skip
    weights = weigh(o, arm.reduction, u.loss_mask, u.prompts, credit, old - u.rollout_logprobs, arm.max_response_len)
    return float(reduce(per_token(o, tokens), weights) * arm.loss_scale)
