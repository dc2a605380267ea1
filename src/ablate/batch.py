"""Rollouts as tensors, and their split over ranks and micro-batches.

Legend: B sequences, T response positions.

Every rank holds the token ids and rewards of all B sequences (tens of megabytes at most) and trains a share of them, so
that denominators, advantages and metrics are computed from the whole, the same on every rank, whatever the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ablate.objective.loss import usable_mask
from ablate.rollout.types import Rollout


@dataclass(frozen=True)
class StepBatch:
    """All sequences of one rollout step, with what the loss needs of them.

    `drawn` is True on the tokens of each response, the end token included; `loss_mask` on those of them that carry a
    sampler's log-probability; `included` is False for rollouts that failed for infrastructure reasons.
    """

    rollouts: tuple[Rollout, ...]
    prompts: Int[Tensor, " B"]
    rewards: Float[Tensor, " B"]
    included: Bool[Tensor, " B"]
    drawn: Bool[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"]


def make_batch(rollouts: Sequence[Rollout]) -> StepBatch:
    """Tensors of one rollout step; padding is decided by lengths, never by a token id."""
    width = max(max(len(r.response_ids) for r in rollouts), 1)
    logprobs = torch.full((len(rollouts), width), torch.nan)
    drawn = torch.zeros(len(rollouts), width, dtype=torch.bool)
    for i, r in enumerate(rollouts):
        logprobs[i, : len(r.logprobs)] = torch.tensor(r.logprobs)
        drawn[i, : len(r.response_ids)] = True
    rewards = torch.tensor([torch.nan if r.reward is None else r.reward for r in rollouts])
    prompts = torch.tensor([r.prompt_id for r in rollouts])
    return StepBatch(
        tuple(rollouts), prompts, rewards, rewards.isfinite(), drawn, usable_mask(drawn, logprobs), logprobs
    )


def mini_batches(batch: StepBatch, count: int) -> list[list[int]]:
    """Rows of each mini-batch: whole prompts, as equal in number as they can be, in order of first appearance."""
    prompts = list(dict.fromkeys(batch.prompts.tolist()))
    rows: dict[int, list[int]] = {p: [] for p in prompts}
    for i, p in enumerate(batch.prompts.tolist()):
        rows[p].append(i)
    bounds = [round(len(prompts) * k / count) for k in range(count + 1)]
    return [[i for p in prompts[a:b] for i in rows[p]] for a, b in pairwise(bounds)]


def micro_batches(rows: Sequence[int], size: int | None, rank: int, world_size: int) -> list[list[int]]:
    """This rank's rows in forwards of at most `size`; every rank gets the same number of them, empty ones at the end.

    An empty one still has to be run (with weight 0): the others wait for this rank in every gather.
    """
    most = -(-len(rows) // world_size)
    step = size or max(most, 1)
    mine = list(rows[rank::world_size])
    return [mine[k : k + step] for k in range(0, most, step)]
