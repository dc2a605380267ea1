"""Do two arms train the same thing? Their coefficients c = d loss / d logprob, compared on batches of the design.

The one file of this package that imports torch: import it where it is wanted (`ablate plan --evaluate`, a run's start).

Legend: M sequences, T response positions.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ablate.batch import micro_batches
from ablate.config import Config
from ablate.levels import FACTORS
from ablate.objective.dose import Arm, Update, bind_arm, coefficients
from ablate.task.base import make_task
from ablate.validity.design import HORIZON, differing, sampler_is_trainer, where
from ablate.validity.finding import Finding, marked
from ablate.validity.plan_checks import aliased_pairs, inert_pairs, joined, scalar_only_contrast
from ablate.validity.records import objective_sections

_EQUAL = 1e-9
_T = 12
_ROWS = 96
_MOST_BATCHES = 24
_OBJECTIVE = frozenset({*FACTORS, "objective"})


def evaluate_plan(plan: Any) -> list[Finding]:
    """`aliased-arms` and `scalar-only-contrast` among arms that differ only in their objective, by evaluation.

    `plan` is a Plan, or what `validity.records.load_design` reads back. Pairs that `check_plan` names already are left
    out. Findings that `validity.allow` names are marked.
    """
    component = joined(plan, [*inert_pairs(plan), *aliased_pairs(plan)])
    known = {f.where for f in scalar_only_contrast(plan)}
    found: list[Finding] = []
    for arms in _groups(plan):
        for a, b, aliased in _similar(arms):
            if aliased and component[a.arm] != component[b.arm]:
                component = joined(plan, [*_links(plan, component), (a, b)])
                text = (
                    f"the arms differ in {', '.join(differing(a, b))} but the gradient has the same coefficient on "
                    f"every token of batches as this design makes them; drop one"
                )
                found.append(Finding("aliased-arms", "refuse", text, where((a, b))))
            elif not aliased and len(differing(a, b)) == 1 and where((a, b)) not in known:
                text = (
                    f"levels of {differing(a, b)[0]} differ by one scalar per update, which Adam cancels while eps and "
                    f"clipping are idle; compare levels that turn the gradient"
                )
                found.append(Finding("scalar-only-contrast", "warn", text, where((a, b))))
    return marked(found, plan.config.validity.allow)


def _links(plan: Any, component: Mapping[str, str]) -> Iterator[tuple[Any, Any]]:
    yield from ((plan.arms[root], plan.arms[arm]) for arm, root in component.items())


def _groups(plan: Any) -> list[list[Any]]:
    """Arms that differ in nothing but the objective and how long they run."""
    groups: dict[str, list[Any]] = {}
    for run in plan.arms.values():
        groups.setdefault(run.config.digest(without=("seed", "eval", *_OBJECTIVE, *HORIZON)), []).append(run)
    return [arms for arms in groups.values() if len(arms) > 1]


def _similar(arms: Sequence[Any]) -> Iterator[tuple[Any, Any, bool]]:
    """Pairs whose coefficients are parallel in every batch, and whether they are equal in all. One arm an objective."""
    distinct: dict[str, tuple[Any, Arm]] = {}
    for run in arms:
        sections = objective_sections(run.config)
        distinct.setdefault(json.dumps(sections, sort_keys=True), (run, bind_arm(sections)))
    runs = [run for run, _ in distinct.values()]
    batches = design_batches(runs[0].config, [r.config for r in runs])
    found = [torch.stack([_flat(arm, batch) for _, arm in distinct.values()]) for batch in batches]
    parallel = torch.stack([_parallel(c) for c in found]).all(0)
    for i, j in parallel.triu(1).nonzero().tolist():
        aliased = all(_equal(c[i], c[j]) for c in found)
        yield runs[i], runs[j], aliased


def _flat(arm: Arm, batch: Update) -> Tensor:
    return coefficients(arm, batch)[:, batch.loss_mask].flatten()


def _parallel(c: Tensor) -> Tensor:
    """[A, A]: 1 - cos < 1e-9; two arms without any gradient are parallel too."""
    size = c.norm(dim=1)
    unit = c / size.clamp(min=torch.finfo(c.dtype).tiny)[:, None]
    return ((unit @ unit.T) > 1 - _EQUAL) | ((size == 0)[:, None] & (size == 0)[None, :])


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= _EQUAL * a.abs().max())


def design_batches(c: Config, arms: Sequence[Config]) -> list[Update]:
    """Batches as the design of `c` makes them, in float64, that tell the levels of `arms` apart if anything can.

    Ratio 1 where a rollout step has one update, rho 1 where the sampler is the trainer, lengths equal where the task
    says so; the rest is random. Between any two thresholds of the arms some token, some sequence's mean and some
    sequence's sum comes to lie, under credit of either sign.
    """
    probes = _probes(arms)
    generator = torch.Generator().manual_seed(0)
    batches: list[Update] = []
    rows = _rows(c, arms)
    wanted = 2 * -(-3 * len(probes) // rows) if len(probes) else 2
    for k in range(min(max(wanted, 2), _MOST_BATCHES)):
        first = c.updates_per_step == 1 or k == 0
        batches.append(_batch(c, rows, probes, offset=k // 2 * rows, flip=k % 2 == 1, first=first, generator=generator))
    if c.updates_per_step > 1:
        # a first update in either sign of credit; the later ones above move the ratio
        batches.append(_batch(c, rows, probes, offset=0, flip=False, first=False, generator=generator))
    return batches


def _rows(c: Config, arms: Sequence[Config]) -> int:
    """Sequences of a batch: whole groups, as many as the run has where a reduction depends on the split."""
    group = c.train.group_size
    prompts = max(c.train.prompts_per_step // c.train.mini_batches, 1)
    split = any(a.reduction.scope == "micro_batch" for a in arms)  # type: ignore[attr-defined]
    return group * (prompts if split else min(prompts, max(_ROWS // group, 2)))


def _probes(arms: Sequence[Config]) -> Tensor:
    """Log-ratios between and beyond all thresholds that the levels name, whatever a keyword means there."""
    values = {
        v
        for c in arms
        for level in (c.clip, c.tis)
        for v in level.model_dump().values()
        if isinstance(v, (int, float)) and not isinstance(v, bool)
    }
    ratios = {r for v in values for r in (v, 1 + v, 1 - v, 1 / v if v else 0) if 0 < r < 4e8}
    logs = sorted({0.0, -0.05, 0.05, *(torch.tensor(sorted(ratios), dtype=torch.float64).log().tolist())})
    between = [(a + b) / 2 for a, b in itertools.pairwise(logs) if b - a > 1e-12]
    return torch.tensor([logs[0] - 0.1, *between, logs[-1] + 0.1], dtype=torch.float64).clamp(-19, 19)


def _batch(
    c: Config, rows: int, probes: Tensor, *, offset: int, flip: bool, first: bool, generator: torch.Generator
) -> Update:
    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    cv = make_task(c.task).length_cv
    lengths = torch.full((rows,), _T) if cv is not None and cv < 0.05 else 1 + (uniform(rows) * _T).long()
    mask = torch.arange(_T) < lengths[:, None]
    prompts = torch.arange(rows) // c.train.group_size
    start = -2 * uniform(rows, _T) - 0.01
    order = torch.arange(rows) + offset
    logprobs = start if first else start + _spread(probes, order, lengths, uniform)
    # another order than that of the ratio, so that the two are not tied
    mismatch = _spread(probes, order.flip(0) + 1, lengths, uniform)
    sampler = start if sampler_is_trainer(c) else start - mismatch
    rewards, included = _rewards(c, rows, offset + flip, flip, uniform), _included(c, rows, uniform)
    reference = start + 0.3 * (uniform(rows, _T) - 0.5)
    return Update(
        logprobs, start, sampler, mask, rewards, prompts, included, reference, micro_batches=_forwards(c, rows)
    )


def _spread(probes: Tensor, order: Tensor, lengths: Tensor, uniform: Any) -> Tensor:
    """[M, T] log-ratios: by turns constant in a row (its mean is a probe), summing to a probe, and free per token."""
    rows = len(order)
    row = probes[(order // 3) % len(probes)]
    constant = row[:, None].expand(rows, _T)
    summing = (row / lengths)[:, None].expand(rows, _T)
    free = probes[(uniform(rows, _T) * len(probes)).long()] + 0.01 * (uniform(rows, _T) - 0.5)
    kind = (order % 3)[:, None]
    return torch.where(kind == 0, constant, torch.where(kind == 1, summing, free))


def _rewards(c: Config, rows: int, shift: int, flip: bool, uniform: Any) -> Tensor:
    """0 or 1 where the task's reward is, with every number of successes in turn, else anything; some groups alike."""
    group = c.train.group_size
    groups = torch.arange(rows) // group
    if c.task.reward != "binary":
        return torch.where(groups % 4 == 3, 0.5, uniform(rows))
    # from the middle on, so that even a single group has an advantage
    successes = (groups + shift + group // 2) % (group + 1)
    right = (uniform(rows // group, group).argsort(1).flatten() < successes).double()
    return 1 - right if flip else right


def _included(c: Config, rows: int, uniform: Any) -> Tensor:
    """All rollouts; where a verifier can fail, in every group another share of them, up to nearly all."""
    if c.task.name == "reverse":
        return torch.ones(rows, dtype=torch.bool)
    group = torch.arange(rows) // c.train.group_size
    return uniform(rows) > 0.95 * uniform(int(group.max()) + 1)[group]


def _forwards(c: Config, rows: int) -> Tensor:
    """Which forward, over all ranks, each sequence is in, as the trainer splits a mini-batch."""
    ranks = c.cluster.nodes * c.cluster.ranks_per_node
    numbers = torch.zeros(rows, dtype=torch.long)
    for rank in range(ranks):
        for k, part in enumerate(micro_batches(range(rows), c.engine.micro_batch_size, rank, ranks)):
            numbers[part] = k * ranks + rank
    return numbers
