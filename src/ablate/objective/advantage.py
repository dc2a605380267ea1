"""Factor `advantage`: credit per rollout from the rewards of its prompt's group.

Legend: B sequences, P prompts. Every public function is one mechanism:

    f(rewards, prompts, included, *, <keywords of the level>) -> advantages [B], dtype of rewards

    rewards   [B], entries that are not included may be NaN
    prompts   [B] prompt ids; groups are formed by id, in any order and of any size
    included  [B] False for a rollout that failed for infrastructure reasons: advantage 0, out of mean, std
    and n

For all of them: a reward that is not finite is left out too; a group whose rewards differ by at most 1e-5
gets exactly 0, and so does a group of one (which has nothing to be compared with).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ablate.objective.bounds import Count
from ablate.objective.tensors import Groups, group_statistics

_EPS = 1e-6


def grpo(rewards: Float[Tensor, " B"], prompts: Int[Tensor, " B"], included: Bool[Tensor, " B"]) -> Float[Tensor, " B"]:
    """(R - mean) / (std + 1e-6), std with n - 1: all prompts get credit of one size. arXiv:2402.03300."""
    centred, groups, _ = _centred(rewards, prompts, included)
    squares = torch.zeros_like(groups.mean).index_add(0, groups.row, centred * centred)
    std = (squares / (groups.size - 1).clamp(min=1)).sqrt()
    return (centred / (std[groups.row] + _EPS)).to(rewards.dtype)


def grpo_no_std(
    rewards: Float[Tensor, " B"], prompts: Int[Tensor, " B"], included: Bool[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """R - mean: no boost of prompts that are nearly solved or nearly hopeless. Dr.GRPO, arXiv:2503.20783."""
    return _centred(rewards, prompts, included)[0].to(rewards.dtype)


def rloo(rewards: Float[Tensor, " B"], prompts: Int[Tensor, " B"], included: Bool[Tensor, " B"]) -> Float[Tensor, " B"]:
    """n / (n - 1) * (R - mean), which is R minus the mean of the OTHERS: unbiased. arXiv:2402.14740.

    With groups of one size it is `grpo_no_std` times a constant.
    """
    centred, groups, _ = _centred(rewards, prompts, included)
    factor = groups.size / (groups.size - 1).clamp(min=1)
    return (centred * factor[groups.row]).to(rewards.dtype)


def rloo_n(
    rewards: Float[Tensor, " B"],
    prompts: Int[Tensor, " B"],
    included: Bool[Tensor, " B"],
    *,
    min_group_size: Count,
) -> Float[Tensor, " B"]:
    """As `rloo`, but groups of fewer than `min_group_size` included rollouts get 0: too noisy a baseline."""
    _, groups, _ = _centred(rewards, prompts, included)
    enough = (groups.size >= min_group_size)[groups.row]
    credit = rloo(rewards, prompts, included)
    return torch.where(enough, credit, torch.zeros_like(credit))


def maxrl(
    rewards: Float[Tensor, " B"], prompts: Int[Tensor, " B"], included: Bool[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """(R - mean) / (mean + 1e-6): weighs a prompt by the inverse of its success rate. arXiv:2602.02710.

    Raises:
        ValueError: an included reward is negative (the mean would change sign and size at will).
    """
    centred, groups, usable = _centred(rewards, prompts, included)
    if bool((usable & (rewards < 0)).any()):
        raise ValueError("advantage maxrl needs rewards >= 0; shift them or use grpo, grpo_no_std or rloo")
    return (centred / (groups.mean[groups.row] + _EPS)).to(rewards.dtype)


def _centred(
    rewards: Float[Tensor, " B"], prompts: Int[Tensor, " B"], included: Bool[Tensor, " B"]
) -> tuple[Float[Tensor, " B"], Groups, Bool[Tensor, " B"]]:
    """R - mean in float64, exactly 0 for excluded rows and groups without spread; and who was usable."""
    usable = included & rewards.isfinite()
    groups = group_statistics(rewards, prompts, usable)
    informative = usable & (groups.spread > 0)[groups.row]
    difference = rewards.double() - groups.mean[groups.row]
    return torch.where(informative, difference, torch.zeros_like(difference)), groups, usable
