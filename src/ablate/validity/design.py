"""The design of a plan, as its checks see it: which arms form a pair, and what of a config can act at all.

Imports no torch.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from ablate.config import Config
from ablate.levels import FACTORS

HORIZON = frozenset(
    {"train.max_steps", "select.cap", "select.span", "export.interval", "eval.interval", "eval.prompts"}
)
"""Keys that say for how long and where one looks, not how an update is made: two arms that differ in one factor and in
these are still a pair (the published series stopped its arms at 17 to 90 steps)."""

SURROGATES = frozenset({"clip", "dual_clip", "none", "gspo", "cispo", "sapo"})
"""Mechanisms whose gradient at ratio 1 is -A. A level of one's own may be another: only an evaluation can tell."""

SAME_WEIGHT = frozenset({"token_mean", "seq_mean_token_sum_norm", "seq_mean_token_sum_norm_global"})
"""Reductions that give all tokens of an update one weight: they differ by a scalar."""

LENGTH_NORMS = frozenset({"seq_mean_token_sum_norm", "seq_mean_token_sum_norm_global"})
"""Reductions that divide by max_response_len."""

_NEVER_DROPS = frozenset({"off", "token", "sequence"})
_ONE_AT_RHO_ONE = frozenset({"off", "token", "sequence", "icepop", "geometric_mask", "product_mask", "outlier_mask"})
# what no update sees: resources, selection, logging, and when the policy is looked at
_NOT_TRAINED = ("seed", "output", "eval", "checkpoint", "select", "validity", "sweep", "launch", "cluster")


class Arm(Protocol):
    """A planned run or a recorded one."""

    @property
    def arm(self) -> str: ...

    @property
    def levels(self) -> dict[str, Any]: ...

    @property
    def config(self) -> Config: ...


A = TypeVar("A", bound=Arm)


class Design(Protocol[A]):
    """A plan, or anything else with arms and factors."""

    @property
    def factors(self) -> Mapping[str, Any]: ...

    @property
    def arms(self) -> dict[str, A]: ...


def pairs(plan: Design[A], factor: str) -> Iterator[tuple[A, A]]:
    """Every pair of arms that differ in one key only, where that key is `factor` or lies inside it."""
    for key in (k for k in plan.factors if k.split(".")[0] == factor):
        yield from key_pairs(plan, key)


def key_pairs(plan: Design[A], key: str) -> Iterator[tuple[A, A]]:
    """Every pair of arms that differ in `key` only, whatever their horizon."""
    alike: dict[str, list[A]] = {}
    for run in plan.arms.values():
        others = [v for k, v in run.levels.items() if k != key and k not in HORIZON]
        alike.setdefault(repr(others), []).append(run)
    for runs in alike.values():
        for a, b in itertools.combinations(runs, 2):
            if a.levels.get(key) != b.levels.get(key):
                yield a, b


def where(pair: tuple[Arm, Arm]) -> str:
    """How a finding about two arms says where."""
    return f"{pair[0].arm} vs {pair[1].arm}"


def differing(a: Arm, b: Arm) -> list[str]:
    """The design's keys in which two arms differ, their horizon left out."""
    keys = sorted(a.levels.keys() | b.levels.keys())
    return [k for k in keys if k not in HORIZON and a.levels.get(k) != b.levels.get(k)]


def differing_keys(a: Config, b: Config, without: Collection[str] = ("seed", "output", "sweep", "launch")) -> list[str]:
    """Dotted keys in which two resolved configs differ; a factor's level counts as one key."""
    found: list[str] = []
    one, two = a.tree(), b.tree()
    for name in one:
        if name in without or one[name] == two[name]:
            continue
        if not isinstance(one[name], dict) or name in FACTORS:
            found.append(name)
        else:
            keys = [k for k in one[name] if one[name][k] != two[name].get(k)]
            found += [f"{name}.{k}" for k in keys if f"{name}.{k}" not in without]
    return found


def sampler_is_trainer(c: Config) -> bool:
    """The sampler has the trainer's weights, precision and kernels."""
    return c.rollout.backend == "native" and c.rollout.precision == c.engine.precision and c.rollout.staleness == 0


def rho_is_one(c: Config) -> bool:
    """The trainer-over-sampler ratio that TIS weighs by is 1 on every token."""
    return sampler_is_trainer(c) or c.objective.old_logprobs == "rollout"


def ratio_is_one(c: Config) -> bool:
    """The ratio that the surrogates bound is 1 in every update."""
    return c.updates_per_step == 1 and (c.objective.old_logprobs == "trainer" or sampler_is_trainer(c))


def penalised(c: Config) -> bool:
    """KL or entropy is a term of the loss beside the policy term."""
    kl = c.kl.model_dump()
    return c.objective.entropy_coef > 0 or (kl["kl_coef"] > 0 and kl["place"] == "loss")


def micro_batch_sizes(c: Config) -> list[list[int]]:
    """Sequences of every forward of each mini-batch of a rollout step, over all ranks."""
    ranks = c.cluster.nodes * c.cluster.ranks_per_node
    counts = [round(c.train.prompts_per_step * k / c.train.mini_batches) for k in range(c.train.mini_batches + 1)]
    layouts: list[list[int]] = []
    for prompts in sorted({b - a for a, b in itertools.pairwise(counts)}):
        rows = prompts * c.train.group_size
        step = c.engine.micro_batch_size or max(-(-rows // ranks), 1)
        shares = [len(range(rank, rows, ranks)) for rank in range(ranks)]
        layouts.append([min(step, share - k) for share in shares for k in range(0, share, step)])
    return layouts


def reduction_in_effect(c: Config) -> dict[str, Any]:
    """The reduction as a level of global scope where this run's micro-batches make it one, else as it is."""
    level = c.reduction.model_dump()
    if level["scope"] != "micro_batch":
        return level
    layouts = micro_batch_sizes(c)
    whole = {**level, "scope": "global"}
    if all(len(sizes) == 1 for sizes in layouts):
        return whole
    if all(size == 1 for sizes in layouts for size in sizes):
        if level["name"] in ("token_mean", "prompt_mean"):
            return {**whole, "name": "sequence_mean"}
        if level["name"] == "seq_mean_token_sum_norm_global" and not penalised(c):
            return {**whole, "name": "seq_mean_token_sum_norm"}  # rows without an advantage have no loss to weigh
    equal = all(len(set(sizes)) == 1 for sizes in layouts)
    return whole if equal and level["name"] in ("sequence_mean", "seq_mean_token_sum_norm") else level


def canonical(c: Config) -> str:
    """What of a config can act on the weights, as text: configs with the same text train the same thing.

    Dropped are keys that nothing reads under the other settings and mechanisms that the design holds at their neutral
    point: `tis.renormalize` where no level drops tokens, a KL with coefficient 0, clip bounds at ratio 1.
    """
    tree = {k: v for k, v in c.tree().items() if k not in _NOT_TRAINED}
    tree |= {
        "clip": {"name": "none"} if ratio_is_one(c) and c.clip.name in SURROGATES else tree["clip"],  # type: ignore[attr-defined]
        "reduction": reduction_in_effect(c),
        "tis": _tis_in_effect(c),
        "advantage": _advantage_in_effect(tree["advantage"]),
        "kl": tree["kl"] if tree["kl"]["kl_coef"] > 0 else {"name": "none"},
        "objective": _objective_in_effect(c, tree["objective"]),
        "engine": _engine_in_effect(c, tree["engine"]),
        "model": _model_in_effect(tree["model"]),
        "rollout": _rollout_in_effect(tree["rollout"]),
        "task": _task_in_effect(tree["task"]),
    }
    return json.dumps(tree, sort_keys=True)


def _tis_in_effect(c: Config) -> dict[str, Any]:
    level = c.tis.model_dump()
    if rho_is_one(c) and level["name"] in _ONE_AT_RHO_ONE and level.get("cap", 1.0) >= 1.0:
        return {"name": "off", "renormalize": False}
    return {**level, "renormalize": False} if level["name"] in _NEVER_DROPS else level


def _advantage_in_effect(level: dict[str, Any]) -> dict[str, Any]:
    # every estimator gives a group of one 0, so a least size of 1 or 2 asks for nothing
    return {"name": "rloo"} if level["name"] == "rloo_n" and level["min_group_size"] <= 2 else level


def _objective_in_effect(c: Config, section: dict[str, Any]) -> dict[str, Any]:
    known = c.reduction.name in SAME_WEIGHT | {"sequence_mean", "prompt_mean"}  # type: ignore[attr-defined]
    reads = not known or c.reduction.name in LENGTH_NORMS  # type: ignore[attr-defined]
    anchor = "trainer" if sampler_is_trainer(c) else section["old_logprobs"]
    return {**section, "max_response_len": c.max_response_len if reads else None, "old_logprobs": anchor}


def _engine_in_effect(c: Config, section: dict[str, Any]) -> dict[str, Any]:
    # gradients do not depend on the split unless a reduction is told to
    split = section["micro_batch_size"] if reduction_in_effect(c)["scope"] == "micro_batch" else None
    return {**section, "micro_batch_size": split, "persistence_threshold": 0}


def _rollout_in_effect(section: dict[str, Any]) -> dict[str, Any]:
    # limits of contexts and turns: the native sampler has one turn, whose length max_response_len says
    return section if section["backend"] != "native" else {**section, "max_turn_len": None, "max_context_len": None}


def _model_in_effect(section: dict[str, Any]) -> dict[str, Any]:
    if section["kind"] == "pretrained":
        return {"kind": "pretrained", "path": section["path"]}
    return {k: v for k, v in section.items() if k not in ("path", "parameters")}


def _task_in_effect(section: dict[str, Any]) -> dict[str, Any]:
    if section["name"] != "reverse":
        return section
    return {**section, "min_digits": section["min_digits"] or 2, "max_digits": section["max_digits"] or 5}
