"""Which checkpoint do we report? The EMA-5 rule of the published series, as a table one can check. Imports no torch.

The EMA runs over all observed rollout steps in order, across restarts, one value per step:
EMA_1 = r_1, EMA_n = a * r_n + (1 - a) * EMA_(n-1) with a = 2 / (span + 1): pandas' ewm(span=5, adjust=False).
Candidates are the exported steps from twice the export interval on, up to the cap; the largest EMA wins, ties go to the
earliest. r_n was sampled before update n while export n holds the weights after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ablate.config import Config
from ablate.record import Row, read_metrics


@dataclass(frozen=True)
class Candidate:
    """An exported step. Example: Candidate(step=30, reward=0.61, ema=0.58, heldout=0.70)"""

    step: int
    reward: float
    ema: float
    heldout: float | None


@dataclass(frozen=True)
class Selection:
    """The choice and the table behind it; `reported` is None while there is no candidate."""

    span: int
    interval: int
    cap: int
    candidates: tuple[Candidate, ...]
    reported: Candidate | None


def ema(rewards: Sequence[float], span: int) -> list[float]:
    """Exponential moving average with pandas' `ewm(span=span, adjust=False)` weights."""
    alpha = 2.0 / (span + 1.0)
    out: list[float] = []
    for reward in rewards:
        out.append(reward if not out else alpha * reward + (1.0 - alpha) * out[-1])
    return out


def curve(rows: Iterable[Row]) -> dict[int, float]:
    """Mean reward of each rollout step that has one; step 0 and steps without any scored rollout have none."""
    return {int(r["step"]): float(r["reward/mean"]) for r in rows if r.get("reward/mean") is not None}


def select(
    rewards: Mapping[int, float],
    exported: Iterable[int],
    heldout: Mapping[int, float],
    *,
    span: int,
    interval: int,
    cap: int,
) -> Selection:
    """Pick the reported step from `rewards` by rollout step and the steps with exported weights."""
    steps = sorted(rewards)
    averages = dict(zip(steps, ema([rewards[s] for s in steps], span), strict=True))
    eligible = [s for s in sorted(set(exported)) if 2 * interval <= s <= cap and s in averages]
    table = tuple(Candidate(s, rewards[s], averages[s], heldout.get(s)) for s in eligible)
    best = max(table, key=lambda c: (c.ema, -c.step), default=None)
    return Selection(span, interval, cap, table, best)


def exported_steps(run: Path) -> list[int]:
    """Steps whose weights lie whole under export/ (a folder gets its final name last)."""
    return sorted(int(p.name.removeprefix("step_")) for p in run.glob("export/step_*") if p.name[5:].isdigit())


def select_run(run: Path, config: Config) -> Selection:
    """The selection of one run folder, from its whole record; a restart cannot forget the best value."""
    rows = read_metrics(run)
    heldout = {int(r["step"]): float(r["heldout/greedy"]) for r in rows if r.get("heldout/greedy") is not None}
    return select(
        curve(rows), exported_steps(run), heldout,
        span=config.select.span, interval=config.export.interval, cap=config.selection_cap,
    )  # fmt: skip
