"""The whole loss against the plain-Python reference, to 1e-12: every level crosses with every other."""

from __future__ import annotations

from itertools import product

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_support import (
    Batch,
    Levels,
    as_lists,
    batch,
    bind,
    evaluate,
    level,
    level_names,
    some_levels,
    tokens_of,
)

from ablate.objective.loss import (
    Tokens,
    Weights,
    bind_reduction,
    per_token,
    reduce,
    reward_penalty,
    usable_mask,
    weigh,
)

CLIPS = level_names("clip")
GLOBAL = [n for n in level_names("reduction") if not n.endswith("micro_batch")]
LOSS_KL = ["none", "k2", "k3"]


def agree(levels: Levels, data: Batch, entropy_coef: float = 0.0) -> None:
    loss, grad, grad_entropy = evaluate(levels, data, entropy_coef)
    expected, by_logprob, by_entropy = reference.whole(levels, as_lists(data), entropy_coef)
    assert loss == pytest.approx(expected, rel=1e-12, abs=1e-12)
    for ours, theirs in ((grad, by_logprob), (grad_entropy, by_entropy)):
        torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("tis", level_names("tis"))
def test_every_crossing_agrees_with_the_reference(clip: str, tis: str) -> None:
    shift = CLIPS.index(clip) + level_names("tis").index(tis)
    for seed, reduction in enumerate(GLOBAL):
        kl = LOSS_KL[(seed + shift) % 3]  # rotates, so that every pair of levels meets
        levels = some_levels(clip=clip, tis=tis, reduction=reduction, kl=kl)
        levels["kl"]["kl_coef"] *= 300
        agree(levels, batch(seed), entropy_coef=0.05)


@pytest.mark.parametrize("tis", level_names("tis"))
@pytest.mark.parametrize("reduction", GLOBAL)
def test_renormalize_agrees_with_the_reference(tis: str, reduction: str) -> None:
    for seed in range(4):
        levels = some_levels(tis=tis, reduction=reduction, kl="k3")
        levels["tis"]["renormalize"] = True
        agree(levels, batch(seed, spread=0.2), entropy_coef=0.01)


def test_renormalize_leaves_kl_and_entropy_alone() -> None:
    levels = some_levels(tis="icepop", kl="k2")
    data = batch(3, spread=1.5)
    data["advantages"].masked_fill_(data["loss_mask"], 0.0)
    plain = evaluate(levels, data, 0.1)
    levels["tis"]["renormalize"] = True
    torch.testing.assert_close(evaluate(levels, data, 0.1)[1:], plain[1:], rtol=0, atol=0)


def test_renormalize_is_the_token_mean_of_what_stays() -> None:
    levels = some_levels(tis="icepop")
    levels["tis"]["renormalize"] = True
    mask, zeros = torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.float64)
    rho = torch.tensor([[1.0, 10.0, 2.0, 0.1]], dtype=torch.float64)
    data = {"logprobs": zeros, "old_logprobs": zeros, "rollout_logprobs": -rho.log(), "ref_logprobs": zeros}
    data |= {"entropy": zeros, "advantages": zeros + 1.0, "loss_mask": mask, "prompts": torch.tensor([0])}
    _, grad, _ = evaluate(levels, data | {"max_response_len": 4})
    torch.testing.assert_close(grad, torch.tensor([[-0.5, 0.0, -1.0, 0.0]], dtype=torch.float64))
    levels["tis"]["renormalize"] = False
    _, grad, _ = evaluate(levels, data | {"max_response_len": 4})
    torch.testing.assert_close(grad, torch.tensor([[-0.25, 0.0, -0.5, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("clip", ["sym", "dual", "none", "sapo"])
def test_reference_gradient_is_the_slope_of_its_loss(clip: str) -> None:
    """The hand-derived gradients against central differences, where the loss has such a derivative."""
    levels = some_levels(clip=clip, tis="on", kl="k3", reduction="prompt_mean")
    levels["kl"]["kl_coef"] = 0.3
    data = as_lists(batch(11))
    _, grad, _ = reference.whole(levels, data, 0.1)
    for i, t in product(range(len(grad)), range(len(grad[0]))):
        if not data["loss_mask"][i][t]:
            continue
        values = []
        for step in (1e-6, -1e-6):
            moved = [row.copy() for row in data["logprobs"]]
            moved[i][t] += step
            values.append(reference.whole(levels, data | {"logprobs": moved}, 0.1)[0])
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(grad[i][t], abs=1e-8)


@pytest.mark.parametrize("reduction", GLOBAL)
def test_all_surrogates_have_one_gradient_at_ratio_one(reduction: str) -> None:
    data = batch(5)
    data["old_logprobs"] = data["logprobs"].clone()
    data["rollout_logprobs"] = torch.where(data["loss_mask"], data["logprobs"] - 0.3, torch.nan)
    found = [evaluate(some_levels(clip=c, tis="on", reduction=reduction), data)[1] for c in CLIPS]
    assert found[0].abs().sum() > 0
    for grad in found[1:]:
        torch.testing.assert_close(grad, found[0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("garbage", [torch.nan, -torch.inf])
def test_masked_garbage_reaches_neither_value_nor_gradient(clip: str, dtype: torch.dtype, garbage: float) -> None:
    clean = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch(2).items() if k != "max_response_len"}
    dirty = dict(clean)
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy", "advantages")
    for name in names:
        clean[name] = torch.where(clean["loss_mask"], clean[name], torch.zeros((), dtype=dtype))
        dirty[name] = torch.where(clean["loss_mask"], clean[name], torch.full((), garbage, dtype=dtype))
    for number, tis in enumerate(level_names("tis")):
        levels = some_levels(clip=clip, tis=tis, kl=LOSS_KL[number % 3], reduction=GLOBAL[number % 5])
        one = evaluate(levels, clean | {"max_response_len": 9}, 0.1)
        two = evaluate(levels, dirty | {"max_response_len": 9}, 0.1)
        assert one[0] == two[0]
        torch.testing.assert_close(two[1:], one[1:], rtol=0, atol=0)
        assert not two[1][~clean["loss_mask"]].any()


@pytest.mark.parametrize("clip", CLIPS)
def test_float32_follows_float64(clip: str) -> None:
    data = batch(8)
    single = {k: v.float() if isinstance(v, torch.Tensor) and v.dtype == torch.float64 else v for k, v in data.items()}
    levels = some_levels(clip=clip, tis="on", kl="k3", reduction="sequence_mean")
    exact, found = evaluate(levels, data, 0.1), evaluate(levels, single, 0.1)
    assert found[1].dtype == torch.float32
    assert found[0] == pytest.approx(exact[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(found[1].double(), exact[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("gap", [25.0, -300.0])
@pytest.mark.parametrize("credit", [1.0, -1.0])
def test_exponents_are_held(clip: str, gap: float, credit: float) -> None:
    """Ratios and rho beyond e^20 neither overflow nor move the gradient away from the reference."""
    data = batch(4)
    mask = data["loss_mask"]
    data["old_logprobs"] = torch.where(mask, data["logprobs"] - gap, torch.nan)
    data["rollout_logprobs"] = torch.where(mask, data["old_logprobs"] - gap, torch.nan)
    data["ref_logprobs"] = torch.where(mask, data["logprobs"] + gap, torch.nan)
    data["advantages"] = torch.full_like(data["advantages"], credit)
    for tis, kl in (("on", "k2"), ("sequence", "k3"), ("off", "k3")):
        agree(some_levels(clip=clip, tis=tis, kl=kl), data)
        assert evaluate(some_levels(clip=clip, tis=tis, kl=kl), data)[1].isfinite().all()


def test_straight_through_is_plain_gspo_only_under_equal_weights() -> None:
    """Plain GSPO differentiates s through the mean: it spreads the weighted credit of a sequence evenly."""
    data = batch(6, spread=0.1)
    levels = some_levels(clip="gspo", reduction="token_mean")
    levels["clip"] |= {"clip_low": 0.9, "clip_high": 9.0}
    for tis, equal in (("off", True), ("sequence", True), ("on", False)):
        levels["tis"] = level("tis", tis)
        loss, grad, _ = evaluate(levels, data)
        mask = usable_mask(data["loss_mask"], data["rollout_logprobs"])
        length = mask.sum(-1, keepdim=True).clamp(min=1)
        plain = torch.where(mask, grad.sum(-1, keepdim=True) / length, 0.0)
        assert torch.allclose(grad, plain, rtol=1e-12, atol=1e-15) is equal
        assert loss == pytest.approx(reference.whole(levels, as_lists(data), 0.0)[0], rel=1e-12)


@pytest.mark.parametrize("tis", level_names("tis"))
@pytest.mark.parametrize("missing", [torch.nan, -torch.inf])
def test_missing_rollout_logprob_leaves_every_denominator_under_every_level(tis: str, missing: float) -> None:
    data = batch(9)
    data["rollout_logprobs"][0, 0] = missing
    data["rollout_logprobs"][3, :] = missing
    shorter = dict(data)
    shorter["loss_mask"] = data["loss_mask"].clone()
    shorter["loss_mask"][0, 0] = False
    shorter["loss_mask"][3, :] = False
    for reduction in GLOBAL:
        levels = some_levels(tis=tis, reduction=reduction, kl="k3")
        torch.testing.assert_close(evaluate(levels, data, 0.1), evaluate(levels, shorter, 0.1), rtol=0, atol=0)
        agree(levels, data, 0.1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=6, max_size=6), st.sampled_from(GLOBAL), st.integers(0, 50))
def test_gradient_does_not_depend_on_how_rows_are_split(parts: list[int], reduction: str, seed: int) -> None:
    """Any assignment of rows to micro-batches or ranks, empty and uneven ones too: shares add up."""
    data = batch(seed)
    levels = some_levels(clip="gspo", tis="on", kl="k3", reduction=reduction)
    whole, grad, _ = evaluate(levels, data, 0.1)
    objective, mask = bind(levels, 0.1), usable_mask(data["loss_mask"], data["rollout_logprobs"])
    weights = weights_of(levels, data)
    logprobs = data["logprobs"].clone().requires_grad_()
    tokens = tokens_of(data, logprobs, data["entropy"], mask)
    shares = []
    for part in range(4):
        rows = torch.tensor([i for i, p in enumerate(parts) if p == part], dtype=torch.long)
        some = Tokens(**{k: v[rows] for k, v in vars(tokens).items()})
        shares.append(reduce(per_token(objective, some), weights.rows(rows)))
    total = torch.stack(shares).sum()
    assert total.item() == pytest.approx(whole, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(torch.autograd.grad(total, logprobs)[0], grad, rtol=1e-12, atol=1e-15)


def weights_of(levels: Levels, data: Batch) -> Weights:
    mask = usable_mask(data["loss_mask"], data["rollout_logprobs"])
    rest = (data["prompts"], data["advantages"], data["old_logprobs"] - data["rollout_logprobs"])
    return weigh(bind(levels), bind_reduction(levels["reduction"]), mask, *rest, data["max_response_len"])


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm"])
def test_micro_batch_scope_is_the_mean_of_per_micro_batch_losses(name: str) -> None:
    data = batch(12)
    ids = torch.tensor([0, 0, 0, 4, 4, 9])
    levels = some_levels(clip="none", reduction=f"{name}_micro_batch")
    loss, grad, _ = evaluate(levels, data, micro_batches=ids)
    parts = []
    for number in (0, 4, 9):
        rows = ids == number
        part = {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in data.items()}
        parts.append(evaluate(some_levels(clip="none", reduction=name), part))
    assert loss == pytest.approx(sum(p[0] for p in parts) / 3, rel=1e-12)
    torch.testing.assert_close(grad, torch.cat([p[1] for p in parts]) / 3, rtol=1e-12, atol=1e-15)


def test_micro_batch_scope_of_lengths_one_and_nine() -> None:
    """The known bias: the single token of the short response gets 9 times the weight of its share."""
    mask = torch.arange(9)[None] < torch.tensor([[1], [9]])
    rest = (torch.tensor([0, 1]), torch.ones(2, dtype=torch.float64), 9)
    whole = bind_reduction(level("reduction", "token_mean"))(mask, *rest)
    split = bind_reduction(level("reduction", "token_mean_micro_batch"))(mask, *rest, torch.tensor([0, 1]))
    assert whole[0, 0].item() == pytest.approx(1 / 10)
    assert split[0, 0].item() == pytest.approx(1 / 2)
    assert split[1, 0].item() == pytest.approx(1 / 18)


def test_micro_batch_scope_without_the_split_is_an_error() -> None:
    data = batch(0)
    with pytest.raises(ValueError, match="micro_batches"):
        evaluate(some_levels(reduction="token_mean_micro_batch"), data)


def test_no_advantage_anywhere_silences_kl_and_entropy_under_global() -> None:
    data = batch(1)
    data["advantages"] = torch.zeros_like(data["advantages"])
    loss, grad, grad_entropy = evaluate(
        some_levels(kl="k2", reduction="seq_mean_token_sum_norm_global"), data, entropy_coef=0.5
    )
    assert loss == 0.0
    assert not grad.any() and not grad_entropy.any()


def test_global_strengthens_kl_by_all_over_effective_sequences() -> None:
    data = batch(7)
    kl_only = some_levels(kl="k2", clip="none")
    data["advantages"] = torch.zeros_like(data["advantages"])
    data["advantages"][0] = 1e-300  # counts as an advantage, weighs nothing
    kl_only["reduction"] = level("reduction", "seq_mean_token_sum_norm")
    base = evaluate(kl_only, data)[1]
    kl_only["reduction"] = level("reduction", "seq_mean_token_sum_norm_global")
    torch.testing.assert_close(evaluate(kl_only, data)[1], base * 6, rtol=1e-12, atol=1e-15)


def test_kl_in_the_reward_stays_out_of_the_loss() -> None:
    data = batch(10)
    objective = bind(some_levels(kl="k1_in_reward"))
    assert evaluate(some_levels(kl="k1_in_reward"), data)[0] == evaluate(some_levels(), data)[0]
    penalty = reward_penalty(objective, data["old_logprobs"], data["ref_logprobs"], data["loss_mask"])
    d = torch.where(data["loss_mask"], data["old_logprobs"] - data["ref_logprobs"], 0.0)
    torch.testing.assert_close(penalty, 0.001 * d.sum(-1))
    in_loss = bind(some_levels(kl="k3"))
    assert not reward_penalty(in_loss, data["old_logprobs"], data["ref_logprobs"], data["loss_mask"]).any()


def test_terms_that_are_asked_for_must_be_given() -> None:
    data = batch(0)
    tokens = tokens_of(data, data["logprobs"], data["entropy"], data["loss_mask"])
    bare = Tokens(**(vars(tokens) | {"ref_logprobs": None, "entropy": None}))
    per_token(bind(some_levels()), bare)
    with pytest.raises(ValueError, match="reference"):
        per_token(bind(some_levels(kl="k3")), bare)
    with pytest.raises(ValueError, match="entropy"):
        per_token(bind(some_levels(), entropy_coef=0.1), bare)


def test_nothing_is_changed_in_place() -> None:
    data = batch(13)
    before = {k: v.clone() for k, v in data.items() if isinstance(v, torch.Tensor)}
    evaluate(some_levels(clip="dual", tis="icepop", kl="k3", reduction="prompt_mean"), data, 0.1)
    for name, value in before.items():
        torch.testing.assert_close(data[name], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [0, 1])
def test_nothing_to_train_on_gives_zero_without_nan(rows: int) -> None:
    data = {k: v[:rows] if isinstance(v, torch.Tensor) else v for k, v in batch(0).items()}
    data["loss_mask"] = torch.zeros_like(data["loss_mask"])
    for number, (clip, reduction) in enumerate(product(CLIPS, GLOBAL)):
        tis = level_names("tis")[number % 7]
        loss, grad, _ = evaluate(some_levels(clip=clip, reduction=reduction, tis=tis, kl="k3"), data)
        assert loss == 0.0 and not grad.any()
