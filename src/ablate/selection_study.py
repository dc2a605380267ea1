"""Which rule should pick the reported step? `python -m ablate.selection_study [SWEEP ...] [--write docs/selection.md]`

Curves of known truth are drawn, each rule picks a step from what a run would have recorded, and its regret is what the
best candidate is truly worth minus what the picked one is. Folders of real sweeps are judged by their held-out scores,
which are a sample too. The EMA rule is `ablate.select.select` itself. Imports no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from ablate import files
from ablate.errors import UsageError
from ablate.record import read_metrics
from ablate.resample import ema_rows, resample_run
from ablate.runs import load_config
from ablate.select import curve, exported_steps, select
from ablate.stats.doctable import markdown_table, rewrite

Floats = NDArray[np.float64]
Truth = Callable[[Floats], NDArray[np.floating]]
SPAN, INTERVAL, STEPS = 5, 5, 78
PROMPTS, GROUP = 64, 8
ALIKE = 0.6  # correlation of the rewards of one prompt's rollouts: the mean of 64 x 8 then has a standard error of 0.05
SIMULATIONS = 2000


@dataclass(frozen=True)
class Observed:
    """What a rule may look at: the recorded rewards by step, and of each candidate its raw mean, EMA and the EMA's
    standard error over prompts, in ascending order of `steps`."""

    rewards: Mapping[int, float]
    span: int
    steps: tuple[int, ...]
    raw: Floats
    ema: Floats
    ema_se: Floats


def ema_5(seen: Observed) -> int:
    """The rule of the project, by its own code."""
    return _reported(seen.rewards, seen.steps, seen.span)


def raw_max(seen: Observed) -> int:
    """The candidate with the largest mean reward of its one step."""
    return _reported(seen.rewards, seen.steps, span=1)


def last_step(seen: Observed) -> int:
    """No choice at all: no optimism either."""
    return seen.steps[-1]


def ema_bound(seen: Observed) -> int:
    """The largest lower 95% bound of the EMA."""
    return seen.steps[int(np.argmax(seen.ema - 1.645 * seen.ema_se))]


def ema_latest(seen: Observed) -> int:
    """The latest candidate whose EMA is not clearly (one-sided 95%) below the largest."""
    best = int(np.argmax(seen.ema))
    gap = 1.645 * np.hypot(seen.ema_se, seen.ema_se[best])
    return seen.steps[int(np.flatnonzero(seen.ema >= seen.ema[best] - gap)[-1])]


def _reported(rewards: Mapping[int, float], steps: Sequence[int], span: int) -> int:
    chosen = select(rewards, steps, {}, span=span, interval=0, cap=steps[-1]).reported
    assert chosen is not None
    return chosen.step


RULES: dict[str, Callable[[Observed], int]] = {
    "EMA-5": ema_5, "raw arg-max": raw_max, "last step": last_step, "EMA lower bound": ema_bound,
    "latest within noise": ema_latest,
}  # fmt: skip


def _no_bias(n: Floats) -> Floats:
    return np.zeros_like(n)


@dataclass(frozen=True)
class World:
    """A curve of known truth. `value(n)` is the mean reward under the weights after rollout step n = 0..steps.

    `bias(n)` is added to what step n records without being true of the weights: at an epoch's end the rollouts in
    flight are dropped and fast successes come first. `prompts` are drawn per step.
    """

    name: str
    value: Truth
    prompts: int = PROMPTS
    bias: Truth = _no_bias


def _between(n: Floats, points: Mapping[int, float]) -> Floats:
    return np.asarray(np.interp(n, list(points), list(points.values())))


WORLDS = (
    World("rising to the end", lambda n: _between(n, {0: 0.20, 78: 0.60})),
    World("rising, then level", lambda n: 0.55 - 0.35 * np.exp(-n / 12)),
    World("peaked at 30 of 78", lambda n: _between(n, {0: 0.25, 30: 0.50, 78: 0.36})),
    World("collapsing after 40", lambda n: _between(n, {0: 0.25, 40: 0.50, 46: 0.05, 78: 0.01})),
    World("flat but for a wave", lambda n: 0.45 + 0.02 * np.sin(n / 8)),
    World("the same, 16 prompts", lambda n: 0.45 + 0.02 * np.sin(n / 8), prompts=16),
    World("narrow peak at 30", lambda n: 0.35 + 0.20 * np.exp(-(((n - 30) / 3) ** 2))),
    World("crash right after 30", lambda n: _between(n, {0: 0.25, 30: 0.55, 31: 0.10, 78: 0.25})),
    World("late jump at 74", lambda n: _between(n, {0: 0.30, 73: 0.40, 75: 0.60, 78: 0.60})),
    World(
        "peaked, 3 steps read .15 too high",
        lambda n: _between(n, {0: 0.25, 30: 0.50, 78: 0.36}),
        bias=lambda n: 0.15 * ((n >= 68) & (n <= 70)),
    ),
)


def draw_curves(world: World, simulations: int, key: int = 0) -> tuple[Floats, Floats]:
    """Recorded mean reward and its squared standard error over prompts, both [simulations, steps].

    Step n is drawn with the weights after n - 1. A prompt's ease is Beta with the step's mean, its rollouts binomial.
    """
    noise = np.random.Generator(np.random.Philox(key=key))
    n = np.arange(1, STEPS + 1, dtype=float)
    mean = np.clip(world.value(n - 1) + world.bias(n), 1e-3, 1 - 1e-3)
    size = (1 - ALIKE) / ALIKE
    rewards = np.empty((simulations, STEPS))
    variance = np.empty_like(rewards)
    for i, m in enumerate(mean):
        ease = noise.beta(m * size, (1 - m) * size, (simulations, world.prompts))
        by_prompt = noise.binomial(GROUP, ease) / GROUP
        rewards[:, i] = by_prompt.mean(axis=1)
        variance[:, i] = by_prompt.var(axis=1, ddof=1) / world.prompts
    return rewards, variance


def ema_variance(variance: Floats, span: int) -> Floats:
    """Variance of the EMA of independent means, along the last axis."""
    alpha = 2.0 / (span + 1.0)
    out = np.array(variance)
    for i in range(1, out.shape[-1]):
        out[..., i] = alpha**2 * out[..., i] + (1 - alpha) ** 2 * out[..., i - 1]
    return out


@dataclass(frozen=True)
class Verdict:
    """How a rule did in a world: regret with a 95% interval, the same minus EMA-5's, and how far its figure flatters.

    `optimism` is what the rule's own statistic at the picked step (its EMA or mean) exceeds the truth by, on average.
    """

    world: str
    rule: str
    regret: float
    half: float
    over_ema: float
    over_ema_half: float
    optimism: float
    median_step: float


def study(world: World, simulations: int = SIMULATIONS) -> list[Verdict]:
    """Every rule on the same simulated runs, so that differences pair."""
    rewards, variance = draw_curves(world, simulations)
    averages, se = ema_rows(rewards, SPAN), np.sqrt(ema_variance(variance, SPAN))
    steps = np.arange(2 * INTERVAL, STEPS + 1, INTERVAL)
    truth = world.value(steps.astype(float))
    at = steps - 1
    kept, every = tuple(map(int, steps)), range(1, STEPS + 1)
    seen = [
        Observed(dict(zip(every, r.tolist(), strict=True)), SPAN, kept, r[at], e[at], s[at])
        for r, e, s in zip(rewards, averages, se, strict=True)
    ]
    picked = {name: np.array([rule(o) for o in seen]) for name, rule in RULES.items()}
    regret = {name: truth.max() - world.value(p.astype(float)) for name, p in picked.items()}
    return [
        Verdict(
            world.name, name, *_mean_half(regret[name]), *_mean_half(regret[name] - regret["EMA-5"]),
            float((_statistic(name, rewards, averages)[np.arange(simulations), p - 1] - world.value(p * 1.0)).mean()),
            float(np.median(p)),
        )
        for name, p in picked.items()
    ]  # fmt: skip


def _statistic(rule: str, rewards: Floats, averages: Floats) -> Floats:
    return rewards if rule == "raw arg-max" else averages


def _mean_half(values: Floats) -> tuple[float, float]:
    """Mean and half width of its 95% t interval; NaN half for a single value."""
    n = len(values)
    half = t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n) if n > 1 else np.nan
    return float(values.mean()), float(half)


def simulated_tables(simulations: int = SIMULATIONS) -> tuple[str, str]:
    """Regret by world and rule, with the cases where EMA-5 loses marked; and optimism likewise. Markdown."""
    found = {w.name: {v.rule: v for v in study(w, simulations)} for w in WORLDS}
    regret = [[world, *(_cell(v) for v in by.values())] for world, by in found.items()]
    optimism = [[world, *(f"{100 * v.optimism:+.1f}" for v in by.values())] for world, by in found.items()]
    return markdown_table(["truth", *RULES], regret), markdown_table(["truth", *RULES], optimism)


def _cell(v: Verdict) -> str:
    text = _points(v.regret, v.half)
    return f"**{text}**" if v.over_ema + v.over_ema_half < 0 else text


def _points(mean: float, half: float) -> str:
    return f"{100 * mean:.2f}" + (f" +- {100 * half:.2f}" if np.isfinite(half) else "")


def judge_run(run: Path) -> dict[str, float] | None:
    """Held-out regret of every rule on one finished run; None where too little was evaluated.

    The rules that need a standard error take it from the recorded rollouts, and are left out without them.
    """
    config = load_config(run)
    rows = read_metrics(run)
    heldout = {int(r["step"]): float(r["heldout/greedy"]) for r in rows if r.get("heldout/greedy") is not None}
    span, interval, cap = config.select.span, config.export.interval, config.selection_cap
    table = select(curve(rows), exported_steps(run), heldout, span=span, interval=interval, cap=cap).candidates
    kept = [c for c in table if c.heldout is not None]
    if len(kept) < 2:
        return None
    try:
        se = resample_run(run, config).ema_se
    except UsageError:
        se = {}
    errors = np.array([se.get(c.step, np.nan) for c in kept])
    raw, averages = np.array([c.reward for c in kept]), np.array([c.ema for c in kept])
    seen = Observed(curve(rows), span, tuple(c.step for c in kept), raw, averages, errors)
    rules = {k: r for k, r in RULES.items() if np.isfinite(errors).all() or r not in (ema_bound, ema_latest)}
    best = max(heldout[c.step] for c in kept)
    return {name: best - heldout[rule(seen)] for name, rule in rules.items()}


def real_table(sweeps: Iterable[Path]) -> str:
    """Held-out regret of every rule over the finished runs of each sweep, as Markdown.

    Raises:
        UsageError: a folder is no sweep.
    """
    lines = []
    for folder in sweeps:
        runs = [folder / r["folder"] for r in files.read_json(folder / "plan.json")["runs"]]
        judged = [found for run in runs if (run / "done.json").is_file() and (found := judge_run(run)) is not None]
        cells = []
        for rule in RULES:
            values = np.array([j[rule] for j in judged if rule in j])
            cells.append(_points(*_mean_half(values)) if len(values) else "-")
        lines.append([f"{folder.name} ({len(judged)} runs)", *cells])
    return markdown_table(["sweep", *RULES], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; with --write, put them into a page between their marks."""
    parser = argparse.ArgumentParser(prog="python -m ablate.selection_study", description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", nargs="*", type=Path, metavar="SWEEP", help="folders of finished sweeps to judge too")
    parser.add_argument("--simulations", type=int, default=SIMULATIONS, help="runs per world (default %(default)s)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page")
    given = parser.parse_args(arguments)
    try:
        tables = dict(zip(("regret", "optimism"), simulated_tables(given.simulations), strict=True))
        if given.sweeps:
            tables["real"] = real_table(given.sweeps)
        for name, text in tables.items():
            print(f"{name}, in points of 100\n{text}\n")
            rewrite(given.write, name, text) if given.write else None
    except UsageError as mistake:
        print(f"ablate: {mistake}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
