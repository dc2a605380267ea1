"""Numbers to log, from the tensors of a whole mini-batch or rollout step gathered from all ranks.

Legend: B sequences, T response positions. Every function returns the same keys for every input, so that ranks
and arms log the same columns; what cannot be computed (an empty mask, say) is nan. Statistics are taken in
float64 over tokens of the loss mask; quantiles interpolate linearly; standard deviations are those of the
population.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ablate.objective.surrogate import Surrogate
from ablate.objective.tensors import MAX_EXPONENT, bounded_exp, group_statistics


def ratio_metrics(log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> dict[str, float]:
    """ratio/min, ratio/max, ratio/p99 of current over old policy, per token and before any clipping."""
    low, p99, high = _quantiles(bounded_exp(_pick(log_ratio, loss_mask)), 0.0, 0.99, 1.0)
    return _named({"ratio/min": low, "ratio/max": high, "ratio/p99": p99})


def clip_metrics(surrogate: Surrogate, loss_mask: Bool[Tensor, "B T"]) -> dict[str, float]:
    """Shares of loss tokens: clip/fraction_low, _high, clip/fraction (their sum) and clip/fraction_dual."""
    flags = torch.stack([surrogate.clipped_low, surrogate.clipped_high, surrogate.clipped_dual])
    low, high, dual = (flags & loss_mask).sum((1, 2)).double() / loss_mask.sum()
    return _named(
        {
            "clip/fraction_low": low,
            "clip/fraction_high": high,
            "clip/fraction": low + high,
            "clip/fraction_dual": dual,
        }
    )


def mismatch_metrics(
    old_logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    *,
    cap: float = 2.0,
) -> dict[str, float]:
    """How far trainer and sampler are apart, from rho before any cap or mask; under every level of `tis`.

    `loss_mask` is the mask BEFORE `usable_mask`: tokens without a rollout log-probability are counted in
    missing_tokens and left out of the rest. `cap` is a yardstick, the same for all arms, not the level's own
    cap. rho_mean is 1 in expectation for a sampler as recorded: rho_std / sqrt(tokens) is its standard error.
    k1 = -mean(log rho), k3 = mean(rho - 1 - log rho); ess = (sum rho)^2 / (n sum rho^2), in (0, 1].
    """
    mask = loss_mask & rollout_logprobs.isfinite()
    log_rho = _pick(old_logprobs - rollout_logprobs, mask)
    held = log_rho.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    rho = held.exp()
    median, p99, high = _quantiles(rho, 0.5, 0.99, 1.0)
    # expm1, because rho - 1 - log rho of a tiny mismatch is far below the rounding of rho
    outside = torch.stack([rho > cap, rho < 1.0 / cap]).double().mean(1)
    return _named(
        {
            "mismatch/rho_mean": rho.mean(),
            "mismatch/rho_std": _std(rho),
            "mismatch/rho_median": median,
            "mismatch/rho_p99": p99,
            "mismatch/rho_max": high,
            "mismatch/share_over_cap": outside[0],
            "mismatch/share_under_inverse_cap": outside[1],
            "mismatch/abs_log_rho_mean": log_rho.abs().mean(),
            "mismatch/k1": -log_rho.mean(),
            "mismatch/k3": (held.expm1() - held).mean(),
            "mismatch/ess": _effective_share(rho),
            "mismatch/tokens": mask.sum(),
            "mismatch/missing_tokens": (loss_mask & ~mask).sum(),
        }
    )


def tis_metrics(tis_weight: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> dict[str, float]:
    """The weights in effect, after cap and mask: tis/weight_mean, _min, _max, ess, and shares of what left.

    tis/dropped_tokens is a share of loss tokens, tis/dropped_sequences of sequences that have loss tokens.
    """
    weight = _pick(tis_weight, loss_mask)
    low, high = _range(weight)
    present = loss_mask.any(-1)
    stays = (loss_mask & (tis_weight > 0)).any(-1)
    return _named(
        {
            "tis/weight_mean": weight.mean(),
            "tis/weight_min": low,
            "tis/weight_max": high,
            "tis/ess": _effective_share(weight),
            "tis/dropped_tokens": (weight == 0).double().mean(),
            "tis/dropped_sequences": (present & ~stays).sum().double() / present.sum(),
        }
    )


def reduction_metrics(
    weights: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"],
) -> dict[str, float]:
    """The normaliser in use.

    reduction/scale is the sum of the weights: 0 means that this update trains nothing. reduction/denominator
    is loss tokens per unit of scale, what a token's loss is divided by on average: the number of tokens for
    `token_mean`, B * max_response_len for `seq_mean_token_sum_norm`, N * max_response_len for `_global`.
    reduction/num_sequences is N, the sequences with some loss token where the advantage is not 0.
    """
    credit = advantages if advantages.ndim == 2 else advantages[:, None]
    tokens, scale = loss_mask.sum(), weights.double().sum()
    return _named(
        {
            "reduction/denominator": torch.where(scale > 0, tokens / scale, torch.nan),
            "reduction/num_sequences": ((credit != 0) & loss_mask).any(-1).sum(),
            "reduction/scale": scale,
            "reduction/tokens": tokens,
            "reduction/masked_sequences": (~loss_mask.any(-1)).sum(),
        }
    )


def term_metrics(
    kl: Float[Tensor, "B T"] | None, entropy: Float[Tensor, "B T"] | None, loss_mask: Bool[Tensor, "B T"]
) -> dict[str, float]:
    """kl/mean (the level's estimator) and entropy/mean per loss token; nan where there is none."""
    nan = torch.tensor(torch.nan)
    return _named(
        {
            "kl/mean": nan if kl is None else _pick(kl, loss_mask).mean(),
            "entropy/mean": nan if entropy is None else _pick(entropy, loss_mask).mean(),
        }
    )


def reward_metrics(
    rewards: Float[Tensor, " B"], prompts: Int[Tensor, " B"], included: Bool[Tensor, " B"]
) -> dict[str, float]:
    """reward/mean, std, min, max over included rollouts, and what became of the others.

    reward/groups_effective is the share of groups whose included rewards differ (only they have an
    advantage); reward/excluded and reward/excluded_share count infrastructure failures, non-finite rewards
    among them.
    """
    usable = included & rewards.isfinite()
    values = rewards[usable].double()
    low, high = _range(values)
    excluded = (~usable).double()
    return _named(
        {
            "reward/mean": values.mean(),
            "reward/std": _std(values),
            "reward/min": low,
            "reward/max": high,
            "reward/groups_effective": (group_statistics(rewards, prompts, usable).spread > 0).double().mean(),
            "reward/excluded": excluded.sum(),
            "reward/excluded_share": excluded.mean(),
        }
    )


def advantage_metrics(advantages: Float[Tensor, " B"]) -> dict[str, float]:
    """advantage/abs_mean, min, max, and nonzero_share over all rollouts, excluded ones (0) among them."""
    values = advantages.double()
    low, high = _range(values)
    return _named(
        {
            "advantage/abs_mean": values.abs().mean(),
            "advantage/min": low,
            "advantage/max": high,
            "advantage/nonzero_share": (values != 0).double().mean(),
        }
    )


def length_metrics(lengths: Int[Tensor, " B"], truncated: Bool[Tensor, " B"]) -> dict[str, float]:
    """length/mean, std, min, max of raw responses in tokens, and the share that was cut at the limit."""
    values = lengths.double()
    low, high = _range(values)
    return _named(
        {
            "length/mean": values.mean(),
            "length/std": _std(values),
            "length/min": low,
            "length/max": high,
            "length/truncated_share": truncated.double().mean(),
        }
    )


def duplicate_metrics(prompts: Sequence[Hashable], responses: Sequence[Sequence[int]]) -> dict[str, float]:
    """rollout/duplicate_share: rollouts that repeat an earlier response to the same prompt token by token.

    Three samples of one prompt of which two are equal give 1/3.
    """
    distinct = {(prompt, tuple(response)) for prompt, response in zip(prompts, responses, strict=True)}
    return {"rollout/duplicate_share": 1.0 - len(distinct) / len(responses) if responses else float("nan")}


def _pick(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " N"]:
    return values.detach()[mask].double()


def _range(values: Float[Tensor, " N"]) -> tuple[Tensor, Tensor]:
    """Smallest and largest value; nan if there is none."""
    if len(values) == 0:
        return values.new_tensor(torch.nan), values.new_tensor(torch.nan)
    low, high = torch.aminmax(values)
    return low, high


def _quantiles(values: Float[Tensor, " N"], *shares: float) -> list[Tensor]:
    """Linearly interpolated quantiles from one sort; torch.quantile refuses more than 2^24 values."""
    if len(values) == 0:
        return [values.new_tensor(torch.nan)] * len(shares)
    ordered = values.sort().values
    found = []
    for share in shares:
        position = share * (len(values) - 1)
        below = int(position)
        exact = position == below
        found.append(ordered[below] if exact else ordered[below].lerp(ordered[below + 1], position - below))
    return found


def _std(values: Float[Tensor, " N"]) -> Tensor:
    """Standard deviation of the population; nan without a warning if there is nothing."""
    return (values - values.mean()).square().mean().sqrt()


def _effective_share(weights: Float[Tensor, " N"]) -> Tensor:
    """Effective sample size as a share of n; nan if there is nothing or only zeros."""
    return weights.sum() ** 2 / (len(weights) * (weights * weights).sum())


def _named(values: dict[str, Tensor]) -> dict[str, float]:
    """Python numbers with a single copy to the host."""
    numbers = torch.stack([v.double() for v in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))
