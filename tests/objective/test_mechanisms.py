"""Hand-worked values of single mechanisms, and the meaning of the flags."""

from __future__ import annotations

import math

import pytest
import torch
from objective_support import level
from torch import Tensor

from ablate.objective import kl, reduction, surrogate, tis
from ablate.objective.surrogate import Surrogate


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def everywhere(like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool)


def apply(name: str, ratio: Tensor, advantages: Tensor, mask: Tensor | None = None) -> Surrogate:
    chosen = level("clip", name)
    function = getattr(surrogate, chosen.pop("name"))
    mask = everywhere(ratio) if mask is None else mask
    return function(torch.full_like(ratio, -2.0), ratio.log(), advantages, mask, **chosen)


def test_clip_bounds_only_what_would_go_too_far() -> None:
    ratio = row(0.7, 0.7, 1.1, 1.4, 1.4)
    out = apply("sym", ratio, row(1, -1, 1, 1, -1))
    torch.testing.assert_close(out.loss, row(-0.7, 0.8, -1.1, -1.2, 1.4))
    assert out.clipped_low.tolist() == [[False, True, False, False, False]]
    assert out.clipped_high.tolist() == [[False, False, False, True, False]]
    assert not out.clipped_dual.any()


def test_asymmetric_levels_move_the_upper_bound() -> None:
    ratio, credit = row(1.25, 1.1), row(1, 1)
    torch.testing.assert_close(apply("sym", ratio, credit).loss, row(-1.2, -1.1))
    torch.testing.assert_close(apply("asym", ratio, credit).loss, row(-1.25, -1.1))
    torch.testing.assert_close(apply("asym_low", ratio, credit).loss, row(-1.05, -1.05))


def test_dual_clip_bounds_negative_advantages_alone() -> None:
    out = apply("dual", row(2.9, 3.1, 3.1), row(-2, -2, 2))
    torch.testing.assert_close(out.loss, row(5.8, 6.0, -2.4))
    assert out.clipped_dual.tolist() == [[False, True, False]]


def test_gspo_uses_the_geometric_mean_of_the_ratios() -> None:
    out = apply("gspo", row(4.0, 0.25, 1.0), row(1, 1, 1))
    torch.testing.assert_close(out.loss, row(-1, -1, -1))
    assert not out.clipped_high.any()
    mask = torch.tensor([[True, False, True]])
    out = apply("gspo", row(4.0, 0.25, 1.0), row(1, 1, 1), mask)
    torch.testing.assert_close(out.loss, row(-1.0004, 0, -1.0004))
    assert out.clipped_high.tolist() == mask.tolist()


def test_cispo_weighs_log_probabilities_and_flags_both_sides_for_any_sign() -> None:
    out = apply("cispo", row(0.5, 7.0, 7.0), row(1, 1, -1))
    torch.testing.assert_close(out.loss, row(1.0, 12.0, -12.0))
    assert out.clipped_high.tolist() == [[False, True, True]]
    flagged = surrogate.cispo(row(-1, -1), row(-1, -1), row(1, -1), everywhere(row(1, 1)), clip_low=0.2, clip_high=1.0)
    assert flagged.clipped_low.all() and not flagged.clipped_high.any()


def test_sapo_gates_with_the_temperature_of_the_sign() -> None:
    out = apply("sapo", row(2.0, 2.0), row(1, -1))
    expected = [-4 / (1 + math.exp(-1)), 4 / 1.05 / (1 + math.exp(-1.05))]
    torch.testing.assert_close(out.loss, row(*expected))


@pytest.mark.parametrize("name", ["none", "sapo"])
def test_unbounded_surrogates_raise_no_flag(name: str) -> None:
    out = apply(name, row(0.01, 50.0), row(-1, 1))
    assert not (out.clipped_low | out.clipped_high | out.clipped_dual).any()


@pytest.mark.parametrize("name", ["sym", "dual", "gspo", "cispo"])
def test_masked_tokens_raise_no_flag(name: str) -> None:
    ratio = row(9.0, math.nan, math.inf, 0.0)
    out = apply(name, ratio, row(1, 1, 1, -1), torch.tensor([[True, False, False, False]]))
    assert not out.loss[0, 1:].any()
    assert not (out.clipped_low | out.clipped_high | out.clipped_dual)[0, 1:].any()


MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
PROMPTS = torch.tensor([5, 2, 5, 2])
CREDIT = torch.tensor([1.0, 0.0, 3.0, -1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("token_mean", [1 / 7, 1 / 7, 0, 1 / 7]),
        ("sequence_mean", [1 / 8, 1 / 16, 0, 1 / 4]),
        ("seq_mean_token_sum_norm", [1 / 40, 1 / 40, 0, 1 / 40]),
        (
            "seq_mean_token_sum_norm_global",
            [1 / 20, 1 / 20, 0, 1 / 20],
        ),  # rows 0 and 3: row 2 has no loss token
        ("prompt_mean", [1 / 4, 1 / 10, 0, 1 / 10]),
    ],
)
@pytest.mark.parametrize("per_row_advantages", [True, False])
def test_reduction_weights_of_a_ragged_batch(name: str, per_token: list[float], per_row_advantages: bool) -> None:
    credit = CREDIT if per_row_advantages else CREDIT[:, None].expand(4, 4)
    weights = getattr(reduction, name)(MASK, PROMPTS, credit, 10)
    torch.testing.assert_close(weights, MASK * torch.tensor(per_token, dtype=torch.float64)[:, None])


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"])
def test_reductions_follow_the_rows_in_any_order(name: str) -> None:
    order = torch.tensor([2, 0, 3, 1])
    function = getattr(reduction, name)
    permuted = function(MASK[order], PROMPTS[order], CREDIT[order], 10)
    torch.testing.assert_close(permuted, function(MASK, PROMPTS, CREDIT, 10)[order], rtol=0, atol=0)


def test_global_counts_only_sequences_with_a_loss_token_of_nonzero_advantage() -> None:
    shaped = CREDIT[:, None].expand(4, 4).clone()
    shaped[1, 3] = 0.5  # per-token shaping gives row 1 an advantage
    shaped[3, 2] = torch.nan  # masked
    weights = reduction.seq_mean_token_sum_norm_global(MASK, PROMPTS, shaped, 10)
    assert weights[0, 0].item() == pytest.approx(1 / 30)
    assert not reduction.seq_mean_token_sum_norm_global(MASK, PROMPTS, CREDIT * 0, 10).any()


def corrected(name: str, *rho: float, mask: Tensor | None = None) -> Tensor:
    chosen = level("tis", name)
    chosen.pop("renormalize")
    ratios = row(*rho)
    return getattr(tis, chosen.pop("name"))(ratios.log(), everywhere(ratios) if mask is None else mask, **chosen)


def test_tis_weights_by_hand() -> None:
    torch.testing.assert_close(corrected("off", 0.1, 5.0), row(1, 1))
    torch.testing.assert_close(corrected("on", 0.1, 1.5, 5.0), row(0.1, 1.5, 2.0))
    torch.testing.assert_close(corrected("sequence", 0.5, 6.0), row(3, 3))
    torch.testing.assert_close(corrected("sequence", 3.0, 6.0), row(5, 5))
    torch.testing.assert_close(corrected("icepop", 0.4, 0.6, 4.9, 5.1), row(0, 0.6, 4.9, 0))
    torch.testing.assert_close(corrected("geometric_mask", 1.2, 0.84), row(1, 1))
    torch.testing.assert_close(corrected("geometric_mask", 1.2, 1.0), row(0, 0))
    torch.testing.assert_close(corrected("product_mask", 4.0, 0.4), row(1, 1))
    torch.testing.assert_close(corrected("product_mask", 4.0, 0.6), row(0, 0))
    torch.testing.assert_close(corrected("outlier_mask", 90.0, 90.0), row(1, 1))
    torch.testing.assert_close(corrected("outlier_mask", 1.0, 101.0), row(0, 0))
    torch.testing.assert_close(corrected("outlier_mask", 1.0, 0.9e-4), row(0, 0))


def test_tis_thresholds_are_inclusive() -> None:
    zero = row(0.0, 0.0)
    mask = everywhere(zero)
    for function in (tis.icepop, tis.geometric_mask, tis.product_mask, tis.outlier_mask):
        assert function(zero, mask, low=1.0, high=1.0).all(), function.__name__


@pytest.mark.parametrize("name", ["off", "on", "sequence", "icepop", "geometric_mask", "product_mask", "outlier_mask"])
def test_wholly_masked_rows_are_kept_and_masked_tokens_do_not_count(name: str) -> None:
    nowhere = torch.zeros(1, 3, dtype=torch.bool)
    torch.testing.assert_close(corrected(name, math.nan, 0.0, math.inf, mask=nowhere), row(1, 1, 1))
    one = torch.tensor([[True, False, False]])
    alone = corrected(name, 1.005)
    assert corrected(name, 1.005, 0.0, math.nan, mask=one)[0, 0].item() == pytest.approx(alone.item(), rel=1e-12)


def test_geometric_mean_is_not_held_by_the_bound_of_sums() -> None:
    """4,000 tokens at log rho 0.015: the sum is 60, the mean ratio 1.0151, out of the default range."""
    long = torch.full((1, 4000), 0.015, dtype=torch.float64)
    assert not tis.geometric_mask(long, everywhere(long), low=0.99, high=1.01).any()


def test_tis_weights_are_detached() -> None:
    difference = row(0.3, -0.2).requires_grad_()
    assert not tis.token(difference, everywhere(difference), cap=2.0).requires_grad
    assert not tis.sequence(difference, everywhere(difference), cap=2.0).requires_grad


def test_kl_estimators_by_hand() -> None:
    lp, ref = row(-1.0, -1.0, -1.0), row(-1.5, -1.0, -0.5)
    torch.testing.assert_close(kl.k1(lp, ref), row(0.5, 0, -0.5))
    torch.testing.assert_close(kl.k2(lp, ref), row(0.125, 0, 0.125))
    torch.testing.assert_close(kl.k3(lp, ref), row(math.exp(-0.5) - 0.5, 0, math.exp(0.5) - 1.5))
    assert not kl.none(lp, ref).any()


def test_k3_is_held_in_difference_and_value() -> None:
    lp = row(-30.0, -5.0, -0.1, -0.5).requires_grad_()
    value = kl.k3(lp, row(-0.5, -0.1, -30.0, -0.6))
    # d: -29.5 (value held at 10), -4.9 (value held), 29.9 (d held at 20: 19, held at 10), 0.1 (free)
    torch.testing.assert_close(value, row(10, 10, 10, math.exp(-0.1) + 0.1 - 1))
    (grad,) = torch.autograd.grad(value.sum(), lp)
    torch.testing.assert_close(grad, row(0, 0, 0, 1 - math.exp(-0.1)))


def test_k2_has_the_exact_gradient_of_reverse_kl_on_policy_and_k3_that_of_forward_kl() -> None:
    """Full expectation over a vocabulary of five, from logits."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.1, 0.4, 0.2, 0.1, -0.3], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    p = logprobs.exp().detach()
    exact = {
        "k2": (logprobs.exp() * (logprobs - ref)).sum(),
        "k3": (ref.exp() * (ref - logprobs)).sum(),
        "k1": torch.zeros((), dtype=torch.float64) * logits.sum(),
    }
    for name, truth in exact.items():
        estimate = (p * getattr(kl, name)(logprobs[None], ref[None])[0]).sum()
        found = torch.autograd.grad(estimate, logits, retain_graph=True)[0]
        wanted = torch.autograd.grad(truth, logits, retain_graph=True)[0]
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
