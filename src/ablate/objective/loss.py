"""The composition of the factors, in the one order in which they meet.

    log_ratio -> ratio -> surrogate (clip) -> x tis_weight -> + kl_coef * kl - entropy_coef * entropy
              -> x reduction weights -> sum

Legend: B sequences, T response positions.

Two calls, because weights need the whole mini-batch and per-token terms only the rows of one forward pass:

    # all sequences of the update, of all ranks
    mask = usable_mask(loss_mask, rollout_logprobs)
    weights = weigh(objective, reduction, mask, prompts, advantages, old - rollout, max_response_len)
    # some rows of it; these sum to the loss over ranks and micro-batches
    share = reduce(per_token(objective, tokens), weights.rows(mine))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ablate.objective import advantage as _advantage
from ablate.objective import kl as _kl
from ablate.objective import reduction as _reduction
from ablate.objective import surrogate as _surrogate
from ablate.objective import tis as _tis
from ablate.objective.surrogate import Surrogate
from ablate.objective.tensors import only

Reduction = Callable[..., Tensor]
"""f(loss_mask, prompts, advantages, max_response_len, micro_batches=None) -> weights [B, T] of a mini-batch.

`micro_batches` [B] says which micro-batch a row is in; `scope: micro_batch` needs it.
"""


@dataclass(frozen=True)
class Objective:
    """Bound levels: callables that already hold their keywords.

    `kl_place` says whether KL enters the loss here or the reward (`reward_penalty`), never both.
    `renormalize` lets tokens that TIS removed leave the denominators of the policy term as well.
    """

    surrogate: Callable[..., Surrogate]
    tis: Callable[..., Tensor]
    kl: Callable[..., Tensor]
    kl_coef: float
    kl_place: Literal["loss", "reward"]
    entropy_coef: float
    renormalize: bool

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_place == "loss"


@dataclass(frozen=True)
class Tokens:
    """What the loss of some rows is made of. Masked positions may hold NaN or -inf in any of them.

    `loss_mask` has been through `usable_mask`. `ref_logprobs` and `entropy` may be None where unused.
    """

    logprobs: Float[Tensor, "B T"]
    old_logprobs: Float[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    ref_logprobs: Float[Tensor, "B T"] | None = None
    entropy: Float[Tensor, "B T"] | None = None


class TokenLoss(NamedTuple):
    """Per-token terms, exactly 0 outside the loss mask. `total` = `policy` + `penalty`.

    `policy` is the surrogate times `tis_weight`, `penalty` is kl_coef * kl - entropy_coef * entropy; `kl` is
    the bare estimate, given for logging wherever there is a reference, whatever its coefficient.
    """

    policy: Float[Tensor, "B T"]
    penalty: Float[Tensor, "B T"]
    kl: Float[Tensor, "B T"]
    tis_weight: Float[Tensor, "B T"]
    surrogate: Surrogate

    @property
    def total(self) -> Float[Tensor, "B T"]:
        return self.policy + self.penalty


class Weights(NamedTuple):
    """Reduction weights of the policy term, and of KL and entropy: one tensor unless `renormalize` is set."""

    policy: Float[Tensor, "B T"]
    penalty: Float[Tensor, "B T"]

    def rows(self, index: Int[Tensor, " R"] | slice) -> Weights:
        """The weights of some rows of the mini-batch, say one micro-batch."""
        return Weights(self.policy[index], self.penalty[index])


def usable_mask(loss_mask: Bool[Tensor, "B T"], rollout_logprobs: Float[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """The loss mask without tokens whose rollout log-probability is missing (NaN or infinite).

    Applied before any denominator and under every level of `tis`, `off` included: else arms would differ in
    their tokens. The number that left is `mismatch/missing_tokens`.
    """
    return loss_mask & rollout_logprobs.isfinite()


def per_token(objective: Objective, tokens: Tokens) -> TokenLoss:
    """All terms of the loss of each token, before reduction.

    Raises:
        ValueError: KL or entropy is in the loss but the reference or the entropy is not given.
    """
    t, mask = tokens, tokens.loss_mask
    surrogate = objective.surrogate(t.logprobs, t.logprobs - t.old_logprobs, t.advantages, mask)
    tis_weight = objective.tis(t.old_logprobs - t.rollout_logprobs, mask).detach()
    policy = surrogate.loss * tis_weight
    kl = _kl_term(objective, t)
    penalty = objective.kl_coef * kl if objective.kl_in_loss else torch.zeros_like(kl)
    if objective.entropy_coef > 0:
        if t.entropy is None:
            raise ValueError(f"entropy_coef is {objective.entropy_coef} but no entropy was computed")
        penalty = penalty - objective.entropy_coef * only(t.entropy, mask)
    return TokenLoss(policy, penalty, kl, tis_weight, surrogate)


def _kl_term(objective: Objective, tokens: Tokens) -> Float[Tensor, "B T"]:
    logprobs = only(tokens.logprobs, tokens.loss_mask)
    if tokens.ref_logprobs is None:
        if objective.kl_in_loss:
            raise ValueError(f"kl_coef is {objective.kl_coef} but there are no reference log-probabilities")
        return torch.zeros_like(logprobs)
    # masked positions: d = 0 on both sides, where every estimator is 0
    value = objective.kl(logprobs, only(tokens.ref_logprobs, tokens.loss_mask))
    return value if objective.kl_in_loss else value.detach()


def weigh(
    objective: Objective,
    reduction: Reduction,
    loss_mask: Bool[Tensor, "B T"],
    prompts: Int[Tensor, " B"],
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"],
    tis_log_ratio: Float[Tensor, "B T"],
    max_response_len: int,
    micro_batches: Int[Tensor, " B"] | None = None,
) -> Weights:
    """Weights of a whole mini-batch: the sequences of all ranks, without padding rows.

    With `renormalize`, tokens that TIS removed do not count in the policy term's denominators (B, P and
    max_response_len stay); KL and entropy keep the weights of the full mask.
    """
    penalty = reduction(loss_mask, prompts, advantages, max_response_len, micro_batches)
    if not objective.renormalize:
        return Weights(penalty, penalty)
    kept = loss_mask & (objective.tis(tis_log_ratio, loss_mask) > 0)
    return Weights(reduction(kept, prompts, advantages, max_response_len, micro_batches), penalty)


def reduce(terms: TokenLoss, weights: Weights) -> Float[Tensor, ""]:
    """The loss of these rows, a plain sum: those of micro-batches and ranks add up to the whole."""
    if weights.policy is weights.penalty:
        return (terms.total * weights.policy).sum()
    return (terms.policy * weights.policy + terms.penalty * weights.penalty).sum()


def reward_penalty(
    objective: Objective,
    old_logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
) -> Float[Tensor, " B"]:
    """What `place: reward` subtracts from each reward before advantages: kl_coef * sum_t kl, detached.

    Taken between the weights that the rollout step began with and the reference. 0 for `place: loss`.
    """
    if objective.kl_place == "loss" or objective.kl_coef == 0:
        return old_logprobs.new_zeros(len(old_logprobs))
    estimate = objective.kl(only(old_logprobs, loss_mask), only(ref_logprobs, loss_mask))
    return objective.kl_coef * estimate.detach().sum(-1)


def bind_objective(
    *, clip: Mapping[str, Any], tis: Mapping[str, Any], kl: Mapping[str, Any], entropy_coef: float
) -> Objective:
    """The levels of `clip`, `tis` and `kl`, as read from their files, as callables.

    Raises:
        ValueError: no such mechanism, wrong keywords, or a KL that can do nothing.
    """
    name, coef, place = kl["name"], kl["kl_coef"], kl["place"]
    if place not in ("loss", "reward"):
        raise ValueError(f"kl.place={place}: valid: loss, reward")
    if name == "k1" and place == "loss":
        raise ValueError("kl k1 in the loss has a gradient free of the reference; use place: reward, k2 or k3")
    if name == "none" and coef > 0:
        raise ValueError(f"kl none with kl_coef={coef} does nothing; use k2, k3, k1_in_reward or kl_coef 0")
    return Objective(
        surrogate=_bind(_surrogate, clip),
        tis=_bind(_tis, tis, "renormalize"),
        kl=_bind(_kl, kl, "kl_coef", "place"),
        kl_coef=coef,
        kl_place=place,
        entropy_coef=entropy_coef,
        renormalize=tis["renormalize"],
    )


def bind_reduction(level: Mapping[str, Any]) -> Reduction:
    """A level of `reduction`; under `scope: micro_batch` a call without `micro_batches` is an error."""
    function = _bind(_reduction, level, "scope")
    scopes = {"global": _whole, "micro_batch": _by_micro_batch}
    if level["scope"] not in scopes:
        raise ValueError(f"reduction.scope={level['scope']}: valid: {', '.join(scopes)}")
    return partial(scopes[level["scope"]], function)


def bind_advantage(level: Mapping[str, Any]) -> Callable[..., Tensor]:
    """A level of `advantage`: f(rewards, prompts, included) -> [B]."""
    return _bind(_advantage, level)


def _bind(module: ModuleType, level: Mapping[str, Any], *common: str) -> Callable[..., Any]:
    """The function that `level["name"]` names, with the level's keywords; `common` are the group's own."""
    mechanisms = {
        name: function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    if level["name"] not in mechanisms:
        raise ValueError(f"{module.__name__}: no mechanism {level['name']!r}; valid: {', '.join(mechanisms)}")
    function = mechanisms[level["name"]]
    own = {k: v for k, v in level.items() if k not in ("name", *common)}
    wanted = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if sorted(own) != sorted(wanted):
        raise ValueError(f"{level['name']}: takes the keywords {sorted(wanted)}, got {sorted(own)}")
    return partial(function, **own)


def _whole(
    function: Callable[..., Tensor],
    loss_mask: Bool[Tensor, "B T"],
    prompts: Int[Tensor, " B"],
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"],
    max_response_len: int,
    micro_batches: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T"]:
    """Denominators over the whole mini-batch, however it is split."""
    return function(loss_mask, prompts, advantages, max_response_len)


def _by_micro_batch(
    function: Callable[..., Tensor],
    loss_mask: Bool[Tensor, "B T"],
    prompts: Int[Tensor, " B"],
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"],
    max_response_len: int,
    micro_batches: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T"]:
    """Denominators within each micro-batch, then the mean over them: depends on the split, on purpose.

    Raises:
        ValueError: it was not said which micro-batch each row is in.
    """
    if micro_batches is None:
        raise ValueError("reduction.scope=micro_batch needs micro_batches, the micro-batch of each row")
    weights = torch.zeros_like(loss_mask, dtype=advantages.dtype)
    numbers = torch.unique(micro_batches)
    for number in numbers:
        rows = micro_batches == number
        weights[rows] = function(loss_mask[rows], prompts[rows], advantages[rows], max_response_len)
    return weights / max(len(numbers), 1)
