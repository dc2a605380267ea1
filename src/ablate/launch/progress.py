"""What a local sweep shows while it runs: a live table in a terminal, plain lines otherwise. Imports no torch.

It reads the runs' own records, so it shows what is on disk and needs no channel to the processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ablate.plan import Plan, Run
from ablate.record import read_metrics
from ablate.runs import state
from ablate.select import curve, ema


@dataclass(frozen=True)
class Line:
    """One run as shown. `rate` is rollout steps per second since this launch began on it, None until two are seen."""

    arm: str
    seed: int
    step: int
    max_steps: int
    ema: float | None
    rate: float | None
    eta: float | None
    word: str


class Progress:
    """Context manager around a launch; call `update` often, it limits itself."""

    def __init__(self, plan: Plan, folder: Path, runs: Sequence[Run], seconds: float) -> None:
        self._plan, self._folder, self._runs = plan, folder, runs
        self._seconds = seconds
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._begun: dict[str, tuple[int, float]] = {}
        self._shown = 0.0
        self._words: dict[str, str] = {}

    def __enter__(self) -> Progress:
        where = f"{self._plan.name}: {len(self._runs)} of {len(self._plan.runs)} runs to do, in {self._folder}"
        self._console.print(where, highlight=False, soft_wrap=True)
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.update(force=True)
        if self._live:
            self._live.stop()

    def update(self, force: bool = False) -> None:
        """Redraw if it is time: every second in a terminal, every `seconds` otherwise."""
        now = time.monotonic()
        if not force and now - self._shown < (1.0 if self._live else self._seconds):
            return
        self._shown = now
        lines = [self._line(run, now) for run in self._runs]
        if self._live:
            self._live.update(_table(self._plan.name, lines), refresh=True)
        else:
            self._print_changed(lines)

    def _line(self, run: Run, now: float) -> Line:
        folder = self._folder / run.folder
        current = state(folder, run.config.train.max_steps)
        rewards = curve(read_metrics(folder))
        average = ema([rewards[s] for s in sorted(rewards)], run.config.select.span)
        first = self._begun.setdefault(run.folder, (current.step, now)) if current.word == "running" else None
        rate = None
        if first and current.step > first[0]:
            rate = (current.step - first[0]) / max(now - first[1], 1e-9)
        eta = (current.max_steps - current.step) / rate if rate else None
        return Line(
            run.arm,
            run.seed,
            current.step,
            current.max_steps,
            average[-1] if average else None,
            rate,
            eta,
            current.word,
        )

    def _print_changed(self, lines: list[Line]) -> None:
        for line in lines:
            key = f"{line.arm}/{line.seed}"
            if line.word == "running" or self._words.get(key) != line.word:
                self._words[key] = line.word
                if line.word != "new":
                    print(_plain(line), file=sys.stderr, flush=True)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _plain(line: Line) -> str:
    return (
        f"{line.arm} seed={line.seed} step {line.step}/{line.max_steps} reward EMA {_number(line.ema, '.3f')} "
        f"{_number(line.rate, '.2f')} steps/s ETA {_duration(line.eta)} {line.word}"
    )


def _table(title: str, lines: list[Line]) -> Table:
    table = Table(title=title)
    for name in ("arm", "seed", "step", "reward EMA", "steps/s", "ETA", "state"):
        table.add_column(name, justify="left" if name in ("arm", "state") else "right")
    for line in lines:
        step = f"{line.step}/{line.max_steps}"
        table.add_row(
            line.arm,
            str(line.seed),
            step,
            _number(line.ema, ".3f"),
            _number(line.rate, ".2f"),
            _duration(line.eta),
            line.word,
        )
    return table
