"""What another level would have done to the same tokens: coefficients of the loss and their differences.

Legend: M sequences of one update (a mini-batch, whole groups, all ranks), T response positions.

The gradient of the loss is sum over tokens of c * grad logprob with c = d loss / d logprob. Two arms with the same c on
the same tokens train the same thing, whatever their losses are called. c needs no model: autograd on detached
log-probabilities, elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ablate.objective.loss import (
    Objective,
    Reduction,
    Tokens,
    bind_advantage,
    bind_objective,
    bind_reduction,
    per_token,
    reduce,
    reward_penalty,
    weigh,
)


@dataclass(frozen=True)
class Arm:
    """The whole objective of an arm: bound levels and what the levels leave open."""

    objective: Objective
    reduction: Reduction
    advantage: Callable[..., Tensor]
    max_response_len: int
    loss_scale: float
    anchored_at_sampler: bool

    @property
    def needs_reference(self) -> bool:
        return self.objective.kl_coef > 0


@dataclass(frozen=True)
class Update:
    """The tokens of one update, from all ranks. Masked positions may hold NaN.

    `start_logprobs` are the trainer's at the beginning of the rollout step; `loss_mask` has been through `usable_mask`;
    `rewards` of rollouts that are not `included` may be NaN; `micro_batches` says which forward a row is in.
    """

    logprobs: Float[Tensor, "M T"]
    start_logprobs: Float[Tensor, "M T"]
    rollout_logprobs: Float[Tensor, "M T"]
    loss_mask: Bool[Tensor, "M T"]
    rewards: Float[Tensor, " M"]
    prompts: Int[Tensor, " M"]
    included: Bool[Tensor, " M"]
    ref_logprobs: Float[Tensor, "M T"] | None = None
    micro_batches: Int[Tensor, " M"] | None = None


def bind_arm(sections: Mapping[str, Any]) -> Arm:
    """An arm from its sections `clip`, `reduction`, `tis`, `advantage`, `kl` and `objective` as plain data.

    `objective.max_response_len` must be resolved: a number, not null.
    """
    rest = sections["objective"]
    bound = bind_objective(
        clip=sections["clip"], tis=sections["tis"], kl=sections["kl"], entropy_coef=rest["entropy_coef"]
    )
    return Arm(
        bound,
        bind_reduction(sections["reduction"]),
        bind_advantage(sections["advantage"]),
        rest["max_response_len"],
        rest["loss_scale"],
        rest["old_logprobs"] == "rollout",
    )


def bind_alternatives(levels: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Arm | None]:
    """Each of `validity.alternatives` bound; a combination that cannot be (kl none with a weight) is left out."""
    found: dict[str, Arm | None] = {}
    for name, sections in levels.items():
        try:
            found[name] = None if sections is None else bind_arm(sections)
        except ValueError:
            continue
    return found


def coefficients(arm: Arm, update: Update) -> Float[Tensor, "two M T"]:
    """d loss / d logprob and d loss / d entropy of every token, under the levels of `arm`; 0 outside the mask.

    Raises:
        ValueError: the arm has a KL term and the update no reference log-probabilities.
    """
    u = update
    if arm.needs_reference and u.ref_logprobs is None:
        raise ValueError("the arm has a KL term but there are no reference log-probabilities")
    old = u.rollout_logprobs if arm.anchored_at_sampler else u.start_logprobs
    penalty = torch.zeros_like(u.rewards)
    if arm.needs_reference and u.ref_logprobs is not None:
        penalty = reward_penalty(arm.objective, u.start_logprobs, u.ref_logprobs, u.loss_mask)
    credit = arm.advantage(u.rewards - penalty, u.prompts, u.included)
    logprobs = u.logprobs.detach().clone().requires_grad_(True)
    entropy = torch.zeros_like(logprobs, requires_grad=True)
    tokens = Tokens(
        logprobs, old, u.rollout_logprobs, credit[:, None].expand_as(u.loss_mask), u.loss_mask, u.ref_logprobs, entropy
    )
    weights = weigh(
        arm.objective, arm.reduction, u.loss_mask, u.prompts, credit, old - u.rollout_logprobs,
        arm.max_response_len, u.micro_batches,
    )  # fmt: skip
    with torch.enable_grad():
        loss = reduce(per_token(arm.objective, tokens), weights) * arm.loss_scale
        found = torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True, materialize_grads=True)
    return torch.stack(found)


def dose(own: Float[Tensor, "two M T"], other: Float[Tensor, "two M T"]) -> float:
    """sum |c_own - c_other| / sum |c_own|: the share of the update that the other level would have changed.

    0 means that the level did nothing here; nan if the update had no gradient.
    """
    size = own.abs().sum()
    return float((own - other).abs().sum() / size) if size > 0 else float("nan")


def doses(own: Arm, others: Mapping[str, Arm | None], update: Update) -> dict[str, float]:
    """`dose/<name>` for each of `others`, evaluated on the tokens of an update of `own`.

    None stands for the run's own level, whose dose is 0, so that all arms of a sweep log the same keys. nan where a
    level needs a reference model that this run has not.
    """
    mine = coefficients(own, update) if others else None
    found: dict[str, float] = {}
    for name, arm in others.items():
        if arm is None or mine is None:
            found[f"dose/{name}"] = 0.0
        elif arm.needs_reference and update.ref_logprobs is None:
            found[f"dose/{name}"] = float("nan")
        else:
            found[f"dose/{name}"] = dose(mine, coefficients(arm, update))
    return found
