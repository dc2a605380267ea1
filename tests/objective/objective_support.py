"""Inputs and level files shared by the tests of the objective."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from ablate.objective.loss import (
    Objective,
    Tokens,
    bind_objective,
    bind_reduction,
    per_token,
    reduce,
    usable_mask,
    weigh,
)

CONF = Path(__file__).parents[2] / "conf"
GROUPS = ("clip", "reduction", "tis", "advantage", "kl")

Levels = dict[str, dict[str, Any]]
Batch = dict[str, Any]


@cache
def _text(group: str, name: str) -> str:
    return (CONF / group / f"{name}.yaml").read_text(encoding="utf-8")


def level(group: str, name: str, **overrides: Any) -> dict[str, Any]:
    """A level file's content, with some keys replaced."""
    return yaml.safe_load(_text(group, name)) | overrides


def level_names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def some_levels(**names: str) -> Levels:
    chosen = {"clip": "sym", "reduction": "token_mean", "tis": "off", "kl": "none"} | names
    return {group: level(group, name) for group, name in chosen.items()}


def batch(seed: int, rows: int = 6, width: int = 7, spread: float = 0.6) -> Batch:
    """Random ragged rows of interleaved uneven groups, one wholly masked, one without advantage.

    Masked positions hold NaN or an infinity. Tensors are float64 but `loss_mask` (bool), `prompts` (int).
    """
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(rows, width, generator=g, dtype=torch.float64) * scale

    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    mask = torch.arange(width)[None] < lengths[:, None]
    mask[1, 0] = False  # a hole, as a tool's output leaves
    mask[rows - 1] = False
    logprobs = -normal(1.0).abs() - 0.05
    old = logprobs + normal(spread)
    credit = torch.randn(rows, generator=g, dtype=torch.float64)
    credit[2] = 0.0
    made: Batch = {
        "logprobs": logprobs,
        "old_logprobs": old,
        "rollout_logprobs": old + normal(spread / 2),
        "ref_logprobs": logprobs + normal(spread),
        "entropy": normal(1.0).abs(),
        "advantages": credit[:, None].expand(rows, width).clone(),
    }
    for number, name in enumerate(made):
        made[name][~mask] = (torch.nan, -torch.inf, torch.inf)[number % 3]
    prompts = torch.tensor([7, 3, 7, 3, 7, 11, 3, 11])[:rows]
    return made | {"loss_mask": mask, "prompts": prompts, "max_response_len": 9}


def as_lists(data: Batch) -> dict[str, Any]:
    return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in data.items()}


def bind(levels: Levels, entropy_coef: float = 0.0) -> Objective:
    return bind_objective(clip=levels["clip"], tis=levels["tis"], kl=levels["kl"], entropy_coef=entropy_coef)


def tokens_of(data: Batch, logprobs: Tensor, entropy: Tensor, mask: Tensor) -> Tokens:
    return Tokens(
        logprobs=logprobs,
        old_logprobs=data["old_logprobs"],
        rollout_logprobs=data["rollout_logprobs"],
        advantages=data["advantages"],
        loss_mask=mask,
        ref_logprobs=data["ref_logprobs"],
        entropy=entropy,
    )


def evaluate(
    levels: Levels, data: Batch, entropy_coef: float = 0.0, micro_batches: Tensor | None = None
) -> tuple[float, Tensor, Tensor]:
    """Loss, gradient by logprobs and gradient by entropy, as a training step computes them."""
    objective, reduction = bind(levels, entropy_coef), bind_reduction(levels["reduction"])
    mask = usable_mask(data["loss_mask"], data["rollout_logprobs"])
    weights = weigh(
        objective,
        reduction,
        mask,
        data["prompts"],
        data["advantages"],
        data["old_logprobs"] - data["rollout_logprobs"],
        data["max_response_len"],
        micro_batches,
    )
    logprobs = data["logprobs"].clone().requires_grad_()
    entropy = data["entropy"].clone().requires_grad_()
    loss = reduce(per_token(objective, tokens_of(data, logprobs, entropy, mask)), weights)
    found = torch.autograd.grad(loss, [logprobs, entropy], allow_unused=True, materialize_grads=True)
    return loss.item(), found[0], found[1]
