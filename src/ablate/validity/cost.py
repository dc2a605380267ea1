"""What a plan will take: time, memory and storage. Imports no torch.

A pilot (`launch.pilot=3`) measures the rate; without one it is a planner's, from model size and tokens, and says so.
Good to a factor of two or three: it decides between an afternoon and a month, not between two queues.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ablate.config import Config
from ablate.errors import UsageError
from ablate.plan import Plan
from ablate.validity.curves import by_arm, mean, values
from ablate.validity.records import RunRecord, load_records
from ablate.validity.scale import mean_length, parameter_count

# Planner's rates. GPU: bf16 peak of one GH200, a third of it in training, a twentieth in sampling, which waits for
# memory. CPU: one core on small tensors, with a fixed cost per forward.
_GPU_FLOPS, _TRAINED_SHARE, _SAMPLED_SHARE = 990e12, 0.35, 0.05
_CPU_FLOPS, _CPU_FIXED, _CPU_START = 1e10, 0.02, 8.0
_GPU_START = 600.0

# id, log-prob and text of a token in a compressed rollouts file, measured on the default
_BYTES_PER_TOKEN = 12
_BYTES_PER_ROLLOUT = 10
_BYTES_PER_UPDATE_ROW = 1000
_PHASES = ("time/generate", "time/train", "time/sync", "time/evaluate", "time/export")


@dataclass(frozen=True)
class Cost:
    """What a plan takes. Bytes are of storage; `memory` is per rank, without activations and KV cache if not measured.

    Example: Cost("planner", "GPU", 12, 56, 1, 1.9, 1277.0, 1.9e10, False, 1.3e12, 2e11, 4e10): 12 runs of 1.9 hours
    on 56 GPUs.
    """

    basis: str
    device: str
    runs: int
    ranks: int
    at_once: int
    run_hours: float
    device_hours: float
    memory: float
    memory_measured: bool
    exports: float
    checkpoints: float
    rollouts: float

    @property
    def storage(self) -> float:
        return self.exports + self.checkpoints + self.rollouts

    @property
    def wall_hours(self) -> float:
        """With as many runs at once as this machine, or one allocation, holds."""
        return self.run_hours * -(-self.runs // self.at_once)

    def line(self) -> str:
        """One line for a terminal."""
        rate = {
            "pilot": "the pilot's rate",
            "planner": "a planner's rate, no time in environments; launch.pilot=3 measures it",
        }[self.basis]
        more = "" if self.memory_measured else " and activations"
        alone = "one after the other" if self.at_once == 1 else f"{self.at_once} at once"
        return (
            f"cost: {self.runs} x {_time(self.run_hours)} on {self.ranks} {self.device}{'s' if self.ranks > 1 else ''} "
            f"= {_figure(self.device_hours)} {self.device} hours, {_time(self.wall_hours)} {alone}; "
            f"{_bytes(self.memory)} per rank{more}; storage {_bytes(self.storage)} (exports {_bytes(self.exports)}, "
            f"checkpoints {_bytes(self.checkpoints)}, rollouts {_bytes(self.rollouts)}); {rate}"
        )


def estimate(plan: Plan, pilot: Path | None = None) -> Cost:
    """The cost of a plan, from the records under `pilot` where there are any that have stepped."""
    measured = _measured(pilot)
    # an arm that the pilot has not is taken for a mean one
    every = [run for some in measured.values() for run in some]
    runs = [(run.config, measured.get(run.arm, every)) for run in plan.runs]
    hours = [(_pilot_seconds(c, seen) if seen else planned_seconds(c)) / 3600 for c, seen in runs]
    c = plan.config
    ranks = c.cluster.nodes * c.cluster.ranks_per_node
    device = "GPU" if on_gpu(c) else "core"
    known = [m for seen in measured.values() if (m := _pilot_memory(seen)) is not None]
    return Cost(
        "pilot" if measured else "planner",
        device,
        len(plan.runs),
        ranks,
        _at_once(c),
        sum(hours) / len(hours),
        sum(hours) * ranks * (c.cluster.cores_per_rank if device == "core" else 1),
        max(known) if known else max(planned_memory(r.config) for r in plan.arms.values()),
        bool(known),
        sum(export_bytes(c) for c, _ in runs),
        sum(checkpoint_bytes(c) for c, _ in runs),
        sum(rollout_bytes(c, _pilot_length(seen)) for c, seen in runs),
    )


def on_gpu(c: Config) -> bool:
    """Whether a run is meant for accelerators: by its sampler, its nodes or the size of its model."""
    return c.rollout.backend != "native" or c.cluster.nodes > 1 or parameter_count(c) > 200_000_000


def planned_seconds(c: Config) -> float:
    """Seconds of one run at the planner's rate."""
    size, ranks = parameter_count(c), c.cluster.nodes * c.cluster.ranks_per_node
    sequences = c.train.prompts_per_step * c.train.group_size
    tokens = sequences * mean_length(c)
    # forward and backward of every pass, one forward for old log-probs, one for a reference
    reads = 6 * c.train.passes + 2 * (c.train.mini_batches > 1) + 2 * (c.kl.name != "none")  # type: ignore[attr-defined]
    held_out = c.eval.prompts * mean_length(c) / c.eval.interval
    if on_gpu(c):
        trained = reads * size * tokens / (ranks * _TRAINED_SHARE * _GPU_FLOPS)
        sampled = 2 * size * (tokens + held_out) / (ranks * _SAMPLED_SHARE * _GPU_FLOPS)
        return c.train.max_steps * (trained + sampled) + _GPU_START
    forwards = c.updates_per_step + c.rollout.max_response_len / 4
    work = size * (reads * tokens + 2 * (tokens + held_out)) / (ranks * _CPU_FLOPS)
    return c.train.max_steps * (work + _CPU_FIXED * forwards) + _CPU_START


def planned_memory(c: Config) -> float:
    """Bytes per rank of weights, gradients and moments (sharded) and the sampler's own copy (whole)."""
    size, ranks = parameter_count(c), c.cluster.nodes * c.cluster.ranks_per_node
    width = 2 if c.engine.precision == "bf16" else 4
    # fp32 master weights and two moments, and the gradient and working copy in the engine's precision
    states = size * (12 + 2 * width if width == 2 else 16) / ranks
    reference = size * width / ranks if c.kl.name != "none" else 0  # type: ignore[attr-defined]
    base = 0 if on_gpu(c) else 600 * 2**20  # the libraries themselves, in host memory
    return states + reference + size * (2 if c.rollout.precision == "bf16" else 4) + base


def export_bytes(c: Config) -> float:
    """All exported weights of a run: candidates are never pruned."""
    width = 2 if c.engine.precision == "bf16" else 4
    return float(c.train.max_steps // c.export.interval * parameter_count(c) * width)


def checkpoint_bytes(c: Config) -> float:
    """The checkpoints of a run that lie there at once: one more than are kept, while the next is written."""
    width = 14 if c.engine.precision == "bf16" else 12
    kept = min(c.checkpoint.keep + 1, -(-c.train.max_steps // c.checkpoint.interval))
    return float(kept * parameter_count(c) * width)


def rollout_bytes(c: Config, length: float | None = None) -> float:
    """Rollouts, and the metrics beside them."""
    sequences = c.train.prompts_per_step * c.train.group_size
    step = sequences * ((length or mean_length(c)) * _BYTES_PER_TOKEN + _BYTES_PER_ROLLOUT)
    return c.train.max_steps * (step + _BYTES_PER_UPDATE_ROW * (1 + c.updates_per_step))


def _at_once(c: Config) -> int:
    """Runs that this machine's cores hold at once; elsewhere the queue decides, so one."""
    if c.cluster.nodes > 1 or on_gpu(c):
        return 1
    return max(1, len(os.sched_getaffinity(0)) // (c.cluster.ranks_per_node * c.cluster.cores_per_rank))


def _measured(pilot: Path | None) -> dict[str, list[RunRecord]]:
    """The pilot's runs that have stepped, by arm."""
    if pilot is None or not (pilot / "plan.json").is_file():
        return {}
    try:
        return by_arm(run for run in load_records(pilot) if _seconds([run]) is not None)
    except UsageError:
        return {}


def _seconds(runs: Iterable[RunRecord]) -> float | None:
    """Mean seconds of a rollout step, the first left out where there are others: it compiles and allocates."""
    found: list[float] = []
    for run in runs:
        rows = [r for r in run.rows if int(r["step"]) > 0]
        sums = [sum(float(r.get(p) or 0.0) for p in _PHASES) for r in rows]
        found += sums[1:] or sums
    return mean(x for x in found if x > 0)


def _pilot_seconds(c: Config, seen: Sequence[RunRecord]) -> float:
    start = _GPU_START if on_gpu(c) else _CPU_START
    return c.train.max_steps * (_seconds(seen) or 0.0) + start


def _pilot_memory(seen: Sequence[RunRecord]) -> float | None:
    """The larger peak of the device's memory, or the host's where no device was used."""
    for key in ("memory/device_peak_mib", "memory/host_peak_mib"):
        found = [v for run in seen for v in values(run, key)]
        if found:
            return max(found) * 2**20
    return None


def _pilot_length(seen: Sequence[RunRecord]) -> float | None:
    return mean(v for run in seen for v in values(run, "length/mean"))


def _time(hours: float) -> str:
    if hours < 1 / 30:
        return f"{hours * 3600:.0f} s"
    return f"{hours * 60:.0f} min" if hours < 2 else f"{_figure(hours)} h"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e3:.3g} kB"


def pilot_folder(plan: Plan) -> Path | None:
    """Where `launch.pilot` left its records for this plan, if it did."""
    folder = Path(plan.config.output) / plan.name / "pilot"
    return folder if (folder / "plan.json").is_file() else None
