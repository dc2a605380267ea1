"""Can this sweep answer its question? Pure checks with an id, a severity and a remedy. Imports no torch.

Plan-time checks see the plan alone; `check_plan` runs them all. A `refuse` finding stops a plan unless
`validity.allow` names its id, and then it stays visible wherever results are shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ablate.config import Config
from ablate.plan import Plan, Run

Severity = Literal["refuse", "warn", "note"]


@dataclass(frozen=True)
class Finding:
    """What a check found. Example: Finding("single-seed", "warn", "one seed per arm: ...; add seed=0,1,2", "sweep")"""

    id: str
    severity: Severity
    message: str
    where: str
    allowed: bool = False


Pair = tuple[Run, Run]


def pairs(plan: Plan, factor: str) -> Iterator[Pair]:
    """Every pair of arms that differ in one key only, where that key is `factor` or lies inside it."""
    for key in (k for k in plan.factors if k.split(".")[0] == factor):
        alike: dict[str, list[Run]] = {}
        for run in plan.arms.values():
            alike.setdefault(repr([v for k, v in run.levels.items() if k != key]), []).append(run)
        for runs in alike.values():
            yield from itertools.combinations(runs, 2)


def _where(pair: Pair) -> str:
    return f"{pair[0].arm} vs {pair[1].arm}"


def inert_clip(plan: Plan) -> Iterator[Finding]:
    """One update per rollout step with the trainer's old log-probs: the ratio is 1 and no clip range can act."""
    for pair in pairs(plan, "clip"):
        c = pair[0].config
        if c.objective.old_logprobs != "trainer":
            continue
        updates = c.updates_per_step
        if updates == 1:
            text = (
                "one update per rollout step: ratio is 1, so all surrogates give the same gradient; set train.passes=2"
            )
            yield Finding("inert-clip", "refuse", text, _where(pair))
        else:
            text = f"clip can act in {updates - 1} of the {updates} updates of every rollout step"
            yield Finding("inert-clip", "note", text, _where(pair))


def _sampler_is_trainer(c: Config) -> bool:
    return c.rollout.backend == "native" and c.rollout.precision == c.engine.precision and c.rollout.staleness == 0


def inert_tis(plan: Plan) -> Iterator[Finding]:
    """Sampler and trainer share weights, precision and kernels, or the ratio is anchored at the sampler: rho is 1."""
    for pair in pairs(plan, "tis"):
        c = pair[0].config
        if _sampler_is_trainer(c):
            text = "the sampler has the trainer's weights and precision, so rho is 1; set rollout.precision=bf16"
            yield Finding("inert-tis", "refuse", text, _where(pair))
        elif c.objective.old_logprobs == "rollout":
            text = "old_logprobs are the sampler's, so rho is 1; set objective.old_logprobs=trainer"
            yield Finding("inert-tis", "refuse", text, _where(pair))


def inert_kl(plan: Plan) -> Iterator[Finding]:
    """KL is a factor and its coefficient is 0 everywhere."""
    kl_keys = [k for k in plan.factors if k.split(".")[0] == "kl"]
    if kl_keys and all(getattr(run.config.kl, "kl_coef", 0) == 0 for run in plan.arms.values()):
        yield Finding("inert-kl", "refuse", "kl is a factor but kl_coef is 0 in every arm; set kl.kl_coef", "sweep")


def single_seed(plan: Plan) -> Iterator[Finding]:
    """One seed per arm: no interval can be given."""
    if len(plan.seeds) == 1 and len(plan.arms) > 1:
        text = "one seed per arm: differences come without an interval; add seeds: seed=0,1,2"
        yield Finding("single-seed", "warn", text, "sweep")


def group_too_small(plan: Plan) -> Iterator[Finding]:
    """No advantage can be formed from fewer rollouts than the estimator needs."""
    for arm, run in plan.arms.items():
        need = max(2, getattr(run.config.advantage, "min_group_size", 2))
        if run.config.train.group_size < need:
            text = f"train.group_size={run.config.train.group_size} is under {need}: every advantage is 0; raise it"
            yield Finding("group-too-small", "refuse", text, arm)


def sentinel_length(plan: Plan) -> Iterator[Finding]:
    """A normaliser far beyond any response shrinks the loss instead of normalising it."""
    for arm, run in plan.arms.items():
        limit = run.config.rollout.max_response_len
        if run.config.max_response_len > 4 * limit:
            text = (
                f"objective.max_response_len={run.config.max_response_len} is over 4x the rollout limit {limit}: "
                f"a sentinel, not a length; set it to null or {limit}"
            )
            yield Finding("sentinel-length", "refuse", text, arm)


def unequal_caps(plan: Plan) -> Iterator[Finding]:
    """Arms that may be selected from different steps are not comparable."""
    seen = {(c.train.max_steps, c.export.interval, c.selection_cap) for c in (r.config for r in plan.arms.values())}
    if len(seen) > 1:
        text = "arms differ in train.max_steps, export.interval or select.cap; give all arms the same"
        yield Finding("unequal-caps", "refuse", text, "sweep")


def unscoped_objective(plan: Plan) -> Iterator[Finding]:
    """A loss scale other than 1 reproduces a faulty run; it must be wanted."""
    for arm, run in plan.arms.items():
        if run.config.objective.loss_scale != 1.0:
            text = f"objective.loss_scale={run.config.objective.loss_scale} rescales the whole loss; set it to 1"
            yield Finding("loss-scale", "refuse", text, arm)


PLAN_CHECKS: tuple[Callable[[Plan], Iterator[Finding]], ...] = (
    inert_clip, inert_tis, inert_kl, single_seed, group_too_small, sentinel_length, unequal_caps, unscoped_objective,
)  # fmt: skip


def check_plan(plan: Plan) -> list[Finding]:
    """All findings of a plan, refusals first; those that `validity.allow` names are marked as allowed."""
    allowed = set(plan.config.validity.allow)
    found = [f for check in PLAN_CHECKS for f in check(plan)]
    marked = [Finding(f.id, f.severity, f.message, f.where, f.id in allowed) for f in dict.fromkeys(found)]
    order = {"refuse": 0, "warn": 1, "note": 2}
    return sorted(marked, key=lambda f: order[f.severity])


def refusals(findings: list[Finding]) -> list[Finding]:
    """Those that stop the plan."""
    return [f for f in findings if f.severity == "refuse" and not f.allowed]
