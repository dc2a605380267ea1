"""Factor `reduction`: one weight per token; the loss is the plain sum of weight * per-token loss.

Legend: B sequences, T response positions, P prompts. Every public function is one mechanism:

    f(loss_mask, prompts, advantages, max_response_len) -> weights [B, T], 0 outside loss_mask, dtype of
    advantages

It is called once per update on the whole mini-batch, the sequences of ALL ranks and micro-batches without
padding rows. The weights carry every denominator, so the gradient does not depend on how the batch is then
split. Wholly masked rows count in B and P; they have no token to weigh.
"""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor

from ablate.objective.tensors import group_index


def token_mean(
    loss_mask: Bool[Tensor, "B T"],
    prompts: Int[Tensor, " B"],
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"],
    max_response_len: int,
) -> Float[Tensor, "B T"]:
    """1 / tokens: every token counts the same, so long responses count more. DAPO, arXiv:2503.14476."""
    return loss_mask.to(advantages.dtype) / loss_mask.sum().clamp(min=1)


def sequence_mean(
    loss_mask: Bool[Tensor, "B T"],
    prompts: Int[Tensor, " B"],
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"],
    max_response_len: int,
) -> Float[Tensor, "B T"]:
    """1 / (B * tokens of the sequence): every response counts the same. GRPO, arXiv:2402.03300."""
    tokens = loss_mask.sum(-1, keepdim=True).clamp(min=1)
    return loss_mask.to(advantages.dtype) / (tokens * max(len(loss_mask), 1))


def seq_mean_token_sum_norm(
    loss_mask: Bool[Tensor, "B T"],
    prompts: Int[Tensor, " B"],
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"],
    max_response_len: int,
) -> Float[Tensor, "B T"]:
    """1 / (B * max_response_len): the same for every token of every update. Dr.GRPO, arXiv:2503.20783."""
    return loss_mask.to(advantages.dtype) / (max(len(loss_mask), 1) * max_response_len)


def seq_mean_token_sum_norm_global(
    loss_mask: Bool[Tensor, "B T"],
    prompts: Int[Tensor, " B"],
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"],
    max_response_len: int,
) -> Float[Tensor, "B T"]:
    """1 / (N * max_response_len), N = sequences with some loss token where A is not 0; all 0 if N is 0.

    A KL or entropy term is thereby B / N stronger than under `seq_mean_token_sum_norm`.
    """
    credit = advantages if advantages.ndim == 2 else advantages[:, None]
    sequences = ((credit != 0) & loss_mask).any(-1).sum()
    counted = (loss_mask & (sequences > 0)).to(advantages.dtype)
    return counted / (sequences.clamp(min=1) * max_response_len)


def prompt_mean(
    loss_mask: Bool[Tensor, "B T"],
    prompts: Int[Tensor, " B"],
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"],
    max_response_len: int,
) -> Float[Tensor, "B T"]:
    """1 / (P * tokens of the prompt's group): every prompt counts the same, of any group size."""
    index, groups = group_index(prompts)
    per_row = loss_mask.sum(-1)
    tokens = per_row.new_zeros(groups).index_add(0, index, per_row).clamp(min=1)
    return loss_mask.to(advantages.dtype) / (tokens[index, None] * max(groups, 1))
