"""Checks of single runs, from their records. Each is a small pure function. Imports no torch.

A metric that was not recorded (older records, other trainers' logs) makes a check silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from ablate.validity.curves import (
    averages,
    by_step,
    clipped_share,
    drop_from_peak,
    growth,
    last,
    mean,
    per_update,
    reported,
    rho_z,
    step_tags,
    steps_of,
    values,
)
from ablate.validity.finding import Finding
from ablate.validity.records import RunRecord

_FEW_UPDATES = 20


def rho_mass(run: RunRecord) -> Iterator[Finding]:
    """The mean of rho is 1 whenever the sampler is as recorded, whatever the mismatch."""
    found = rho_z(run)
    # rounding alone moves an exact match by some 1e-7 with hardly any spread; what matters is far above 5e-4
    if found and abs(found[0]) > 4 * found[1] and abs(found[0]) > 5e-4:
        text = (
            f"mean of rho is {1 + found[0]:.4f}, {abs(found[0]) / max(found[1], 1e-12):.0f} standard errors from 1: "
            f"the sampler is not as recorded; look for a truncated support, another temperature, stale weights or "
            f"filled log-probs"
        )
        yield Finding("rho-mass", "warn", text, run.folder)


def eps_floor(run: RunRecord) -> Iterator[Finding]:
    """Adam's eps, not the gradient, sets the step of most parameters."""
    found = per_update(run, "optim/sqrt_v_share_under_10_eps")
    if found and median(found) > 0.5:
        text = (
            f"{median(found):.0%} of the parameters have sqrt(v) under 10 eps: the learning rate is not what it says; "
            f"lower optim.eps or mend the loss scale"
        )
        yield Finding("eps-floor", "warn", text, run.folder)


def clip_norm(run: RunRecord) -> Iterator[Finding]:
    """The gradient clip never or always binds: it is no safeguard but absent, or a change of the learning rate."""
    share, count = clipped_share(run), len(per_update(run, "optim/grad_norm"))
    if share is None or count < _FEW_UPDATES:
        return
    limit = run.config.optim.grad_clip
    if share == 0:
        highest = max(per_update(run, "optim/grad_norm"))
        text = f"the gradient clip at {limit:g} never binds (largest norm {highest:.3g}): it is no setting of this run"
        yield Finding("clip-norm-idle", "note", text, run.folder)
    elif share == 1:
        text = f"the gradient clip at {limit:g} binds in every update: it sets the step size; raise optim.grad_clip"
        yield Finding("clip-norm-always", "warn", text, run.folder)


def low_precision_updates(run: RunRecord) -> Iterator[Finding]:
    """Updates that rounding swallows."""
    found = per_update(run, "optim/updates_under_half_ulp_share")
    if found and median(found) > 0.5:
        text = (
            f"{median(found):.0%} of the parameters get updates under half a unit in the last place of their storage "
            f"type; keep fp32 master weights (engine.precision=fp32)"
        )
        yield Finding("low-precision-updates", "warn", text, run.folder)


def no_group_variance(run: RunRecord) -> Iterator[Finding]:
    """Most groups agree without the task being solved: there is nothing to learn from."""
    effective, reward = last(run, "reward/groups_effective"), last(run, "reward/mean")
    if effective is not None and reward is not None and effective < 0.5 and reward <= 0.9:
        text = (
            f"{1 - effective:.0%} of the groups had equal rewards in the last 10 steps, at a mean reward of "
            f"{reward:.2f}; take a task of fitting difficulty or a larger train.group_size"
        )
        yield Finding("no-group-variance", "warn", text, run.folder)


def infra_failures(run: RunRecord) -> Iterator[Finding]:
    """Rollouts that failed for reasons of infrastructure."""
    share = mean(values(run, "reward/excluded_share"))
    if share is not None and share > 0.05:
        text = f"{share:.0%} of the rollouts had no finite reward and were excluded; mend the verifier or sandbox"
        yield Finding("infra-failures", "warn", text, run.folder)


def truncated_responses(run: RunRecord) -> Iterator[Finding]:
    """Responses cut at the length limit."""
    share = mean(values(run, "length/truncated_share"))
    if share is not None and share > 0.1:
        text = (
            f"{share:.0%} of the responses hit rollout.max_response_len={run.config.rollout.max_response_len}; raise it"
        )
        yield Finding("truncated-responses", "warn", text, run.folder)


def tagged_steps(run: RunRecord) -> Iterator[Finding]:
    """Epoch boundaries, cold starts and resumes, and whether the reported step's EMA leans on them."""
    chosen = reported(run)
    span = run.config.select.span
    window = range(chosen.step - span + 1, chosen.step + 1) if chosen else range(0)
    tagged = step_tags(run)
    for tag in ("epoch-boundary", "cold-start", "post-resume"):
        steps = [step for step, tags in tagged.items() if tag in tags]
        used = [step for step in steps if step in window]
        # every run begins cold: worth a line only where the choice leans on it
        if steps and (used or tag != "cold-start"):
            where = f"the reported step {chosen.step} used it" if chosen and used else "the selection leans on none"
            text = f"steps {_some(steps)} are tagged; {where if chosen else 'no step is reported yet'}"
            yield Finding(tag, "note", text, run.folder)


def _some(steps: Sequence[int], limit: int = 5) -> str:
    more = f" and {len(steps) - limit} more" if len(steps) > limit else ""
    return ", ".join(map(str, steps[:limit])) + more


def collapsed(run: RunRecord) -> Iterator[Finding]:
    """The reward at the end is under half of what it was."""
    end, best = last(run, "reward/mean"), max(averages(run).values(), default=0.0)
    if end is not None and best > 0 and end < best / 2:
        text = (
            f"mean reward of the last 10 steps is {end:.4f}, the best EMA was {best:.4f}: collapsed; report no step of "
            f"it, lower optim.lr or look at its rollouts"
        )
        yield Finding("collapsed", "warn", text, run.folder)


def past_peak(run: RunRecord) -> Iterator[Finding]:
    """The final EMA lies under its peak by more than a maximum over noise explains."""
    found = drop_from_peak(run)
    if found and found[0] > found[1]:
        text = (
            f"the final EMA lies {found[0]:.3f} under its peak, flat runs reach {found[1]:.3f} in 1 of 20: training "
            f"past the peak did harm; stop earlier or report the peak with its held-out score"
        )
        yield Finding("past-peak", "warn", text, run.folder)


def lineage_problems(run: RunRecord) -> Iterator[Finding]:
    """Steps that were written twice, are missing, or lie beyond the cap, and what became of them."""
    tags = step_tags(run)
    twice = [step for step, names in tags.items() if "duplicated" in names]
    if twice:
        text = f"steps {_some(twice)} were written by several attempts; the last one counts, as the kept weights do"
        yield Finding("duplicated-steps", "note", text, run.folder)
    steps = sorted(steps_of(run))
    missing = sorted({*range(1, steps[-1])} - {*steps}) if steps else []
    if missing:
        text = f"steps {_some(missing)} have no row: the EMA steps over them; look at logs/ and attempts.jsonl"
        yield Finding("gaps", "warn", text, run.folder)
    beyond = [step for step, names in tags.items() if "past-cap" in names]
    if beyond:
        text = (
            f"steps {_some(beyond)} lie past train.max_steps={run.config.train.max_steps}; leave them out of every "
            f"comparison"
        )
        yield Finding("past-cap", "warn", text, run.folder)


def mismatch_growth(run: RunRecord) -> Iterator[Finding]:
    """Trainer and sampler drift apart."""
    k3 = growth(run, "mismatch/k3")
    # far under 1e-4 nats a token it is rounding that grows
    if k3 and k3[1] > 10 * k3[0] and k3[1] > 1e-4:
        text = (
            f"k3 of sampler against trainer grew from {k3[0]:.1e} to {k3[1]:.1e}; take a sampler of higher precision "
            f"or fewer updates per rollout step"
        )
        yield Finding("mismatch-growth", "warn", text, run.folder)
    ess = by_step(run, "mismatch/ess")
    low = [step for step, value in ess.items() if value < 0.5]
    if low:
        text = (
            f"effective sample size fell under 0.5 (steps {_some(low)}): few tokens carry the gradient; keep sampler "
            f"and trainer closer"
        )
        yield Finding("mismatch-growth", "warn", text, run.folder)


RUN_CHECKS: tuple[Callable[[RunRecord], Iterator[Finding]], ...] = (
    rho_mass, eps_floor, clip_norm, low_precision_updates, no_group_variance, infra_failures, truncated_responses,
    tagged_steps, collapsed, past_peak, lineage_problems, mismatch_growth,
)  # fmt: skip
