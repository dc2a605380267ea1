"""The tables that the terminal shows: runs of a plan, arms of a sweep, findings. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from ablate.config import Config
from ablate.levels import FACTORS
from ablate.plan import Plan, Run
from ablate.record import read_metrics
from ablate.runs import State, state
from ablate.select import Selection, select_run
from ablate.validity import Finding, check_plan


def console() -> Console:
    """Standard output; wide where it is no terminal, so that a pipe or a log gets whole names."""
    wide = Console(soft_wrap=True, highlight=False)
    return wide if wide.is_terminal else Console(soft_wrap=True, highlight=False, width=180)


def finding_lines(findings: Iterable[Finding]) -> list[str]:
    """One line per finding; the same finding in several places is one line."""
    grouped: dict[tuple[str, str, str, bool], list[str]] = {}
    for f in findings:
        grouped.setdefault((f.severity, f.id, f.message, f.allowed), []).append(f.where)
    return [
        f"{severity} {id_}{' (allowed)' if allowed else ''}: {message} [{_some(where)}]"
        for (severity, id_, message, allowed), where in grouped.items()
    ]


def _some(where: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(where) - limit} more" if len(where) > limit else ""
    return "; ".join(where[:limit]) + more


@dataclass(frozen=True)
class ArmRow:
    """One arm, averaged over its finished seeds. `reported` lists the reported step of each seed."""

    arm: str
    levels: dict[str, Any]
    seeds: str
    reported: str
    ema: float | None
    heldout_start: float | None
    heldout_reported: float | None
    checks: str


def arm_rows(plan: Plan, folder: Path) -> list[ArmRow]:
    """The table of arms, in the plan's order."""
    findings = [f for f in check_plan(plan) if f.severity != "note"]
    return [_arm_row(plan, folder, arm, findings) for arm in plan.arms]


def _arm_row(plan: Plan, folder: Path, arm: str, findings: Sequence[Finding]) -> ArmRow:
    runs = [r for r in plan.runs if r.arm == arm]
    states = [state(folder / r.folder, r.config.train.max_steps) for r in runs]
    done = [r for r, s in zip(runs, states, strict=True) if s.word == "done"]
    chosen = [select_run(folder / r.folder, r.config).reported for r in done]
    fired = dict.fromkeys(f.id for f in findings if f.concerns(arm))
    return ArmRow(
        arm,
        runs[0].levels,
        f"{len(done)}/{len(runs)}" if len(done) < len(runs) else str(len(runs)),
        ",".join(str(c.step) if c else "none" for c in chosen) or "-",
        _mean(c.ema for c in chosen if c),
        _mean(h for r in done if (h := heldout_at(folder / r.folder, 0)) is not None),
        _mean(c.heldout for c in chosen if c and c.heldout is not None),
        ",".join(fired) or "none",
    )


def heldout_at(run: Path, step: int) -> float | None:
    """Greedy held-out score of one evaluated step."""
    for row in read_metrics(run):
        if row["step"] == step and row.get("heldout/greedy") is not None:
            return float(row["heldout/greedy"])
    return None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def print_sweep(plan: Plan, folder: Path) -> None:
    """The end of a sweep: arms, failures, where everything lies, what to type next."""
    out = console()
    table = Table(title=f"{plan.name}: {plan.question or 'arms'}")
    keys = sorted(plan.factors)
    columns = [*keys, "seeds", "reported step", "EMA reward", "held-out at step 0", "held-out at reported", "checks"]
    for column in columns:
        table.add_column(column, justify="left" if column in (*keys, "checks") else "right")
    for row in arm_rows(plan, folder):
        levels = [str(row.levels[k]) for k in keys]
        numbers = [_three(row.ema), _three(row.heldout_start), _three(row.heldout_reported)]
        table.add_row(*levels, row.seeds, row.reported, *numbers, row.checks)
    out.print(table)
    if plan.config.launch.pilot:
        out.print(pilot_table(plan, folder))
    _print_unfinished(out, plan, folder)
    out.print(f"records: {folder}  (one folder per arm and seed: metrics.jsonl, rollouts/, export/, logs/)")
    for line in finding_lines(f for f in check_plan(plan) if f.severity != "note"):
        out.print(line, markup=False)
    out.print(f"next: {next_command(plan, folder)}", markup=False)


def pilot_table(plan: Plan, folder: Path) -> Table:
    """What a pilot is for: rate, memory and spread of every arm."""
    table = Table(title="pilot: for planning, not for answers")
    for column in ("arm", "s/step", "peak MiB (host)", "peak MiB (device)", "mean reward", "sd over steps"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for run in plan.runs:
        rows = [r for r in read_metrics(folder / run.folder) if r["step"]]
        seconds = [sum(v for k, v in r.items() if k.startswith("time/") and v) for r in rows]
        rewards = [r["reward/mean"] for r in rows if r.get("reward/mean") is not None]
        memory = [max((r[f"memory/{k}_peak_mib"] or 0 for r in rows), default=0) for k in ("host", "device")]
        table.add_row(
            run.arm,
            _three(fmean(seconds) if seconds else None),
            *(f"{m:.0f}" if m else "-" for m in memory),
            _three(fmean(rewards) if rewards else None),
            _three(stdev(rewards) if len(rewards) > 1 else None),
        )
    return table


def _three(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _print_unfinished(out: Console, plan: Plan, folder: Path) -> None:
    for run in plan.runs:
        current: State = state(folder / run.folder, run.config.train.max_steps)
        if current.word == "failed":
            error = f": {current.error}" if current.error else ""
            out.print(f"failed {run.folder} at step {current.step}{error}; log: {current.log}", markup=False)
        elif current.word != "done":
            out.print(f"{current.word} {run.folder} at step {current.step}/{current.max_steps}", markup=False)


def next_command(plan: Plan, folder: Path) -> str:
    """What a person would want to do next."""
    kept = [o for o in plan.overrides if not o.startswith("launch.pilot=")]
    command = " ".join(["python -m ablate.run", *kept])
    words = {state(folder / r.folder, r.config.train.max_steps).word for r in plan.runs}
    if len(kept) < len(plan.overrides) and words == {"done"}:
        return f"{command}   (the runs themselves)"
    if words != {"done"}:
        return f"{command}   (goes on: skips what is done, continues or retries the rest)"
    if len(plan.seeds) == 1:
        others = [o for o in plan.overrides if not o.startswith("seed=")]
        return " ".join(["python -m ablate.run", *others, "seed=0,1,2"]) + "   (effects get intervals)"
    return f"ablate select {folder}   (the table behind each reported step)"


def plan_table(plan: Plan, limit: int = 60) -> Table:
    """The runs of a plan and what differs between them."""
    size = f"{_count(len(plan.arms), 'arm')} x {_count(len(plan.seeds), 'seed')} = {_count(len(plan.runs), 'run')}"
    title = f"{plan.name}: {size}"
    table = Table(title=title)
    arms = list(plan.arms.items())
    keys = sorted(plan.factors)
    # a list of arms has too many keys for columns: say what sets each apart from the first
    listed = len(keys) > 6
    for column in ("arm", *((f"differs from {arms[0][0]} in",) if listed else keys), "seeds", "digest"):
        table.add_column(column)
    for arm, run in arms[:limit]:
        cells = [_difference(arms[0][1], run, keys)] if listed else [_cell(run, k) for k in keys]
        table.add_row(arm, *cells, ",".join(map(str, plan.seeds)), run.config.digest(("seed",))[:8])
    if len(arms) > limit:
        table.add_row(f"... and {len(arms) - limit} more", *[""] * (len(table.columns) - 1))
    return table


def _difference(first: Run, run: Run, keys: Sequence[str]) -> str:
    return "  ".join(f"{k}={run.levels[k]}" for k in keys if run.levels[k] != first.levels[k]) or "-"


def differences(base: Config, other: Config, without: Iterable[str]) -> list[str]:
    """`key=value` of every key in which two configurations differ, leaving out keys inside `without`."""
    ours, theirs = _flat(base.tree()), _flat(other.tree())
    skipped = (*without, "sweep", "output", "validity", "launch")
    keys = [k for k in {**ours, **theirs} if not any(k == s or k.startswith(s + ".") for s in skipped)]
    return [f"{k}={theirs.get(k)}" for k in keys if ours.get(k) != theirs.get(k)]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _cell(run: Run, key: str) -> str:
    """A level's name with the numbers behind it."""
    level = str(run.levels[key])
    if key not in FACTORS:
        return level
    detail = {
        k: v
        for k, v in getattr(run.config, key).model_dump().items()
        if k not in ("name", "renormalize", "scope", "place")
    }
    numbers = " ".join(f"{k}={v}" for k, v in detail.items() if v is not None)
    return f"{level} ({numbers})" if numbers else level


def selection_table(title: str, selection: Selection) -> Table:
    """The candidates of one run, the reported one marked."""
    table = Table(title=title)
    for column in ("step", "reward", f"EMA-{selection.span}", "held-out", ""):
        table.add_column(column, justify="right")
    for c in selection.candidates:
        mark = "reported" if selection.reported is c else ""
        table.add_row(str(c.step), f"{c.reward:.4f}", f"{c.ema:.4f}", _three(c.heldout), mark)
    return table
