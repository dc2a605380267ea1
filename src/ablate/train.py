"""One run, top to bottom. SPMD: every rank executes this file; rank 0 writes.

    draw -> score -> advantages -> updates -> sync weights to the sampler -> record -> evaluate, export, checkpoint

How it differs from textbook GRPO:
1. Every draw is a function of (seed, stream, rollout step, prompt id, sample), so arms share their noise until they
   diverge, ranks and batch layout do not matter, and a resume needs no generator state.
2. Denominators are counted over the whole mini-batch on all ranks, before it is split.
3. The sampler keeps its own copy of the weights, so its log-probabilities differ from the trainer's; the difference is
   recorded at every step and corrected if the tis level says so.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ablate import checkpoint, files, record
from ablate.base import prepare_base
from ablate.batch import StepBatch, make_batch
from ablate.config import Config
from ablate.engine.deepspeed import CheckpointMismatch, Engine, Reference
from ablate.engine.model import Policy, load_policy
from ablate.errors import EXIT_DONE, EXIT_REFUSED, EXIT_WORK_LEFT, UsageError
from ablate.objective import metrics
from ablate.objective.loss import bind_advantage
from ablate.resume import refuse_untrainable
from ablate.rollout.native import NativeSampler
from ablate.rollout.types import Request, Rollout, Sampling
from ablate.runs import load_config
from ablate.task.base import Prompt, Task, epoch_of, make_task, train_prompts
from ablate.update import Updater

_TRAIN_STREAM, _EVAL_STREAM = 0, 1
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(folder: Path) -> int:
    """The process of one rank; returns the run's exit code: 0 done, 1 failed, 4 work left."""
    rank = int(os.environ["RANK"])
    if rank != 0:
        return _attempt(folder, 0)
    try:
        with files.locked(folder / "lock", f"run {folder}"):
            return _attempt(folder, record.start_attempt(folder, os.environ.get("SLURM_JOB_ID")))
    except UsageError as held:
        print(f"ablate: {held}", file=sys.stderr, flush=True)
        return EXIT_REFUSED


def _attempt(folder: Path, number: int) -> int:
    """Train; whatever ends it is written down by rank 0 (whose `number` is not 0)."""
    outcome, error, code = "failed", None, EXIT_REFUSED
    try:
        with _stop_flag() as stop:
            outcome = train(load_config(folder), folder, number, stop)
        code = EXIT_DONE if outcome == "done" else EXIT_WORK_LEFT
    except UsageError as mistake:
        error = str(mistake)
        print(f"ablate: {error}", file=sys.stderr, flush=True)
    except Exception as fault:
        traceback.print_exc()
        error = f"{type(fault).__name__}: {fault}".splitlines()[0][:300]
    if number:
        rows = record.read_metrics(folder)
        record.end_attempt(folder, number, outcome, int(rows[-1]["step"]) if rows else 0, error)
    return code


@contextmanager
def _stop_flag() -> Iterator[list[int]]:
    """Signals that ask for a stop at the next rollout step's end, as a list that is empty until one arrives."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda n, _: received.append(n))
    yield received


@dataclass
class _Run:
    """Everything one rank holds while it trains; made once by `_set_up`."""

    config: Config
    folder: Path
    attempt: int
    task: Task
    base: Path
    engine: Engine
    sampler: NativeSampler
    updater: Updater
    step: int = 0
    pending: list[record.Row] = field(default_factory=list)

    @cached_property
    def advantage(self) -> Callable[..., Tensor]:
        return bind_advantage(self.config.advantage.model_dump())

    @property
    def writes(self) -> bool:
        return self.engine.rank == 0


def train(config: Config, folder: Path, attempt: int, stop: Sequence[int]) -> str:
    """Train from the newest whole checkpoint to `train.max_steps`; returns `done` or `stopped`.

    Raises:
        UsageError: the configuration cannot be trained here, or the checkpoint does not fit it.
    """
    refuse_untrainable(config)
    run = _set_up(config, folder, attempt)
    if run.step == 0:
        evaluated = _evaluate(run, 0)
        if run.writes:
            record.append_row(folder, attempt, {**dict.fromkeys(_row_keys(run)), "step": 0, **evaluated})
    while run.step < config.train.max_steps:
        run.step += 1
        _rollout_step(run)
        if run.engine.any_rank(bool(stop)) and run.step < config.train.max_steps:
            _checkpoint(run)
            return "stopped"
    if run.writes:
        files.write_json(folder / "done.json", {"outcome": "done", "last_step": run.step, "time": files.now()})
    return "done"


def _set_up(config: Config, folder: Path, attempt: int) -> _Run:
    task = make_task(config.task)
    base = prepare_base(config.model, config.task, Path(config.output))

    def build() -> Policy:
        return load_policy(base, task.vocab_size, "sdpa")

    engine = Engine.start(build, config.optim, config.engine)
    reference = Reference(build, config.engine) if config.kl.name != "none" else None  # type: ignore[attr-defined]
    sampler = NativeSampler(base, task, config.rollout.precision, device=str(engine.device))
    updater = Updater(engine, reference, config, task.pad_id)
    run = _Run(config, folder, attempt, task, base, engine, sampler, updater)
    saved = checkpoint.newest(folder)
    if saved is not None:
        where, state = saved
        try:
            engine.load(where)
        except CheckpointMismatch as mismatch:
            raise UsageError(f"{mismatch}; to start this run anew: rm -r '{folder}'") from None
        run.step = int(state["step"])
        updater.restore(state)
    sampler.load(engine.named_full_tensors(), version=run.step)
    return run


def _rollout_step(run: _Run) -> None:
    """One generate-and-score round with its updates, recorded as one row."""
    c, step = run.config, run.step
    clock = _Clock()
    prompts = train_prompts(run.task, c.seed, step, c.train.prompts_per_step)
    requests = [
        Request(p, k, (c.seed, _TRAIN_STREAM, step, p.id, k)) for p in prompts for k in range(c.train.group_size)
    ]
    batch = make_batch(_score(run.task, _draw(run, requests, _sampling(c)), prompts))
    clock.lap("generate")
    shared, penalty = run.updater.begin(batch)
    advantages = run.advantage(batch.rewards - penalty, batch.prompts, batch.included)
    mismatch, updates = run.updater.train(batch, advantages, shared)
    clock.lap("train")
    run.sampler.load(run.engine.named_full_tensors(), version=step)
    clock.lap("sync")
    row = {**_about_step(run, prompts), **_rollout_metrics(batch, advantages), **mismatch, "updates": updates}
    row |= _evaluate(run, step) if step % c.eval.interval == 0 or step == c.train.max_steps else _NOT_EVALUATED
    clock.lap("evaluate")
    run.pending += _rollout_rows(step, batch, advantages.tolist(), prompts) if run.writes else []
    row["weights_hash"] = _export(run) if step % c.export.interval == 0 else None
    clock.lap("export")
    if run.writes:
        record.append_row(run.folder, run.attempt, {**row, **clock.laps})
    if step % c.checkpoint.interval == 0 or step == c.train.max_steps:
        _checkpoint(run)


def _sampling(c: Config) -> Sampling:
    r = c.rollout
    return Sampling(r.temperature, r.top_p, r.top_k, r.min_p, r.max_response_len)


def _draw(run: _Run, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
    """Every rank samples its share of the sequences; all get all of them, in the order of `requests`."""
    rank, world_size = run.engine.rank, run.engine.world_size
    shares = run.engine.all_gather(run.sampler.generate(requests[rank::world_size], sampling))
    drawn: list[Rollout] = [None] * len(requests)  # type: ignore[list-item]
    for r, share in enumerate(shares):
        drawn[r::world_size] = share
    return drawn


def _score(task: Task, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> list[Rollout]:
    """Rewards by the task's verifier; what is not a finite number is an infrastructure failure: excluded, and said."""
    by_id = {p.id: p for p in prompts}
    rewards = [task.verify(by_id[r.prompt_id], r.text) for r in rollouts]
    usable = [x if x is not None and math.isfinite(x) else None for x in rewards]
    failed = sorted({r.prompt_id for r, x in zip(rollouts, usable, strict=True) if x is None})
    if failed:
        print(f"no finite reward for responses to prompts {failed[:8]}: excluded", file=sys.stderr, flush=True)
    return [replace(r, reward=x) for r, x in zip(rollouts, usable, strict=True)]


_NOT_EVALUATED: dict[str, Any] = {"heldout/greedy": None, "heldout/prompts": None}
_PHASES = ("generate", "train", "sync", "evaluate", "export")
_ROW_END = (*_NOT_EVALUATED, "weights_hash", *(f"time/{phase}" for phase in _PHASES))


def _evaluate(run: _Run, step: int) -> dict[str, Any]:
    """Greedy pass@1 on the first held-out prompts, with the weights after rollout step `step`."""
    c = run.config
    prompts = [run.task.heldout_prompt(i) for i in range(c.eval.prompts)]
    requests = [Request(p, 0, (0, _EVAL_STREAM, 0, p.id, 0)) for p in prompts]
    sampling = Sampling(0.0, 1.0, 0, 0.0, c.rollout.max_response_len)
    scored = _score(run.task, _draw(run, requests, sampling), prompts)
    rewards = [r.reward for r in scored if r.reward is not None]
    return {"heldout/greedy": sum(rewards) / max(len(rewards), 1), "heldout/prompts": len(rewards)}


def _export(run: _Run) -> str | None:
    return checkpoint.export(run.engine, run.folder, run.step, run.base, _DTYPES[run.config.engine.precision])


def _checkpoint(run: _Run) -> None:
    """Rollouts first, then the checkpoint: a resume redoes the steps whose rollouts it would otherwise miss."""
    if run.writes and run.pending:
        record.write_rollouts(run.folder, run.pending[0]["step"], run.step, run.pending)
        run.pending = []
    checkpoint.save(run.engine, run.folder, run.step, run.updater.state(), run.config.checkpoint.keep)


def _rollout_metrics(batch: StepBatch, advantages: Tensor) -> dict[str, float]:
    """What the rollouts of a step were like, before its updates."""
    rollouts = batch.rollouts
    lengths = torch.tensor([len(r.response_ids) for r in rollouts])
    cut = torch.tensor([r.finish_reason == "length" for r in rollouts])
    return {
        **metrics.reward_metrics(batch.rewards, batch.prompts, batch.included),
        **metrics.advantage_metrics(advantages),
        **metrics.length_metrics(lengths, cut),
        **metrics.duplicate_metrics([r.prompt_id for r in rollouts], [r.response_ids for r in rollouts]),
    }


def _row_keys(run: _Run) -> list[str]:
    """The keys of a rollout step's row, for the row of step 0, which has no rollouts: those of an invented one."""
    rollout = Rollout(0, 0, (0,), (0,), (0.0,), "stop", 0, "", 0.0)
    batch = make_batch([rollout])
    mismatch = metrics.mismatch_metrics(batch.rollout_logprobs, batch.rollout_logprobs, batch.drawn)
    return [*_about_step(run, []), *_rollout_metrics(batch, batch.rewards), *mismatch, "updates", *_ROW_END]


def _about_step(run: _Run, prompts: Sequence[Prompt]) -> dict[str, Any]:
    c = run.config
    return {
        "step": run.step,
        "global_step": run.updater.global_step,
        "epoch": epoch_of(run.task, max(run.step, 1), c.train.prompts_per_step),
        "policy_version": run.step - 1,
        "memory/host_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "memory/device_peak_mib": torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None,
        "prompts_hash": record.hash_ids(p.id for p in prompts),
    }


def _rollout_rows(
    step: int, batch: StepBatch, advantages: Sequence[float], prompts: Sequence[Prompt]
) -> list[record.Row]:
    texts = {p.id: p.text for p in prompts}
    return [
        {
            "step": step, "prompt_id": r.prompt_id, "sample": r.sample, "prompt_ids": list(r.prompt_ids),
            "response_ids": list(r.response_ids), "logprobs": list(r.logprobs),
            "prompt": texts[r.prompt_id], "response": r.text,
            "reward": r.reward, "advantage": a, "finish_reason": r.finish_reason, "policy_version": r.policy_version,
        }
        for r, a in zip(batch.rollouts, advantages, strict=True)
    ]  # fmt: skip


class _Clock:
    """Seconds of each phase of a step, under `time/<phase>`."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.laps[f"time/{phase}"] = now - self._last
        self._last = now


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
