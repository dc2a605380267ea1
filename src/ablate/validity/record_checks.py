"""Checks between the arms of a sweep, from their records, and `check_records`, which runs all. Imports no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from ablate.config import Config
from ablate.validity.curves import (
    Measure,
    at_step,
    by_arm,
    clipped_share,
    extremes,
    mean,
    per_update,
    reported,
    steps_of,
    to_common_step,
    trained_tokens,
    update_keys,
    values,
)
from ablate.validity.design import differing_keys
from ablate.validity.finding import Finding, marked
from ablate.validity.plan_checks import reward_differences
from ablate.validity.records import RunRecord
from ablate.validity.run_checks import RUN_CHECKS
from ablate.validity.table import Table

Runs = Sequence[RunRecord]
_INERT, _NEGLIGIBLE = 1e-6, 1e-2


def inert_observed(runs: Runs) -> Iterator[Finding]:
    """What exchanging a level would have changed in the updates that were made, for every pair of levels."""
    found: dict[tuple[str, str, str], float] = {}
    for some in by_arm(runs).values():
        for name, share in _doses(some).items():
            key, _, other = name.partition("=")
            a, b = sorted((str(some[0].levels.get(key)), other))
            if a != b:
                found[key, a, b] = max(found.get((key, a, b), 0.0), share)
    for (key, a, b), share in sorted(found.items()):
        if share < _NEGLIGIBLE:
            word = "inert" if share < _INERT else "negligible"
            text = (
                f"{key} {a} against {b} would have changed at most {share:.1e} of the updates' coefficients: {word}; "
                f"an effect between them is noise"
            )
            yield Finding("inert-observed", "warn" if word == "inert" else "note", text, "sweep")


def _doses(some: Runs) -> dict[str, float]:
    """Mean over updates and seeds of every `dose/<key>=<level>` that was recorded."""
    collected: dict[str, list[float]] = {}
    for run in some:
        for name in update_keys(run):
            if name.startswith("dose/"):
                collected.setdefault(name.removeprefix("dose/"), []).extend(per_update(run, name))
    return {name: fmean(shares) for name, shares in collected.items() if shares}


def identical_trajectories(runs: Runs) -> Iterator[Finding]:
    """Two arms of one seed arrived at the same weights."""
    hashes = {id(run): _hashes(run, "weights_hash") for run in runs}
    for a, b in _paired(runs):
        one, two = hashes[id(a)], hashes[id(b)]
        common = max(one.keys() & two.keys(), default=0)
        if common and one[common] == two[common]:
            text = f"at seed {a.seed} both have the same weights at step {common}: what sets them apart did nothing"
            yield Finding("identical-trajectories", "warn", text, f"{a.arm} vs {b.arm}")


def prompts_diverged(runs: Runs) -> Iterator[Finding]:
    """Paired arms must see the same prompts."""
    hashes = {id(run): _hashes(run, "prompts_hash") for run in runs}
    for a, b in _paired(runs):
        same = all(getattr(a.config.task, k) == getattr(b.config.task, k) for k in ("name", "train_size"))
        if not same or a.config.train.prompts_per_step != b.config.train.prompts_per_step:
            continue
        one, two = hashes[id(a)], hashes[id(b)]
        first = min((step for step in one.keys() & two.keys() if one[step] != two[step]), default=None)
        if first is not None:
            text = f"at seed {a.seed} they saw other prompts from step {first} on and do not pair; rerun one"
            yield Finding("prompts-diverged", "warn", text, f"{a.arm} vs {b.arm}")


def _paired(runs: Runs) -> Iterator[tuple[RunRecord, RunRecord]]:
    """Runs of one seed: each against the first whose fingerprints could be equal, all pairs for few arms."""
    seeds: dict[int, list[RunRecord]] = {}
    for run in runs:
        seeds.setdefault(run.seed, []).append(run)
    for some in seeds.values():
        # all pairs of many arms say no more than each against the first
        yield from itertools.combinations(some, 2) if len(some) <= 12 else ((some[0], run) for run in some[1:])


def _hashes(run: RunRecord, key: str) -> dict[int, str]:
    column = run.rows.column(key) if isinstance(run.rows, Table) else [r.get(key) for r in run.rows]
    found = zip(steps_of(run), column, strict=True)
    return {step: value for step, value in found if step > 0 and isinstance(value, str)}


def scale_confound_observed(runs: Runs) -> Iterator[Finding]:
    """Clipping or eps acts on one arm and not on another: they differ in step size."""
    share = extremes(runs, clipped_share)
    if share and share[1][1] - share[0][1] > 0.2:
        text = (
            f"the gradient clip bound in {share[0][1]:.0%} of one arm's updates and {share[1][1]:.0%} of the other's: "
            f"they differ in step size; set optim.grad_clip=0"
        )
        yield Finding("scale-confound-observed", "warn", text, _versus(share))
    floor = extremes(runs, _above_eps)
    if floor and floor[0][1] < 100 <= floor[1][1]:
        text = (
            f"median sqrt(v) is {floor[0][1]:.1f} eps in one arm and {floor[1][1]:.1f} in the other: eps slows the one "
            f"alone; lower optim.eps"
        )
        yield Finding("scale-confound-observed", "warn", text, _versus(floor))


def _above_eps(run: RunRecord) -> float | None:
    found = per_update(run, "optim/sqrt_v_median")
    return median(found) / run.config.optim.eps if found else None


def _versus(pair: tuple[tuple[str, float], tuple[str, float]]) -> str:
    return f"{pair[0][0]} vs {pair[1][0]}"


def group_variance_differs(runs: Runs) -> Iterator[Finding]:
    """One arm has more groups to learn from than another."""
    found = extremes(runs, lambda run: mean(values(run, "reward/groups_effective")))
    if found and found[1][1] > 1.5 * found[0][1]:
        text = (
            f"{found[0][1]:.0%} of one arm's groups had an advantage and {found[1][1]:.0%} of the other's: they "
            f"learned from other amounts of data; compare at equal effective groups"
        )
        yield Finding("no-group-variance", "warn", text, _versus(found))


def failure_imbalance(runs: Runs) -> Iterator[Finding]:
    """Failures or truncation hit one arm more than another."""
    for key, word in (("reward/excluded_share", "excluded"), ("length/truncated_share", "truncated")):
        found = extremes(runs, _average(key))
        if found and found[1][1] - found[0][1] > 0.03:
            text = (
                f"{found[0][1]:.1%} of one arm's rollouts were {word} and {found[1][1]:.1%} of the other's: their "
                f"rewards are over different rollouts; judge by held-out scores"
            )
            yield Finding("failure-imbalance", "warn", text, _versus(found))


def _average(key: str) -> Measure:
    return lambda run: mean(values(run, key))


def token_budget(runs: Runs) -> Iterator[Finding]:
    """Arms trained on different amounts of text."""
    found = extremes(runs, trained_tokens)
    if found and found[1][1] > 1.3 * found[0][1]:
        text = (
            f"by the last common step one arm trained on {found[0][1]:.3g} tokens and the other on {found[1][1]:.3g}: "
            f"look at effects at equal tokens too"
        )
        yield Finding("token-budget", "warn", text, _versus(found))


def mixed_code(runs: Runs) -> Iterator[Finding]:
    """Versions, ranks or devices differ between runs."""
    seen: dict[str, set[str]] = {}
    for run in runs:
        for key, value in _code(run).items():
            seen.setdefault(key, set()).add(str(value))
    mixed = sorted(key for key, found in seen.items() if len(found) > 1)
    if mixed:
        text = (
            f"the runs differ in {', '.join(f'{k} ({_few(seen[k])})' for k in mixed[:4])}"
            f"{f' and {len(mixed) - 4} more' if len(mixed) > 4 else ''}; rerun the older ones"
        )
        yield Finding("mixed-code", "warn", text, "sweep")


def _few(found: Iterable[str]) -> str:
    names = sorted(text[:12] for text in found)
    return " / ".join(names[:3]) + (" / ..." if len(names) > 3 else "")


def _code(run: RunRecord) -> dict[str, Any]:
    """What produced a run, flat; nothing where it was not recorded."""
    if not run.code:
        return {}
    versions = run.code.get("versions")
    flat = {k: v for k, v in run.code.items() if not isinstance(v, (Mapping, list))}
    flat |= dict(versions) if isinstance(versions, Mapping) else {}
    return {**flat, "ranks": run.config.cluster.nodes * run.config.cluster.ranks_per_node}


def no_improvement(runs: Runs) -> Iterator[Finding]:
    """The reported step is no better on held-out prompts than the start was, as far as one can tell."""
    for arm, some in by_arm(runs).items():
        gains = [gain for run in some if (gain := _gain(run)) is not None]
        if not gains:
            continue
        centre = fmean(g for g, _ in gains)
        half = _half_width(gains)
        if centre - half <= 0:
            text = (
                f"held-out score at the reported step minus that at step 0 is {centre:+.3f} "
                f"({centre - half:+.3f} to {centre + half:+.3f}): no improvement shown; it is published only when asked"
            )
            yield Finding("no-improvement", "warn", text, arm)


def _gain(run: RunRecord) -> tuple[float, float] | None:
    """Held-out gain of the reported step over step 0, and its variance from the number of prompts."""
    chosen = reported(run)
    start = at_step(run, "heldout/greedy").get(0)
    if chosen is None or chosen.heldout is None or start is None:
        return None
    prompts = at_step(run, "heldout/prompts").get(0)
    spread = sum(p * (1 - p) for p in (start, chosen.heldout) if 0 < p < 1)
    return chosen.heldout - start, spread / max(prompts or run.config.eval.prompts, 1.0)


def _half_width(gains: Sequence[tuple[float, float]]) -> float:
    """Half of a 95% interval: over seeds from three on (t), else from the number of prompts."""
    n = len(gains)
    if n < 3:
        return 1.96 * math.sqrt(sum(v for _, v in gains)) / n
    from scipy.stats import t

    return float(t.ppf(0.975, n - 1)) * stdev(g for g, _ in gains) / math.sqrt(n)


def unpaired_records(runs: Runs) -> Iterator[Finding]:
    """Arms whose runs do not share the same seeds: only common seeds pair."""
    seeds = {arm: {run.seed for run in some} for arm, some in by_arm(runs).items()}
    union = set().union(*seeds.values()) if seeds else set()
    for arm, own in seeds.items():
        if own != union:
            text = f"has no records at seeds {', '.join(map(str, sorted(union - own)))}; only common seeds are compared"
            yield Finding("unpaired-seeds", "warn", text, arm)


SWEEP_CHECKS: tuple[Callable[[Runs], Iterator[Finding]], ...] = (
    inert_observed, identical_trajectories, prompts_diverged, mixed_code, no_improvement, unpaired_records,
)  # fmt: skip

# totals and means over a run, which compare only over the same steps
BUDGET_CHECKS: tuple[Callable[[Runs], Iterator[Finding]], ...] = (
    scale_confound_observed, group_variance_differs, failure_imbalance, token_budget,
)  # fmt: skip


def check_records(runs: Runs) -> list[Finding]:
    """All findings of recorded runs, warnings first; those that `validity.allow` names are marked as allowed."""
    found = [f for run in runs for check in RUN_CHECKS for f in check(run)]
    found += [f for check in SWEEP_CHECKS for f in check(runs)]
    level = to_common_step(runs)
    found += [f for check in BUDGET_CHECKS for f in check(level)]
    return marked(found, {id_ for run in runs for id_ in run.config.validity.allow})


def check_comparison(sweeps: Mapping[str, Runs], factors: Iterable[str] = ()) -> list[Finding]:
    """What else differs between sweeps that are to be compared, outside the declared `factors`.

    `confounded-arms` names resolved keys and code, `incomparable-metric` what a training reward depends on.
    """
    declared = {*factors, *(k for runs in sweeps.values() for run in runs for k in run.levels)}
    found: list[Finding] = []
    for (one, a), (two, b) in itertools.combinations(sweeps.items(), 2):
        if not a or not b:
            continue
        keys = [k for k in _nearest(a, b) if not _is_declared(k, declared)]
        code = _differing_code(a, b)
        if keys or code:
            parts = ([f"settings {', '.join(keys)}"] if keys else []) + ([f"code {', '.join(code)}"] if code else [])
            text = f"they also differ in {' and in '.join(parts)}: no effect can be told from these; rerun one to match"
            found.append(Finding("confounded-arms", "warn", text, f"{one} vs {two}"))
        metric = reward_differences(a[0].config, b[0].config)
        if metric:
            text = f"they differ in {', '.join(metric)}: training rewards may not be compared, only held-out scores"
            found.append(Finding("incomparable-metric", "warn", text, f"{one} vs {two}"))
    return marked(found, ())


def _nearest(a: Runs, b: Runs) -> list[str]:
    """Keys in which even the most alike arms of two sweeps differ."""
    ones, twos = _configs(a), _configs(b)
    return min((differing_keys(x, y) for x in ones for y in twos), key=len)


def _configs(runs: Runs, most: int = 40) -> list[Config]:
    return list({run.arm: run.config for run in runs}.values())[:most]


def _is_declared(key: str, declared: Iterable[str]) -> bool:
    return any(key == d or key.startswith(d + ".") or d.startswith(key + ".") for d in declared)


def _differing_code(a: Runs, b: Runs) -> list[str]:
    one, two = ({k: str(v) for run in runs for k, v in _code(run).items()} for runs in (a, b))
    return sorted(k for k in one.keys() & two.keys() if one[k] != two[k])
