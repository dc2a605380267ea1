"""Metrics against an independent recomputation with numpy, and the promise of fixed keys."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from objective_support import batch, bind, level, some_levels, tokens_of
from torch import Tensor

from ablate.objective import metrics, reduction, surrogate, tis
from ablate.objective.loss import per_token, usable_mask

MISMATCH = {
    "mismatch/rho_mean", "mismatch/rho_std", "mismatch/rho_median", "mismatch/rho_p99", "mismatch/rho_max",
    "mismatch/share_over_cap", "mismatch/share_under_inverse_cap", "mismatch/abs_log_rho_mean",
    "mismatch/k1", "mismatch/k3", "mismatch/ess", "mismatch/tokens", "mismatch/missing_tokens",
}  # fmt: skip


def picked(values: Tensor, mask: Tensor) -> np.ndarray:
    return values.numpy()[mask.numpy()].astype(np.float64)


def check(found: dict[str, float], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert isinstance(found[key], float), key
        assert found[key] == pytest.approx(float(value), rel=1e-12, abs=1e-14, nan_ok=True), key


@pytest.mark.parametrize("seed", range(5))
def test_mismatch(seed: int) -> None:
    data = batch(seed)
    data["rollout_logprobs"][0, 0] = torch.nan
    mask = data["loss_mask"]
    log_rho = picked(data["old_logprobs"] - data["rollout_logprobs"], mask & data["rollout_logprobs"].isfinite())
    rho = np.exp(log_rho)
    check(
        metrics.mismatch_metrics(data["old_logprobs"], data["rollout_logprobs"], mask),
        {
            "mismatch/rho_mean": rho.mean(),
            "mismatch/rho_std": rho.std(),
            "mismatch/rho_median": np.median(rho),
            "mismatch/rho_p99": np.quantile(rho, 0.99),
            "mismatch/rho_max": rho.max(),
            "mismatch/share_over_cap": (rho > 2.0).mean(),
            "mismatch/share_under_inverse_cap": (rho < 0.5).mean(),
            "mismatch/abs_log_rho_mean": np.abs(log_rho).mean(),
            "mismatch/k1": -log_rho.mean(),
            "mismatch/k3": (rho - 1 - log_rho).mean(),
            "mismatch/ess": rho.sum() ** 2 / (len(rho) * (rho**2).sum()),
            "mismatch/tokens": mask.sum().item() - 1,
            "mismatch/missing_tokens": 1,
        },
    )


def test_k3_of_a_tiny_mismatch_survives_float32() -> None:
    old = torch.zeros(1, 4)
    sampled = torch.tensor([[1e-4, -1e-4, 1e-4, -1e-4]])
    found = metrics.mismatch_metrics(old, sampled, torch.ones(1, 4, dtype=torch.bool))
    assert found["mismatch/k3"] == pytest.approx(5e-9, rel=1e-3)


def test_no_mismatch_is_exactly_none() -> None:
    data = batch(1)
    same = torch.where(data["loss_mask"], data["old_logprobs"], 0.0)
    found = metrics.mismatch_metrics(same, same, data["loss_mask"])
    assert [found[f"mismatch/{k}"] for k in ("rho_mean", "rho_max", "ess", "k1", "k3", "rho_std")] == [
        1,
        1,
        1,
        0,
        0,
        0,
    ]


@pytest.mark.parametrize("seed", range(3))
def test_ratio(seed: int) -> None:
    data = batch(seed)
    difference = data["logprobs"] - data["old_logprobs"]
    ratio = np.exp(picked(difference, data["loss_mask"]))
    expected = {"ratio/min": ratio.min(), "ratio/max": ratio.max(), "ratio/p99": np.quantile(ratio, 0.99)}
    check(metrics.ratio_metrics(difference, data["loss_mask"]), expected)


@pytest.mark.parametrize("seed", range(3))
def test_clip_fractions(seed: int) -> None:
    data = batch(seed, spread=1.5)
    mask, difference = data["loss_mask"], data["logprobs"] - data["old_logprobs"]
    ratio, credit = np.exp(picked(difference, mask)), picked(data["advantages"], mask)
    chosen = level("clip", "dual")
    chosen.pop("name")
    out = surrogate.dual_clip(data["logprobs"], difference, data["advantages"], mask, **chosen)
    low, high = ((credit < 0) & (ratio < 0.8)).mean(), ((credit > 0) & (ratio > 1.2)).mean()
    check(
        metrics.clip_metrics(out, mask),
        {
            "clip/fraction_low": low,
            "clip/fraction_high": high,
            "clip/fraction": low + high,
            "clip/fraction_dual": ((credit < 0) & (ratio > 3)).mean(),
        },
    )


@pytest.mark.parametrize("name", ["token", "icepop"])
def test_effective_weights(name: str) -> None:
    data = batch(2, spread=2.0)
    mask, difference = data["loss_mask"], data["old_logprobs"] - data["rollout_logprobs"]
    settings = {"cap": 1.1} if name == "token" else {"low": 0.9, "high": 1.1}
    weight = getattr(tis, name)(difference, mask, **settings)
    w = picked(weight, mask)
    gone = [not (row[m] > 0).any() for row, m in zip(weight.numpy(), mask.numpy(), strict=True) if m.any()]
    check(
        metrics.tis_metrics(weight, mask),
        {
            "tis/weight_mean": w.mean(),
            "tis/weight_min": w.min(),
            "tis/weight_max": w.max(),
            "tis/ess": w.sum() ** 2 / (len(w) * (w**2).sum()),
            "tis/dropped_tokens": (w == 0).mean(),
            "tis/dropped_sequences": np.mean(gone),
        },
    )


@pytest.mark.parametrize(
    ("name", "denominator"),
    [("token_mean", 7), ("seq_mean_token_sum_norm", 40), ("seq_mean_token_sum_norm_global", 20)],
)
def test_normaliser(name: str, denominator: float) -> None:
    mask = torch.arange(4)[None] < torch.tensor([[2], [4], [0], [1]])
    credit = torch.tensor([1.0, 0.0, 3.0, -1.0])
    weights = getattr(reduction, name)(mask, torch.tensor([5, 2, 5, 2]), credit, 10)
    found = metrics.reduction_metrics(weights, mask, credit)
    assert found["reduction/denominator"] == pytest.approx(denominator, rel=1e-6)
    assert found["reduction/scale"] == pytest.approx(7 / denominator, rel=1e-6)
    assert (found["reduction/num_sequences"], found["reduction/tokens"]) == (2, 7)
    assert found["reduction/masked_sequences"] == 1


def test_rewards() -> None:
    rewards = torch.tensor([1.0, 0.0, math.nan, 0.5, 0.5, 9.0, 0.7])
    prompts = torch.tensor([1, 2, 1, 2, 3, 3, 4])
    included = torch.tensor([True, True, True, True, True, False, True])
    kept = np.array([1.0, 0.0, 0.5, 0.5, np.float32(0.7)])
    check(
        metrics.reward_metrics(rewards, prompts, included),
        {
            "reward/mean": kept.mean(),
            "reward/std": kept.std(),
            "reward/min": 0.0,
            "reward/max": 1.0,
            "reward/groups_effective": 1 / 4,
            "reward/excluded": 2,
            "reward/excluded_share": 2 / 7,
        },
    )


def test_advantages_and_lengths() -> None:
    values = torch.tensor([0.5, -0.25, 0.0, 0.0])
    expected = {"abs_mean": 0.1875, "min": -0.25, "max": 0.5, "nonzero_share": 0.5}
    check(metrics.advantage_metrics(values), {f"advantage/{k}": v for k, v in expected.items()})
    found = metrics.length_metrics(torch.tensor([2, 9, 4]), torch.tensor([False, True, False]))
    lengths = np.array([2, 9, 4])
    expected = {"mean": 5.0, "std": lengths.std(), "min": 2, "max": 9, "truncated_share": 1 / 3}
    check(found, {f"length/{k}": v for k, v in expected.items()})


def test_duplicates_are_counted_within_a_prompt() -> None:
    share = metrics.duplicate_metrics([1, 1, 1, 2], [(4, 5), (4, 5), (4,), (4, 5)])
    assert share == {"rollout/duplicate_share": 0.25}
    assert math.isnan(metrics.duplicate_metrics([], [])["rollout/duplicate_share"])


def test_kl_and_entropy() -> None:
    data = batch(3)
    mask = data["loss_mask"]
    terms = per_token(bind(some_levels(kl="k2")), tokens_of(data, data["logprobs"], data["entropy"], mask))
    difference = picked(data["logprobs"] - data["ref_logprobs"], mask)
    expected = {"kl/mean": (difference**2 / 2).mean(), "entropy/mean": picked(data["entropy"], mask).mean()}
    check(metrics.term_metrics(terms.kl, data["entropy"], mask), expected)
    found = metrics.term_metrics(None, None, mask)
    assert found.keys() == expected.keys() and all(map(math.isnan, found.values()))


def everything(data: dict[str, Any]) -> dict[str, float]:
    """What a training step logs of one update and its rollouts."""
    mask = usable_mask(data["loss_mask"], data["rollout_logprobs"])
    terms = per_token(
        bind(some_levels(clip="dual", tis="on")), tokens_of(data, data["logprobs"], data["entropy"], mask)
    )
    rewards, kept = data["advantages"][:, 0], torch.ones(len(mask), dtype=torch.bool)
    weights = reduction.prompt_mean(mask, data["prompts"], rewards, data["max_response_len"])
    return {
        **metrics.ratio_metrics(data["logprobs"] - data["old_logprobs"], mask),
        **metrics.clip_metrics(terms.surrogate, mask),
        **metrics.mismatch_metrics(data["old_logprobs"], data["rollout_logprobs"], data["loss_mask"]),
        **metrics.tis_metrics(terms.tis_weight, mask),
        **metrics.reduction_metrics(weights, mask, rewards),
        **metrics.term_metrics(terms.kl, data["entropy"], mask),
        **metrics.reward_metrics(rewards, data["prompts"], kept),
        **metrics.advantage_metrics(rewards),
        **metrics.length_metrics(mask.sum(-1), kept),
    }


def test_keys_are_the_same_for_every_input() -> None:
    full = everything(batch(0))
    assert {k for k in full if k.startswith("mismatch/")} == MISMATCH
    masked = batch(0)
    masked["loss_mask"] = torch.zeros_like(masked["loss_mask"])
    nothing = {k: v[:0] if isinstance(v, Tensor) else v for k, v in batch(0).items()}
    missing = batch(0)
    missing["rollout_logprobs"] = torch.full_like(missing["rollout_logprobs"], torch.nan)
    for data in (masked, nothing, missing):
        assert list(everything(data)) == list(full)
    assert everything(missing)["mismatch/missing_tokens"] == missing["loss_mask"].sum()
    assert math.isnan(everything(masked)["mismatch/rho_max"])


@pytest.mark.slow
def test_a_large_mask_has_quantiles() -> None:
    """torch.quantile gives up beyond 2^24 values; ours may not."""
    values = torch.linspace(0, 1, 2**24 + 1)[None]
    found = metrics.ratio_metrics(values, torch.ones_like(values, dtype=torch.bool))
    assert found["ratio/p99"] == pytest.approx(math.exp(0.99), rel=1e-6)
