"""Ragged sequences, a loss over them, and the same training loop in plain torch. Also run in processes of two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from ablate.engine.deepspeed import Engine, StepResult
from ablate.engine.model import Policy, collate

VOCABULARY, WIDTH, TEMPERATURE = 14, 5, 0.8


@dataclass(frozen=True)
class Sequences:
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


def random_base(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = {
        "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 1,
        "pad_token_id": 0,
    }  # fmt: skip
    Qwen3ForCausalLM(Qwen3Config(**{**config, **changes})).save_pretrained(folder)
    return folder


def sequences(count: int = 8) -> list[Sequences]:
    """Prompts of 1 to 4 and responses of 1 to 5 tokens; the last two are equal."""
    draw = torch.Generator().manual_seed(1)

    def ids(most: int) -> tuple[int, ...]:
        length = int(torch.randint(1, most + 1, (), generator=draw))
        return tuple(torch.randint(2, VOCABULARY, (length,), generator=draw).tolist())

    drawn = [Sequences(ids(4), ids(WIDTH)) for _ in range(count - 1)]
    return [*drawn, drawn[-1]]


def loss_weights(rows: Sequence[Sequences], seed: int) -> Tensor:
    """Signed weights [B,T] that sum over the whole batch to a plain total; 0 off the responses."""
    weights = torch.randn(len(rows), WIDTH, generator=torch.Generator().manual_seed(seed)) / len(rows)
    lengths = torch.tensor([len(row.response_ids) for row in rows])
    return torch.where(torch.arange(WIDTH) < lengths[:, None], weights, 0.0)


def loss_of(logprobs: Tensor, entropy: Tensor, weights: Tensor) -> Tensor:
    return (weights * (logprobs.exp() + logprobs) - 0.1 * weights.abs() * entropy).sum()


def engine_update(
    engine: Engine, rows: Sequence[Sequences], weights: Tensor, splits: Sequence[Sequence[int]]
) -> tuple[float, StepResult]:
    """One update by micro-batches `splits` of row numbers, empty ones allowed; the loss is this rank's share."""
    total = 0.0
    for k, split in enumerate(splits):
        batch = collate([rows[i] for i in split], 0, WIDTH)
        logprobs, entropy = engine.forward(batch, TEMPERATURE)
        loss = loss_of(logprobs, entropy, weights[list(split)] if split else torch.zeros_like(logprobs))
        engine.backward(loss, last=k == len(splits) - 1)
        total += loss.item()
    return total, engine.step()


def plain_update(
    policy: Policy, optimizer: torch.optim.Optimizer, rows: Sequence[Sequences], weights: Tensor, grad_clip: float
) -> tuple[float, float]:
    """The same update in plain torch: loss and unclipped gradient norm."""
    loss = loss_of(*policy(*collate(rows, 0, WIDTH), TEMPERATURE), weights)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), float(norm)
