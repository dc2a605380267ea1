"""What the timed programs of this folder share: the settings, the pipe and the clock.

Imported by workers of different environments, so it needs the standard library alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TextIO

PHASES = ("generation", "scoring", "training", "sync")


@dataclass(frozen=True)
class Settings:
    """One rollout step of the default, as every contender runs it."""

    prompts: int = 16
    samples: int = 8
    updates: int = 2
    max_response_len: int = 6
    temperature: float = 1.0
    learning_rate: float = 2e-4
    grad_clip: float = 1.0
    clip: float = 0.2
    seed: int = 0

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples


class Channel:
    """A worker's end of the pipe: JSON lines out, one command a line in (protocol: see rollout_step.py)."""

    def __init__(self) -> None:
        # Libraries print to stdout as they please: the pipe moves aside and stdout becomes stderr.
        self._out: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(self, **fields: Any) -> None:
        """Send one message."""
        self._out.write(json.dumps(fields) + "\n")

    def step_wanted(self) -> bool:
        """Wait for the next command: True for "step", False for "stop" or a closed pipe."""
        return sys.stdin.readline().strip() == "step"


class PhaseClock:
    """Self-time per phase, in seconds: a phase inside another one is taken off the outer one.

    >>> clock = PhaseClock()
    >>> clock.start()
    >>> with clock.phase("sync"), clock.phase("generation"):
    ...     pass
    >>> sorted(clock.stop())
    ['cpu', 'generation', 'overhead', 'scoring', 'sync', 'total', 'training']
    """

    def __init__(self) -> None:
        self._began = self._cpu_began = 0.0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._inner: list[float] = []  # of each open phase: the time that phases inside it took

    def start(self) -> None:
        """Begin a step at zero."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def stop(self) -> dict[str, float]:
        """End the step: seconds of every phase, `total`, `overhead` = total - all phases, and `cpu`.

        `cpu` is the process's own processor time: well below `total`, it says that the machine was not quiet.
        """
        total, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu_began
        return {"total": total, "cpu": cpu, "overhead": total - sum(self._seconds.values()), **self._seconds}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as `name`."""
        began = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self._seconds[name] += spent - self._inner.pop()
            if self._inner:
                self._inner[-1] += spent

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Count every call of `owner.method` as phase `name`."""
        original: Callable[..., Any] = getattr(owner, method)

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)
