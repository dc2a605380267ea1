"""The policy as the trainer sees it: token log-probabilities and entropies of responses, never [B,T,V] logits.

Axes: B sequences, R distinct sequences (rows), S padded sequence length, T response positions, N = R*T, H hidden size,
V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

_CHUNK_TOKENS = 256
_CHUNK_LOGITS = 1 << 22
"""A head chunk holds at least `_CHUNK_TOKENS` tokens and about this many logits: 16 MiB of fp32."""


class HasTokens(Protocol):
    """What `collate` reads of a rollout."""

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def response_ids(self) -> tuple[int, ...]: ...


class Inputs(NamedTuple):
    """Right-padded token ids, where each response token is predicted, and which sequence lies in which row.

    Equal sequences share a row: samples of one prompt often agree, more so as the policy learns, and a row costs the
    same however many sequences read it.

    Example: prompt (4, 5, 13) and response (5, 4, 1), drawn twice, of width 4 give input_ids [[4, 5, 13, 5, 4]] (the
    last response token is never an input), gather_index [[2, 3, 4, 0]], targets [[5, 4, 1, 0]] and row [0, 0]; the
    last position is padding to be masked.
    """

    input_ids: Int[Tensor, "R S"]
    gather_index: Int[Tensor, "R T"]
    targets: Int[Tensor, "R T"]
    row: Int[Tensor, " B"]

    def to(self, device: torch.device) -> Inputs:
        """The same batch on `device`."""
        return Inputs(*(tensor.to(device, non_blocking=True) for tensor in self))


def collate(rollouts: Sequence[HasTokens], pad_id: int, width: int) -> Inputs:
    """Lay rollouts out as rows, responses in `width` positions.

    No rollouts give one sequence of padding, so that a rank without work still takes part in every collective forward;
    its weights must be 0.

    Raises:
        ValueError: a response longer than `width`, or an empty prompt.
    """
    pairs = [(r.prompt_ids, r.response_ids) for r in rollouts] or [((pad_id,), ())]
    unique = {pair: row for row, pair in enumerate(dict.fromkeys(pairs))}
    if any(not prompt or len(response) > width for prompt, response in unique):
        lengths = [(len(prompt), len(response)) for prompt, response in unique]
        raise ValueError(f"a prompt needs a token and a response may have {width}, got (prompt, response) {lengths}")
    inputs = [(prompt + response)[: max(len(prompt), len(prompt) + len(response) - 1)] for prompt, response in unique]
    input_ids = np.full((len(unique), max(map(len, inputs))), pad_id, dtype=np.int64)
    gather_index = np.zeros((len(unique), width), dtype=np.int64)
    targets = np.full((len(unique), width), pad_id, dtype=np.int64)
    for row, (prompt, response) in enumerate(unique):
        input_ids[row, : len(inputs[row])] = inputs[row]
        gather_index[row, : len(response)] = np.arange(len(prompt) - 1, len(prompt) - 1 + len(response))
        targets[row, : len(response)] = response
    rows = np.array([unique[pair] for pair in pairs], dtype=np.int64)
    return Inputs(*map(torch.from_numpy, (input_ids, gather_index, targets, rows)))


class Policy(nn.Module):
    """A causal language model that scores given responses.

    `lm` keeps its Hugging Face parameter names. `vocab_size` counts the tokenizer's tokens; rows of the head past it
    are padding and have probability 0 here as in the sampler.
    """

    def __init__(self, lm: PreTrainedModel, vocab_size: int) -> None:
        super().__init__()
        if getattr(lm.lm_head, "bias", None) is not None:
            raise ValueError(f"{type(lm).__name__} has a bias in its head, which the chunked head does not apply")
        if not 0 < vocab_size <= lm.config.vocab_size:
            raise ValueError(f"the tokenizer has {vocab_size} tokens, the model {lm.config.vocab_size} rows")
        self.lm = lm
        lm.lm_head = LogProbHead(lm.lm_head.weight, vocab_size)

    def forward(
        self,
        input_ids: Int[Tensor, "R S"],
        gather_index: Int[Tensor, "R T"],
        targets: Int[Tensor, "R T"],
        row: Int[Tensor, " B"],
        temperature: float,
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Log-probability of each target and entropy of its distribution at `temperature`, fp32; 0 is scored as 1.

        Positions that a batch only pads hold finite values of no meaning: mask them.
        """
        # right-padded rows need no mask: causal attention keeps padding from every real position
        hidden = self.lm.model(input_ids=input_ids, use_cache=False).last_hidden_state
        at = hidden.gather(1, gather_index[..., None].expand(-1, -1, hidden.shape[-1]))
        logprobs, entropy = self.lm.lm_head(at.flatten(0, 1), targets.flatten(), temperature or 1.0)
        return logprobs.view(targets.shape)[row], entropy.view(targets.shape)[row]


class LogProbHead(nn.Module):
    """Head and log-softmax in token chunks, recomputed in the backward pass; shares the (possibly tied) weight."""

    def __init__(self, weight: nn.Parameter, vocab_size: int) -> None:
        super().__init__()
        self.weight = weight
        self.vocab_size = vocab_size

    def forward(
        self, hidden: Float[Tensor, "N H"], targets: Int[Tensor, " N"], temperature: float
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Log-probability of each target and entropy, fp32."""
        logprobs, entropy = _HeadLogProbs.apply(hidden, self.weight, targets, temperature, self.vocab_size)
        return logprobs, entropy


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab_size: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.vocab_size = temperature, vocab_size
        parts = [
            _score(h, weight[:vocab_size], t, temperature)
            for h, t in zip(_chunks(hidden, vocab_size), _chunks(targets, vocab_size), strict=True)
        ]
        return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        rows = weight[: ctx.vocab_size]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        pieces = [_chunks(x, ctx.vocab_size) for x in (hidden, targets, grad_logprobs, grad_entropy, grad_hidden)]
        for h, t, g, e, out in zip(*pieces, strict=True):
            grad_logits = _grad_logits(_log_softmax(h, rows, ctx.temperature), t, g, e) / ctx.temperature
            out.copy_(grad_logits.to(rows.dtype) @ rows)
            grad_weight[: ctx.vocab_size] += grad_logits.T @ h.float()
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _chunks(tensor: Tensor, vocab_size: int) -> tuple[Tensor, ...]:
    return tensor.split(max(_CHUNK_TOKENS, _CHUNK_LOGITS // vocab_size))


def _log_softmax(hidden: Tensor, rows: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax((hidden @ rows.T).float() / temperature, dim=-1)


def _score(hidden: Tensor, rows: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = _log_softmax(hidden, rows, temperature)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(dim=-1)


def _grad_logits(logprobs: Tensor, targets: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor) -> Tensor:
    """d log p_t / d z_j = [j = t] - p_j and d H / d z_j = -p_j (log p_j + H), for tempered logits z."""
    p = logprobs.exp()
    entropy = -(p * logprobs).sum(dim=-1, keepdim=True)
    grad = -p * (grad_logprobs[:, None] + grad_entropy[:, None] * (logprobs + entropy))
    return grad.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])


def load_policy(folder: Path, vocab_size: int, attention: str) -> Policy:
    """The policy saved in `folder`, weights in fp32; `attention` is a transformers attention implementation."""
    transformers_logging.disable_progress_bar()
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return Policy(lm, vocab_size)
