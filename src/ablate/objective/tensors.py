"""What the factors share: selecting before exponentiating, and statistics by prompt.

Legend: B sequences, T response positions, P prompts (groups) of the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MAX_EXPONENT = 20.0
"""Log-ratios are held in [-20, 20] before exp: e^20 = 4.9e8 squares without overflow in float32."""

NO_SPREAD = 1e-5
"""Rewards of a group that differ by at most this count as equal: verifier noise must not become credit."""


def only(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """`values` where the mask is set, exactly 0 elsewhere, in value and gradient.

    Selects instead of multiplying because 0 * NaN is NaN, and does so before any exp because the gradient of
    exp at an unselected infinity would be 0 * inf.
    """
    return torch.where(mask, values, torch.zeros_like(values))


def bounded_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """exp with the exponent held in [-20, 20]; the gradient beyond is 0."""
    return log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


class Groups(NamedTuple):
    """Statistics of each prompt's group over included values, and the way back to rows.

    Rows 0 and 2 of prompt 7 and row 1 of prompt 3 give `row` [1, 0, 1] and `size` [1, 2].
    """

    row: Int[Tensor, " B"]
    size: Float[Tensor, " P"]
    mean: Float[Tensor, " P"]
    spread: Float[Tensor, " P"]


def group_index(prompts: Int[Tensor, " B"]) -> tuple[Int[Tensor, " B"], int]:
    """Dense group number of each row (any order, uneven groups), and the number of groups P."""
    unique, index = torch.unique(prompts, return_inverse=True)
    return index, unique.numel()


def group_statistics(values: Float[Tensor, " B"], prompts: Int[Tensor, " B"], included: Bool[Tensor, " B"]) -> Groups:
    """Count, mean and max - min of the included values of each group, in float64; values left out may be NaN.

    An empty group has mean 0 and spread 0. A spread up to NO_SPREAD, give or take the rounding of the values
    in their own dtype, is returned as exactly 0, and so is that of a group of one.
    """
    index, groups = group_index(prompts)
    kept = torch.where(included, values, torch.zeros_like(values)).double()
    zeros = kept.new_zeros(groups)
    count = zeros.index_add(0, index, included.double())
    mean = zeros.index_add(0, index, kept) / count.clamp(min=1.0)
    low = _extreme(kept, index, included, groups, "amin")
    high = _extreme(kept, index, included, groups, "amax")
    # 1.00001 - 1 exceeds 1e-5 in binary: allow for two roundings of the larger value
    rounding = 2.0 * torch.finfo(values.dtype).eps * torch.maximum(low.abs(), high.abs())
    real = (count > 0) & (high - low > NO_SPREAD + rounding)
    return Groups(index, count, mean, torch.where(real, high - low, zeros))


def _extreme(
    values: Float[Tensor, " B"],
    index: Int[Tensor, " B"],
    included: Bool[Tensor, " B"],
    groups: int,
    which: str,
) -> Float[Tensor, " P"]:
    """Smallest ("amin") or largest ("amax") included value of each group; infinite where there is none."""
    neutral = torch.inf if which == "amin" else -torch.inf
    candidates = values.masked_fill(~included, neutral)
    return values.new_full((groups,), neutral).scatter_reduce(0, index, candidates, which)
