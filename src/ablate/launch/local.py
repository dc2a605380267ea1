"""Runs a plan on this machine: one process group per run, as many at once as fit the cores. Imports no torch.

Imports are paid once: a fork server loads torch and DeepSpeed, every run is forked from it. The server starts no thread
and touches no process group before the fork, which is what makes forking safe.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from ablate import files, record
from ablate.code import code_version
from ablate.errors import EXIT_ALL_FAILED, EXIT_DONE, EXIT_SOME_FAILED, EXIT_WORK_LEFT
from ablate.launch.progress import Progress
from ablate.launch.worker import free_port, log_path, run_rank
from ablate.mirror import end_mirrors, start_mirror
from ablate.plan import Plan, Run
from ablate.report.tables import print_sweep
from ablate.resume import refuse_misfit
from ablate.runs import freeze, plan_folder, state, write_plan
from ablate.validity import check_plan

_GRACE_SECONDS = 10.0


@dataclass
class _Group:
    """The live processes of one run."""

    run: Run
    folder: Path
    attempt: int
    processes: list[Any] = field(default_factory=list)
    broken_since: float | None = None

    def ended(self) -> bool:
        return all(p.exitcode is not None for p in self.processes)


class PlanOnLocalCores:
    """Launches every run that is not done, waits for all, prints the table of arms."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Nothing is needed from Hydra: the plan carries everything."""

    def launch(self, job_overrides: Any, initial_job_idx: int) -> Any:
        raise AssertionError("plans are launched whole, by launch_plan")

    def launch_plan(self, plan: Plan) -> int:
        folder = plan_folder(plan)
        with files.locked(folder / "lock", f"sweep {plan.name}"):
            todo = [r for r in plan.runs if _is_to_do(r, folder / r.folder)]
            for run in todo:
                refuse_misfit(folder / run.folder, run.config)
            write_plan(plan, [asdict(f) for f in check_plan(plan)])
            for run in todo:
                freeze(run, folder / run.folder)
                files.write_json(folder / run.folder / "code.json", code_version())
            stopped = self._run_all(plan, folder, todo) if todo else False
        print_sweep(plan, folder)
        return _exit_code(plan, folder, stopped)

    def _run_all(self, plan: Plan, folder: Path, todo: list[Run]) -> bool:
        """True if a signal stopped it before every run had ended."""
        context = _fork_server(plan)
        slots = _slots(plan)
        waiting, live = list(todo), list[_Group]()
        mirrors: dict[Path, subprocess.Popen[bytes]] = {}
        progress = Progress(plan, folder, todo, plan.config.launch.progress_seconds)
        with _stop_on_signals() as stop, progress:
            while waiting or live:
                while waiting and len(live) < slots and not stop:
                    live.append(_start(context, waiting.pop(0), folder))
                    mirror = start_mirror(live[-1].folder, plan.config.wandb.mode, live[-1].attempt)
                    if mirror is not None:
                        mirrors[live[-1].folder] = mirror
                wait([p.sentinel for g in live for p in g.processes if p.exitcode is None], timeout=0.25)
                for group in [g for g in live if g.ended()]:
                    live.remove(group)
                    _close(group)
                _end_broken(live)
                if stop:
                    waiting.clear()
                    _terminate(live)
                progress.update()
            for line in end_mirrors(mirrors):
                print(f"ablate: {line}", file=sys.stderr)
        return bool(stop)


def _is_to_do(run: Run, folder: Path) -> bool:
    word = state(folder, run.config.train.max_steps).word
    if word == "running":
        holder = files.holder_of(folder / "lock") or {}
        where = f"process {holder.get('pid')} on {holder.get('host')}"
        print(f"{run.folder}: being trained by {where}; left alone", file=sys.stderr)
    return word not in ("done", "running")


def _slots(plan: Plan) -> int:
    cluster = plan.config.cluster
    return max(1, len(os.sched_getaffinity(0)) // (cluster.ranks_per_node * cluster.cores_per_rank))


def _fork_server(plan: Plan) -> Any:
    # read when torch is first imported, which happens in the server
    os.environ["OMP_NUM_THREADS"] = str(plan.config.cluster.cores_per_rank)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("forkserver")
    # every fork runs the main module again: with its imports done, that costs nothing
    context.set_forkserver_preload(
        ["hydra", "ablate.compose", "ablate.helptext", "ablate.launch.errors", "ablate.train"]
    )
    return context


def _start(context: Any, run: Run, folder: Path) -> _Group:
    group = _Group(run, folder / run.folder, record.next_attempt(folder / run.folder))
    ranks, port = run.config.cluster.ranks_per_node, free_port()
    for rank in range(ranks):
        arguments = (
            str(group.folder),
            rank,
            ranks,
            port,
            str(log_path(group.folder, group.attempt, rank)),
            os.getpid(),
        )
        process = context.Process(target=run_rank, args=arguments, name=f"{run.folder} rank {rank}")
        process.start()
        group.processes.append(process)
    return group


def _close(group: _Group) -> None:
    """A process that died without writing how it ended gets its end written for it."""
    codes = [p.exitcode for p in group.processes if p.exitcode]
    written = {int(a["attempt"]): a for a in record.attempts(group.folder)}
    if not codes or "outcome" in written.get(group.attempt, {}):
        return
    how = f"killed by {signal.Signals(-codes[0]).name}" if codes[0] < 0 else f"ended with exit code {codes[0]}"
    rows = record.read_metrics(group.folder)
    record.end_attempt(
        group.folder, group.attempt, "failed", int(rows[-1]["step"]) if rows else 0, f"the process {how}"
    )


def _end_broken(live: list[_Group]) -> None:
    """One rank of a group has failed: the others wait for it in a collective and get a moment to say so, no more."""
    for group in live:
        if any(p.exitcode for p in group.processes):
            group.broken_since = group.broken_since or time.monotonic()
            if time.monotonic() - group.broken_since > _GRACE_SECONDS:
                _terminate([group], signal.SIGKILL)


def _terminate(live: list[_Group], number: int = signal.SIGTERM) -> None:
    for process in [p for g in live for p in g.processes if p.exitcode is None]:
        os.kill(process.pid, number)


@contextmanager
def _stop_on_signals() -> Iterator[list[int]]:
    """A list that holds the signals received so far; a second Ctrl-C acts at once."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        if received:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        received.append(number)

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(plan: Plan, folder: Path, stopped: bool) -> int:
    words = [state(folder / r.folder, r.config.train.max_steps).word for r in plan.runs]
    failed = words.count("failed")
    if failed == len(words):
        return EXIT_ALL_FAILED
    if stopped or any(w in ("new", "stopped", "running") for w in words):
        return EXIT_WORK_LEFT
    return EXIT_SOME_FAILED if failed else EXIT_DONE
