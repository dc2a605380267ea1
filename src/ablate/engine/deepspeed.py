"""DeepSpeed ZeRO-3 behind a small surface: the only file that knows how DeepSpeed scales, shards and saves.

The caller sums: `backward` takes this rank's share of one plain sum over all tokens of the update, and the gradient is
that of the sum, for every number of ranks and every split into micro-batches. DeepSpeed averages over ranks; that is
undone here, once, and checked at start-up.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported under DeepSpeed's patched tensor constructors it breaks
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.ops import __compatible_ops__ as compatible_ops
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_grad, set_z3_leaf_modules
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from ablate.config import Engine as EngineConfig
from ablate.config import Optim as OptimConfig
from ablate.engine.model import Inputs, Policy

_SYNC_GROUP_ELEMENTS = 1 << 27
_DESCRIPTION = "engine.json"


class CheckpointMismatch(Exception):
    """A checkpoint that this engine cannot continue from; the message says what differs."""


class ScalingError(Exception):
    """DeepSpeed scales gradients otherwise than this adapter undoes."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer update. `grad_norm` is global and unclipped; NaN where the gradient was not finite (`skipped`)."""

    grad_norm: float
    skipped: bool
    lr: float


class Engine:
    """A policy trained by ZeRO-3 and AdamW. Every method that touches weights must be called on all ranks."""

    def __init__(self, policy: Policy, optim: OptimConfig, engine: EngineConfig) -> None:
        """Use `Engine.start`, which sets the process group up first."""
        self._optim = optim
        self._precision = engine.precision
        adamw = torch.optim.AdamW(
            policy.parameters(),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
        _mark_leaves(policy)
        config = _config(engine, optim.grad_clip)
        self._deepspeed, *_ = deepspeed.initialize(model=policy, optimizer=adamw, config=config)
        self._deepspeed.checkpoint_engine = _DurableCheckpointEngine()
        # DeepSpeed would drop its conversion scripts beside every checkpoint; exports make them needless
        self._deepspeed._copy_recovery_script = lambda save_path: None
        self._policy = policy

    @classmethod
    def start(cls, build: Callable[[], Policy], optim: OptimConfig, engine: EngineConfig) -> Engine:
        """Join the process group, build the policy sharded, and check the gradient scale.

        `build` is called once, with transformers loading straight into shards. Ranks come from RANK, WORLD_SIZE,
        LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without them this process is the only rank.

        Raises:
            ScalingError: DeepSpeed's averaging is not what this adapter undoes.
        """
        init_distributed()
        assert_scaling(engine)
        return cls(_build_sharded(build, engine), optim, engine)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return torch.distributed.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return torch.distributed.get_world_size()

    @property
    def device(self) -> torch.device:
        """Where batches must lie."""
        return torch.device(self._deepspeed.device)

    @property
    def updates(self) -> int:
        """Updates tried so far, skipped ones included; kept by checkpoints."""
        return int(self._deepspeed.global_steps)

    def forward(self, batch: Inputs, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B,T], fp32, with gradient; follow with `backward`."""
        logprobs, entropy = self._deepspeed(*batch.to(self.device), temperature)
        return logprobs, entropy

    def score(self, batch: Inputs, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B,T], fp32, without gradient."""
        with torch.no_grad():
            return self.forward(batch, temperature)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of `loss`, this rank's and micro-batch's share of the update's sum.

        `last` marks the update's last micro-batch: all ranks must pass the same number of micro-batches, empty ones
        with weights 0. A loss that is not finite makes the whole update's gradient NaN, so that `step` skips it
        everywhere.
        """
        self._deepspeed.set_gradient_accumulation_boundary(last)
        poison = torch.where(loss.isfinite(), 1.0, math.nan)
        # DeepSpeed divides by the number of ranks; the plain sum is wanted
        self._deepspeed.backward(loss * poison * self.world_size)

    def step(self) -> StepResult:
        """Clip and update; an update whose global gradient is not finite is skipped on all ranks alike.

        The learning rate rises linearly over the first `warmup_updates` updates and is constant after.
        """
        warmup = self._optim.warmup_updates
        lr = self._optim.lr * (min(1.0, (self.updates + 1) / warmup) if warmup else 1.0)
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = lr
        self._deepspeed.step()
        skipped = not self._deepspeed.was_step_applied()
        norm = math.nan if skipped else float(self._deepspeed.get_global_grad_norm())
        return StepResult(grad_norm=norm, skipped=skipped, lr=lr)

    def named_full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter under its Hugging Face name, whole and in fp32, on every rank.

        The tensors are copies, gathered a group at a time and outside any gather when they are yielded: a consumer may
        keep them, and one that raises leaves no parameter gathered. Tied parameters come once.
        """
        for group in _groups(self._policy.lm.named_parameters()):
            yield from _gathered_copies(group)

    def save(self, folder: Path) -> None:
        """Write weights, moments and counters into `folder`, durably, on all ranks; the caller renames it into place.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            (folder / _DESCRIPTION).write_text(json.dumps(self._describe()))
        self._deepspeed.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, to the bit.

        Raises:
            CheckpointMismatch: another model, precision or number of ranks, or an incomplete folder.
        """
        difference = _difference(folder, self._describe())
        if difference is not None:
            raise CheckpointMismatch(f"{folder}: {difference}")
        try:
            found, _ = self._deepspeed.load_checkpoint(str(folder.parent), tag=folder.name)
        except (OSError, EOFError, RuntimeError, KeyError, ValueError, AssertionError, pickle.UnpicklingError) as error:
            raise CheckpointMismatch(f"{folder}: not a whole checkpoint ({type(error).__name__}: {error})") from error
        if found is None:
            raise CheckpointMismatch(f"{folder}: not a whole checkpoint (the model's file is missing)")

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, by rank."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(gathered, value)
        return gathered

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` holds on at least one rank."""
        return any(self.all_gather(flag))

    def barrier(self) -> None:
        """Wait for all ranks."""
        torch.distributed.barrier()

    def _describe(self) -> dict[str, Any]:
        shapes = {name: list(_full_shape(p)) for name, p in self._policy.lm.named_parameters()}
        return {"world_size": self.world_size, "precision": self._precision, "parameters": shapes}


class Reference:
    """A frozen policy, sharded like the trained one, for log-probabilities of the base."""

    def __init__(self, build: Callable[[], Policy], engine: EngineConfig) -> None:
        """Build it after the Engine has started."""
        policy = _build_sharded(build, engine).requires_grad_(False)
        _mark_leaves(policy)
        self._deepspeed, *_ = deepspeed.initialize(model=policy, config=_config(engine, 0.0))

    def score(self, batch: Inputs, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B,T], fp32, without gradient; on all ranks together."""
        with torch.no_grad():
            logprobs, entropy = self._deepspeed(*batch.to(torch.device(self._deepspeed.device)), temperature)
        return logprobs, entropy


def init_distributed() -> None:
    """Join the process group of the environment once per process; without one, be the only rank of an own group."""
    # its first use compiles a shared-memory operator for a minute; gloo is enough
    compatible_ops["deepspeed_shm_comm"] = False
    deepspeed.utils.logging.logger.setLevel(logging.WARNING)
    deepspeed.utils.logging.logger.addFilter(_expected)
    if torch.distributed.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        os.environ.update(RANK="0", WORLD_SIZE="1")
        os.environ.setdefault("LOCAL_RANK", "0")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))
        if backend == "gloo":
            # a store in memory: side-by-side runs cannot race for a port, and no host name has to resolve
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


def assert_scaling(engine: EngineConfig) -> None:
    """Check on a probe of one weight vector that the gradient is the plain sum over ranks and micro-batches.

    Raises:
        ScalingError: it is not; nothing has been trained yet.
    """
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    probe = nn.Linear(4, 1, bias=False)
    wrapped, *_ = deepspeed.initialize(
        model=probe, optimizer=torch.optim.SGD(probe.parameters(), lr=0.0), config=_config(engine, 0.0)
    )
    x = torch.arange(1.0, 5.0, device=wrapped.device, dtype=probe.weight.dtype)
    for last, share in ((False, 0.25), (True, 0.75)):
        wrapped.set_gradient_accumulation_boundary(last)
        wrapped.backward(wrapped(x)[0] * share * (rank + 1) * world_size)
    found = safe_get_full_grad(probe.weight).flatten().float()
    expected = x.float() * (world_size * (world_size + 1) / 2)
    wrapped.destroy()
    if not torch.allclose(found, expected, rtol=1e-2 if engine.precision == "bf16" else 1e-5):
        raise ScalingError(
            f"DeepSpeed {deepspeed.__version__} gives a gradient of {(found / expected).tolist()} times the plain sum "
            f"on {world_size} ranks: the adapter in {__name__} does not fit this version"
        )


def _config(engine: EngineConfig, grad_clip: float) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # micro-batches are counted by the caller, who marks the last one
        "gradient_clipping": grad_clip,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": engine.precision == "bf16"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": engine.persistence_threshold,
            # DeepSpeed's own linear layer keeps no gathered weight alive for the backward pass; one rank holds it
            # anyway and is faster, in the sampler too, without that process-wide replacement
            "memory_efficient_linear": torch.distributed.get_world_size() > 1,
        },
        "steps_per_print": None,
    }


def _build_sharded(build: Callable[[], Policy], engine: EngineConfig) -> Policy:
    sharded_loading = HfDeepSpeedConfig(_config(engine, 0.0))  # transformers holds a weak reference only
    try:
        return build()
    finally:
        del sharded_loading


def _mark_leaves(policy: Policy) -> None:
    """Gather decoder layers whole: Python hooks on each of their modules cost more than a tiny model computes."""
    set_z3_leaf_modules(policy, [type(policy.lm.model.layers[0])])


class _DurableCheckpointEngine(TorchCheckpointEngine):
    """Saves through a file object and syncs it: a full disk is then an OSError with its number, a rename is safe."""

    def save(self, state_dict: Any, path: str) -> None:
        with open(path, "wb") as stream:
            torch.save(state_dict, stream)
            stream.flush()
            os.fsync(stream.fileno())


def _groups(named: Iterator[tuple[str, nn.Parameter]]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    group: list[tuple[str, nn.Parameter]] = []
    elements = 0
    for name, parameter in named:
        group.append((name, parameter))
        elements += math.prod(_full_shape(parameter))
        if elements >= _SYNC_GROUP_ELEMENTS:
            yield group
            group, elements = [], 0
    if group:
        yield group


def _gathered_copies(group: list[tuple[str, nn.Parameter]]) -> list[tuple[str, Tensor]]:
    # gathering a parameter that is whole already would shard it again on leaving
    sharded = [p for _, p in group if getattr(p, "ds_status", None) is not ZeroParamStatus.AVAILABLE]
    with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
        return [(name, p.detach().to(torch.float32, copy=True)) for name, p in group]


def _full_shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def _difference(folder: Path, own: dict[str, Any]) -> str | None:
    try:
        saved = json.loads((folder / _DESCRIPTION).read_text())
    except (OSError, ValueError) as error:
        return f"not a whole checkpoint ({error})"
    if saved["parameters"] != own["parameters"]:
        theirs, ours = saved["parameters"], own["parameters"]
        name = next(n for n in sorted(theirs.keys() | ours.keys()) if theirs.get(n) != ours.get(n))
        return f"another model: {name} has shape {theirs.get(name)} there and {ours.get(name)} here"
    if saved["world_size"] != own["world_size"]:
        return f"saved by {saved['world_size']} ranks, this run has {own['world_size']}: resume with as many"
    if saved["precision"] != own["precision"]:
        return f"saved with engine.precision={saved['precision']}, this run has {own['precision']}"
    return None


def _expected(record: logging.LogRecord) -> bool:
    return "untested optimizer" not in record.getMessage()  # torch's AdamW, passed in on purpose


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
