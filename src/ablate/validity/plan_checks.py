"""Checks of a plan: can this sweep answer its question? Each is a small pure function. Imports no torch.

`check_plan` runs them all. A `refuse` finding stops a plan unless `validity.allow` names its id, and then it stays
visible wherever results are shown. A message ends with its remedy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ablate.config import Config
from ablate.errors import UsageError
from ablate.plan import Plan, Run
from ablate.task.base import make_task
from ablate.validity import scale
from ablate.validity.design import (
    HORIZON,
    LENGTH_NORMS,
    SAME_WEIGHT,
    SURROGATES,
    canonical,
    differing,
    pairs,
    penalised,
    ratio_is_one,
    reduction_in_effect,
    rho_is_one,
    sampler_is_trainer,
    where,
)
from ablate.validity.finding import Finding, marked

Pair = tuple[Run, Run]


@dataclass(frozen=True)
class Pilot:
    """What earlier records say about a plan. Each may be unknown.

    `sd` is the spread over seeds of a paired effect on the primary outcome, at its upper 80% limit (see
    `ablate.stats.power`).
    """

    length_mean: float | None = None
    length_cv: float | None = None
    sd: float | None = None


def inert_clip(plan: Plan) -> Iterator[Finding]:
    """One update per rollout step with the trainer's old log-probs: the ratio is 1 and no clip range can act."""
    for pair in pairs(plan, "clip"):
        c = pair[0].config
        updates = c.updates_per_step
        acts = f"clip can act in {updates - 1} of the {updates} updates of every rollout step"
        if _inert_clip(pair):
            text = (
                "one update per rollout step: ratio is 1, so all surrogates give the same gradient; set train.passes=2"
            )
            yield Finding("inert-clip", "refuse", text, where(pair))
        elif c.engine.precision == "bf16" and any(_narrow(r.config) for r in pair):
            text = (
                f"{acts}, but gspo's range is as narrow as the noise of bf16 log-probs, which clips by itself; set "
                f"engine.precision=fp32 or widen clip.clip_low and clip.clip_high"
            )
            yield Finding("inert-clip", "warn", text, where(pair))
        elif updates > 1 and c.objective.old_logprobs == "trainer":
            yield Finding("inert-clip", "note", acts, where(pair))


def _inert_clip(pair: Pair) -> bool:
    names = {r.config.clip.name for r in pair}  # type: ignore[attr-defined]
    return all(ratio_is_one(r.config) for r in pair) and names <= SURROGATES


def _narrow(c: Config) -> bool:
    level = c.clip.model_dump()
    return level["name"] == "gspo" and min(level["clip_low"], level["clip_high"]) < 1e-3


def inert_tis(plan: Plan) -> Iterator[Finding]:
    """Sampler and trainer share weights, precision and kernels, or the ratio is anchored at the sampler: rho is 1."""
    for pair in pairs(plan, "tis"):
        c = pair[0].config
        if sampler_is_trainer(c):
            text = "the sampler has the trainer's weights and precision, so rho is 1; set rollout.precision=bf16"
            yield Finding("inert-tis", "refuse", text, where(pair))
        elif rho_is_one(c):
            text = "old_logprobs are the sampler's, so rho is 1; set objective.old_logprobs=trainer"
            yield Finding("inert-tis", "refuse", text, where(pair))


def inert_kl(plan: Plan) -> Iterator[Finding]:
    """KL is a factor and its coefficient is 0 everywhere."""
    keys = [k for k in plan.factors if k.split(".")[0] == "kl"]
    if keys and all(getattr(run.config.kl, "kl_coef", 0) == 0 for run in plan.arms.values()):
        yield Finding("inert-kl", "refuse", "kl is a factor but kl_coef is 0 in every arm; set kl.kl_coef", "sweep")


def inert_reduction(plan: Plan, pilot: Pilot) -> Iterator[Finding]:
    """Responses of one length leave nothing for a reduction to weigh."""
    for pair in pairs(plan, "reduction"):
        cv = _length_cv(pair[0].config, pilot)
        if cv is not None and cv < 0.05:
            text = (
                f"responses have one length (coefficient of variation {cv:.2f}), so reductions differ by a constant "
                f"at most; take a task of ragged lengths (task.max_digits over task.min_digits)"
            )
            yield Finding("inert-reduction", "refuse", text, where(pair))


def _length_cv(c: Config, pilot: Pilot) -> float | None:
    """The task's own declaration, else what a pilot saw."""
    declared = make_task(c.task).length_cv
    return declared if declared is not None else pilot.length_cv


def kl_k1_loss(plan: Plan) -> Iterator[Finding]:
    """k1 as a loss: its gradient is free of the reference and zero in expectation. Also refused by the schema."""
    for arm, run in plan.arms.items():
        level = run.config.kl.model_dump()
        if level["name"] == "k1" and level["place"] == "loss":
            text = "k1 in the loss has a gradient free of the reference; use kl=k1_in_reward, k2 or k3"
            yield Finding("kl-k1-loss", "refuse", text, arm)


def aliased_reductions(plan: Plan) -> Iterator[Finding]:
    """Reductions of scope micro_batch that this run's micro-batches turn into one another."""
    pairs_found = _aliased_reductions(plan)
    for pair in pairs_found:
        names = " and ".join(_reduction_name(r) for r in pair)
        effect = reduction_in_effect(pair[0].config)["name"]
        text = (
            f"{names} are both {effect} with these micro-batches (engine.micro_batch_size="
            f"{pair[0].config.engine.micro_batch_size}); set another size, or scope global"
        )
        yield Finding("aliased-reductions", "refuse", text, where(pair))
    for arm, run in () if pairs_found else plan.arms.items():
        effect = reduction_in_effect(run.config)["name"]
        if effect != run.config.reduction.name:  # type: ignore[attr-defined]
            text = (
                f"{_reduction_name(run)} is {effect} with one sequence per micro-batch; call it so, or set "
                f"engine.micro_batch_size"
            )
            yield Finding("aliased-reductions", "warn", text, arm)


def _aliased_reductions(plan: Plan) -> list[Pair]:
    """One pair of arms for every two levels of the reduction that are the same one in effect."""
    if not any(k.split(".")[0] == "reduction" for k in plan.factors):
        return []
    found: dict[tuple[str, str], Pair] = {}
    runs = sorted(plan.arms.values(), key=_reduction_name)
    for _, same in itertools.groupby(sorted(runs, key=_effect), key=_effect):
        levels = {_reduction_name(r): r for r in reversed(list(same))}
        for a, b in itertools.combinations(levels.values(), 2):
            if "micro_batch" in (a.config.reduction.scope, b.config.reduction.scope):  # type: ignore[attr-defined]
                found[_reduction_name(a), _reduction_name(b)] = (a, b)
    return list(found.values())


def _effect(run: Run) -> str:
    return repr(sorted(reduction_in_effect(run.config).items()))


def _reduction_name(run: Run) -> str:
    level = run.config.reduction.model_dump()
    return str(level["name"]) + (" per micro-batch" if level["scope"] == "micro_batch" else "")


def aliased_arms(plan: Plan) -> Iterator[Finding]:
    """Arms that train the same thing once keys that nothing reads are dropped, by no fault that has its own name."""
    component = joined(plan, inert_pairs(plan))
    for same in _classes(plan).values():
        first, *others = {component[r.arm]: r for r in reversed(same)}.values()
        for other in others:
            keys = ", ".join(k for k in first.levels if first.levels[k] != other.levels[k])
            text = f"the arms differ in {keys}, which changes no update under their other settings; drop one"
            yield Finding("aliased-arms", "refuse", text, where((first, other)))


def _classes(plan: Plan) -> dict[str, list[Run]]:
    """Arms by what of their config can act."""
    found: dict[str, list[Run]] = {}
    for run in plan.arms.values():
        found.setdefault(canonical(run.config), []).append(run)
    return found


def inert_pairs(plan: Plan) -> Iterator[Pair]:
    """Pairs that a check with a name of its own refuses as inert."""
    yield from (pair for pair in pairs(plan, "clip") if _inert_clip(pair))
    yield from (pair for pair in pairs(plan, "tis") if rho_is_one(pair[0].config))
    yield from pairs(plan, "kl") if [*inert_kl(plan)] else ()
    yield from _aliased_reductions(plan)
    for pair in pairs(plan, "reduction"):
        cv = _length_cv(pair[0].config, Pilot())
        if cv is not None and cv < 0.05:
            yield pair


def aliased_pairs(plan: Plan) -> Iterator[Pair]:
    """Pairs that `aliased_arms` sees, whether or not another check has named them."""
    for first, *others in _classes(plan).values():
        yield from ((first, other) for other in others)


def joined(plan: Plan, links: Iterable[Pair]) -> dict[str, str]:
    """For each arm a representative of those it is linked to, over any number of links."""
    parent = {arm: arm for arm in plan.arms}

    def root(arm: str) -> str:
        while parent[arm] != arm:
            parent[arm] = arm = parent[parent[arm]]
        return arm

    for a, b in links:
        parent[root(b.arm)] = root(a.arm)
    return {arm: root(arm) for arm in plan.arms}


def scalar_only_contrast(plan: Plan) -> Iterator[Finding]:
    """Levels that differ by one factor per update: an optimizer that ignores the loss scale hardly sees them."""
    for pair in (*pairs(plan, "reduction"), *pairs(plan, "advantage"), *pairs(plan, "objective")):
        what = _scalar(pair)
        if what and canonical(pair[0].config) != canonical(pair[1].config):
            text = (
                f"{what} differ by one scalar per update, which Adam cancels while eps and clipping are idle: the arms "
                f"only reweight steps; to turn the gradient compare with sequence_mean, prompt_mean or grpo"
            )
            yield Finding("scalar-only-contrast", "warn", text, where(pair))


def _scalar(pair: Pair) -> str | None:
    """The two levels that differ by a scalar only, in words; None if they differ in more."""
    a, b = (r.config for r in pair)
    reductions = [reduction_in_effect(c) for c in (a, b)]
    split_weights = a.tis.renormalize and penalised(a)  # type: ignore[attr-defined]
    if a.reduction != b.reduction:
        same = all(r["name"] in SAME_WEIGHT and r["scope"] == "global" for r in reductions)
        return " and ".join(r["name"] for r in reductions) if same and not split_weights else None
    if a.advantage != b.advantage:
        # a penalty beside the policy term keeps its own size
        names = [c.advantage.name for c in (a, b)]  # type: ignore[attr-defined]
        same = {"grpo_no_std"} < {*names} <= {"grpo_no_std", "rloo", "rloo_n"} and not penalised(a)
        return " and ".join(names) + " at one group size" if same else None
    if a.objective.old_logprobs != b.objective.old_logprobs or a.objective.entropy_coef != b.objective.entropy_coef:
        return None
    return "lengths in the normaliser" if reductions[0]["name"] in LENGTH_NORMS and not split_weights else None


def scale_confound(plan: Plan, pilot: Pilot) -> Iterator[Finding]:
    """The gradient's size differs between levels, and clipping or Adam's eps lets it show."""
    for pair in (*pairs(plan, "reduction"), *pairs(plan, "advantage"), *pairs(plan, "objective")):
        norms = [scale.coefficient_norm(r.config, pilot.length_mean or scale.mean_length(r.config)) for r in pair]
        low, high = (min(norms), max(norms)) if None not in norms else (None, None)  # type: ignore[type-var]
        if not low or not high or high / low <= 3:
            continue
        optim = pair[0].config.optim
        smallest = min(scale.parameter_gradient(r.config, n) for r, n in zip(pair, norms, strict=True) if n)
        near_eps = smallest < 100 * optim.eps
        if near_eps or optim.grad_clip > 0:
            exposed = "Adam's eps" if near_eps else f"the gradient clip at {optim.grad_clip}"
            remedy = f"optim.eps={smallest / 1000:.0e}" if near_eps else "optim.grad_clip=0"
            text = (
                f"the expected gradient scale differs by {high / low:.1f}x and {exposed} exposes it: the arms may "
                f"differ in step size alone; set {remedy}"
            )
            yield Finding("scale-confound", "warn", text, where(pair))


def truncated_support(plan: Plan) -> Iterator[Finding]:
    """What the sampler reports is not the distribution that the trainer scores: rho is biased."""
    severity = "refuse" if any(k.split(".")[0] == "tis" for k in plan.factors) else "warn"
    for arm, run in plan.arms.items():
        r = run.config.rollout
        bent = {
            f"top_p={r.top_p}": r.top_p < 1,
            f"top_k={r.top_k}": r.top_k > 0,
            f"min_p={r.min_p}": r.min_p > 0,
            f"temperature={r.temperature}": r.temperature == 0,
        }
        if any(bent.values()):
            text = (
                f"rollout.{' '.join(k for k, v in bent.items() if v)}: log-probs of a truncated distribution bias rho; "
                f"set rollout.top_p=1 rollout.top_k=0 rollout.min_p=0 and a temperature above 0"
            )
            yield Finding("truncated-support", severity, text, arm)  # type: ignore[arg-type]


def reward_differences(a: Config, b: Config) -> list[str]:
    """Settings that decide what a training reward means and in which two runs differ.

    Where there is one, training rewards and EMAs of the two may be neither compared nor pooled: only held-out scores
    at one evaluation setting.
    """
    task = ("name", "reward", "min_digits", "max_digits", "train_size")
    rollout = ("temperature", "top_p", "top_k", "min_p", "max_response_len", "max_turn_len", "max_context_len")
    keys = [*(f"task.{k}" for k in task), *(f"rollout.{k}" for k in rollout)]
    return [k for k in keys if _value(a, k) != _value(b, k)]


def incomparable_metric(plan: Plan) -> Iterator[Finding]:
    """Arms whose training rewards mean different things; each kind is named once, against the first arm."""
    first, *others = plan.arms.values()
    seen: set[tuple[str, ...]] = set()
    for run in others:
        keys = tuple(reward_differences(first.config, run.config))
        kind = (*keys, *(repr(_value(run.config, k)) for k in keys))
        if keys and kind not in seen:
            seen.add(kind)
            text = (
                f"arms differ in {', '.join(keys)}: their training rewards may not be compared or pooled; judge them "
                f"by held-out scores at one evaluation setting"
            )
            yield Finding("incomparable-metric", "warn", text, where((first, run)))


def _value(c: Config, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(c, section), name)


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


def confounded_arms(plan: Plan) -> Iterator[Finding]:
    """Arms that differ from the first in several factors without the arms between that would tell them apart."""
    arms = list(plan.arms.values())
    known = {_signature(run, ()) for run in arms}
    for run in arms[1:]:
        keys = differing(arms[0], run)
        # with every single change present, this arm is the cell of an interaction
        if len(keys) < 2 or all(_signature(arms[0], ((k, run.levels.get(k)),)) in known for k in keys):
            continue
        near = next((o for o in arms if len(differing(o, run)) == 1), None)
        instead = f"compare it with {near.arm} ({differing(near, run)[0]} only)" if near else "drop all but one change"
        text = f"differs in {', '.join(keys)} at once: no effect can be told from another; {instead}"
        yield Finding("confounded-arms", "refuse", text, where((arms[0], run)))


def _signature(run: Run, changes: Iterable[tuple[str, object]]) -> str:
    levels = run.levels | dict(changes)
    return repr([(k, levels[k]) for k in sorted(levels) if k not in HORIZON])


def unequal_caps(plan: Plan) -> Iterator[Finding]:
    """Arms that may be selected from different steps are not comparable."""
    seen = {(c.train.max_steps, c.export.interval, c.selection_cap) for c in (r.config for r in plan.arms.values())}
    if len(seen) > 1:
        text = "arms differ in train.max_steps, export.interval or select.cap; give all arms the same"
        yield Finding("unequal-caps", "refuse", text, "sweep")


def unpaired_seeds(plan: Plan) -> Iterator[Finding]:
    """Differences between arms pair over seeds, so every arm needs the same ones."""
    seeds: dict[str, set[int]] = {}
    for run in plan.runs:
        seeds.setdefault(run.arm, set()).add(run.seed)
    union = set().union(*seeds.values())
    for arm, own in seeds.items():
        if own != union:
            text = f"has not the seeds {', '.join(map(str, sorted(union - own)))} that other arms have; run it on them"
            yield Finding("unpaired-seeds", "refuse", text, arm)


def single_seed(plan: Plan) -> Iterator[Finding]:
    """One seed per arm: no interval can be given."""
    if len(plan.seeds) == 1 and len(plan.arms) > 1:
        text = "one seed per arm: differences come without an interval; add seeds: seed=0,1,2"
        yield Finding("single-seed", "warn", text, "sweep")


def underpowered(plan: Plan, pilot: Pilot) -> Iterator[Finding]:
    """The seeds cannot show the smallest effect of interest, given the spread that earlier records show."""
    effect = plan.config.sweep.smallest_effect
    if effect is None or pilot.sd is None or len(plan.arms) < 2 or len(plan.seeds) < 2:
        return
    from ablate.stats import seeds_needed, smallest_detectable_effect

    arms = len(plan.arms)
    detectable = smallest_detectable_effect(pilot.sd, len(plan.seeds), arms=arms)
    if detectable > effect:
        try:
            remedy = f"take {seeds_needed(pilot.sd, effect, arms=arms)} seeds"
        except UsageError:
            remedy = "no number of seeds in reach would do; ask for a larger effect"
        text = (
            f"{len(plan.seeds)} seeds detect effects from {detectable:.3g} on (power 0.8), the smallest of interest is "
            f"{effect:g}; {remedy}"
        )
        yield Finding("underpowered", "warn", text, "sweep")


def group_too_small(plan: Plan) -> Iterator[Finding]:
    """No advantage can be formed from fewer rollouts than the estimator needs."""
    for arm, run in plan.arms.items():
        need = max(2, getattr(run.config.advantage, "min_group_size", 2))
        if run.config.train.group_size < need:
            text = f"train.group_size={run.config.train.group_size} is under {need}: every advantage is 0; raise it"
            yield Finding("group-too-small", "refuse", text, arm)


def hidden_length_confound(plan: Plan) -> Iterator[Finding]:
    """Another factor brings a length limit with it."""
    declared = {k.rsplit(".", 1)[-1] for k in plan.factors}
    first, *others = plan.arms.values()
    for run in others:
        a, b = first.config.rollout, run.config.rollout
        keys = [k for k in ("max_response_len", "max_turn_len", "max_context_len") if getattr(a, k) != getattr(b, k)]
        hidden = [k for k in keys if k not in declared]
        if not hidden and "max_response_len" not in {*keys, *declared}:
            same = first.config.max_response_len == run.config.max_response_len
            hidden = [] if same else ["objective.max_response_len"]
        if hidden:
            text = f"{', '.join(hidden)} differs though it is no factor; set it alike for all arms"
            yield Finding("hidden-length-confound", "warn", text, where((first, run)))


def unscoped_objective(plan: Plan) -> Iterator[Finding]:
    """A loss scale other than 1 reproduces a faulty run; it must be wanted."""
    for arm, run in plan.arms.items():
        if run.config.objective.loss_scale != 1.0:
            text = f"objective.loss_scale={run.config.objective.loss_scale} rescales the whole loss; set it to 1"
            yield Finding("loss-scale", "refuse", text, arm)


PLAN_CHECKS: tuple[Callable[[Plan], Iterator[Finding]], ...] = (
    inert_clip, inert_tis, inert_kl, kl_k1_loss, aliased_reductions, aliased_arms, scalar_only_contrast,
    truncated_support, incomparable_metric, sentinel_length, confounded_arms, unequal_caps, unpaired_seeds,
    single_seed, group_too_small, hidden_length_confound, unscoped_objective,
)  # fmt: skip

PILOT_CHECKS: tuple[Callable[[Plan, Pilot], Iterator[Finding]], ...] = (inert_reduction, scale_confound, underpowered)


def check_plan(plan: Plan, pilot: Pilot | None = None) -> list[Finding]:
    """All findings of a plan, refusals first; those that `validity.allow` names are marked as allowed."""
    found = [f for check in PLAN_CHECKS for f in check(plan)]
    found += [f for check in PILOT_CHECKS for f in check(plan, pilot or Pilot())]
    return marked(found, plan.config.validity.allow)
