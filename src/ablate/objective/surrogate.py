"""Factor `clip`: the per-token surrogate loss, to be minimised.

Legend: B sequences, T response positions. Every public function is one mechanism:

    f(logprobs, log_ratio, advantages, loss_mask, *, <keywords of the level>) -> Surrogate

    logprobs    log-probability of each drawn token under the current weights, with gradient
    log_ratio   logprobs - old_logprobs; ratio = exp(log_ratio), the exponent held in [-20, 20]
    advantages  credit per token, A
    loss_mask   tokens that enter the loss; elsewhere the inputs may hold NaN or -inf and the outputs are 0

At ratio 1 all of them have the gradient -A: they differ from the second update of a rollout step on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ablate.objective.bounds import AboveOne, Fraction, NonNegative, Positive, Share
from ablate.objective.tensors import bounded_exp, only

_MAX_SEQUENCE_EXPONENT = 10.0


class Surrogate(NamedTuple):
    """Per-token loss, and which tokens a bound acted on (all False where a mechanism has no such bound)."""

    loss: Float[Tensor, "B T"]
    clipped_low: Bool[Tensor, "B T"]
    clipped_high: Bool[Tensor, "B T"]
    clipped_dual: Bool[Tensor, "B T"]


def clip(
    logprobs: Float[Tensor, "B T"],
    log_ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    *,
    clip_low: Fraction,
    clip_high: NonNegative,
) -> Surrogate:
    """PPO: -min(ratio A, clamp(ratio, 1 - clip_low, 1 + clip_high) A). arXiv:1707.06347.

    Unequal bounds are DAPO's clip-higher, arXiv:2503.14476.
    """
    ratio = bounded_exp(only(log_ratio, loss_mask))
    return _clipped(ratio, only(advantages, loss_mask), clip_low, clip_high)


def dual_clip(
    logprobs: Float[Tensor, "B T"],
    log_ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    *,
    clip_low: Fraction,
    clip_high: NonNegative,
    dual_clip: AboveOne,
) -> Surrogate:
    """As `clip`, and where A < 0 at most -A * dual_clip: no gradient beyond that ratio. arXiv:1912.09729."""
    ratio = bounded_exp(only(log_ratio, loss_mask))
    credit = only(advantages, loss_mask)
    plain = _clipped(ratio, credit, clip_low, clip_high)
    loss = torch.where(credit < 0, torch.minimum(plain.loss, -credit * dual_clip), plain.loss)
    return plain._replace(loss=loss, clipped_dual=(credit < 0) & (ratio > dual_clip))


def none(
    logprobs: Float[Tensor, "B T"],
    log_ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
) -> Surrogate:
    """-ratio A: importance-weighted policy gradient without any bound."""
    return _unclipped(-bounded_exp(only(log_ratio, loss_mask)) * only(advantages, loss_mask))


def gspo(
    logprobs: Float[Tensor, "B T"],
    log_ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    *,
    clip_low: Fraction,
    clip_high: NonNegative,
) -> Surrogate:
    """GSPO-token: `clip` on s = exp(mean log_ratio of the sequence, at most 10). arXiv:2507.18071.

    Straight-through: each token has the value s and the gradient of its own log-probability, so that
    per-token weights mean the same as under the other surrogates. With equal weights in a sequence it is
    plain GSPO.
    """
    safe = only(logprobs, loss_mask)
    length = loss_mask.sum(-1, keepdim=True).clamp(min=1)
    mean = only(log_ratio, loss_mask).sum(-1, keepdim=True).detach() / length
    ratio = (safe - safe.detach() + mean).clamp(max=_MAX_SEQUENCE_EXPONENT).exp()
    # masked positions of the row carry s too; A = 0 there takes them out of loss and flags
    return _clipped(ratio, only(advantages, loss_mask), clip_low, clip_high)


def cispo(
    logprobs: Float[Tensor, "B T"],
    log_ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    *,
    clip_low: Share,
    clip_high: NonNegative,
) -> Surrogate:
    """-A detach(clamp(ratio, 1 - clip_low, 1 + clip_high)) logprobs: all tokens count. arXiv:2506.13585.

    The flags mean: ratio outside the bound, whatever the sign of A.
    """
    ratio = bounded_exp(only(log_ratio, loss_mask)).detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -only(advantages, loss_mask) * weight * only(logprobs, loss_mask)
    low, high = ratio < 1.0 - clip_low, ratio > 1.0 + clip_high
    return Surrogate(loss, low & loss_mask, high & loss_mask, torch.zeros_like(loss_mask))


def sapo(
    logprobs: Float[Tensor, "B T"],
    log_ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    *,
    tau_pos: Positive,
    tau_neg: Positive,
) -> Surrogate:
    """-A sigmoid(tau (ratio - 1)) 4 / tau: a soft gate in place of a bound. arXiv:2511.20347.

    tau is tau_pos where A > 0 and tau_neg elsewhere; 4 / tau makes the slope at ratio 1 that of the other
    surrogates.
    """
    ratio = bounded_exp(only(log_ratio, loss_mask))
    credit = only(advantages, loss_mask)
    tau = torch.where(credit > 0, torch.full_like(credit, tau_pos), torch.full_like(credit, tau_neg))
    return _unclipped(-credit * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau)


def _clipped(ratio: Float[Tensor, "B T"], credit: Float[Tensor, "B T"], clip_low: float, clip_high: float) -> Surrogate:
    """PPO's pessimistic bound; `credit` is 0 on masked tokens, which keeps them out of the flags as well."""
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss = -torch.minimum(ratio * credit, ratio.clamp(low, high) * credit)
    clipped_low = (credit < 0) & (ratio < low)
    return Surrogate(loss, clipped_low, (credit > 0) & (ratio > high), torch.zeros_like(clipped_low))


def _unclipped(loss: Float[Tensor, "B T"]) -> Surrogate:
    nowhere = torch.zeros_like(loss, dtype=torch.bool)
    return Surrogate(loss, nowhere, nowhere, nowhere)
