"""Factor `tis`: truncated importance sampling and its relatives, against the mismatch of trainer and sampler.

Legend: B sequences, T response positions. Every public function is one mechanism:

    f(tis_log_ratio, loss_mask, *, <keywords of the level>) -> weight [B, T], detached

    tis_log_ratio  old_logprobs - rollout_logprobs, trainer over sampler; rho = exp of it, exponent held in
    [-20, 20] weight         multiplies the surrogate; 0 means that the token leaves the policy term

Weights and masks touch the policy term only, never KL or entropy. Masked positions do not influence a weight
and have the neutral one themselves; a wholly masked row is kept. Thresholds are inclusive.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ablate.objective.bounds import AtLeastOne, AtMostOne, Positive
from ablate.objective.tensors import bounded_exp, only


def off(tis_log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """No correction: weight 1."""
    return torch.ones_like(tis_log_ratio)


def token(
    tis_log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"], *, cap: Positive
) -> Float[Tensor, "B T"]:
    """min(rho, cap) per token: biased, of bounded variance. fengyao.notion.site/off-policy-rl (2025)."""
    return _rho(tis_log_ratio, loss_mask).clamp(max=cap)


def sequence(
    tis_log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"], *, cap: Positive
) -> Float[Tensor, "B T"]:
    """min(product of rho, cap), one per sequence: unbiased but for the cap; varies more with the length."""
    product = bounded_exp(only(tis_log_ratio, loss_mask).detach().sum(-1, keepdim=True))
    return product.clamp(max=cap).expand_as(tis_log_ratio)


def icepop(
    tis_log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"], *, low: AtMostOne, high: AtLeastOne
) -> Float[Tensor, "B T"]:
    """rho where it lies in [low, high], else the token leaves the policy term. arXiv:2510.18855."""
    rho = _rho(tis_log_ratio, loss_mask)
    return torch.where((rho >= low) & (rho <= high), rho, torch.zeros_like(rho))


def geometric_mask(
    tis_log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"], *, low: AtMostOne, high: AtLeastOne
) -> Float[Tensor, "B T"]:
    """A sequence stays, with weight 1, iff the geometric mean of its rho is in [low, high], at any length."""
    total = only(tis_log_ratio, loss_mask).detach().sum(-1, keepdim=True)
    mean = bounded_exp(total / loss_mask.sum(-1, keepdim=True).clamp(min=1))
    return _stays((mean >= low) & (mean <= high), tis_log_ratio)


def product_mask(
    tis_log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"], *, low: AtMostOne, high: AtLeastOne
) -> Float[Tensor, "B T"]:
    """A sequence stays, with weight 1, iff the product of its rho is in [low, high]; long ones seldom do."""
    product = bounded_exp(only(tis_log_ratio, loss_mask).detach().sum(-1, keepdim=True))
    return _stays((product >= low) & (product <= high), tis_log_ratio)


def outlier_mask(
    tis_log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"], *, low: AtMostOne, high: AtLeastOne
) -> Float[Tensor, "B T"]:
    """A sequence leaves the policy term if any of its rho is outside [low, high]; others keep weight 1."""
    rho = _rho(tis_log_ratio, loss_mask)
    return _stays(((rho >= low) & (rho <= high)).all(-1, keepdim=True), tis_log_ratio)


def _rho(tis_log_ratio: Float[Tensor, "B T"], loss_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    return bounded_exp(only(tis_log_ratio, loss_mask).detach())


def _stays(kept: Bool[Tensor, "B 1"], like: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    return kept.to(like.dtype).expand_as(like)
