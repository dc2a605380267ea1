"""The typed configuration of one run, its checks and its identity. Imports no torch: a login node plans in a second.

Sections are pydantic models that refuse unknown keys, so a mistyped name is an error and never a silent default.
A factor section (`clip`, `reduction`, `tis`, `advantage`, `kl`) is one LEVEL: the name of a pure function of
`ablate.objective` and that function's keyword arguments; `ablate.levels` builds its schema from the function itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from ablate.errors import UsageError, nearest
from ablate.levels import FACTORS, level_schema
from ablate.objective.bounds import Count, Fraction, NonNegative, Positive

Probability = Annotated[float, Gt(0), Le(1)]
Index = Annotated[int, Ge(0)]


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused, numbers finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Objective(Section):
    """What the factor levels leave open.

    `max_response_len` is the length that the token-sum norms divide by; null means the rollout limit.
    `old_logprobs` anchors the ratio at the trainer's weights or at what the sampler reported.
    `loss_scale` multiplies the whole loss and stays 1 unless an executed run's faulty scaling is reproduced.
    """

    entropy_coef: NonNegative
    max_response_len: Count | None
    old_logprobs: Literal["trainer", "rollout"]
    loss_scale: Positive


class Task(Section):
    """Prompts and verifier: `train_size` prompts make one epoch, `heldout_size` others are never trained on."""

    name: str
    train_size: Count
    heldout_size: Count
    reward: Literal["binary", "share_of_tests", "potential_based", "think_budget"]
    min_digits: Count | None = None
    max_digits: Count | None = None


class Model(Section):
    """The base policy: `tiny` builds a small Qwen3 and warms it up on the task; `pretrained` loads `path`.

    The warmed base is one frozen model per digest of this section and the task: arms and seeds share it.
    """

    kind: Literal["tiny", "pretrained"]
    path: str | None = None
    parameters: Count | None = None
    hidden_size: Count | None = None
    intermediate_size: Count | None = None
    layers: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    warmup_steps: Index = 0
    warmup_batch: Count = 64
    warmup_lr: Positive = 3e-3
    warmup_seed: Index = 0


class Rollout(Section):
    """How responses are sampled. `staleness` counts rollout steps between the sampling weights and the trained ones."""

    backend: Literal["native", "vllm"]
    precision: Literal["bf16", "fp32"]
    temperature: NonNegative
    top_p: Probability
    top_k: Index
    min_p: Fraction
    max_response_len: Count
    max_turn_len: Count | None = None
    max_context_len: Count | None = None
    staleness: Index


class Engine(Section):
    """The DeepSpeed ZeRO-3 engine. `micro_batch_size` counts sequences per forward and rank; null means all at once.

    `persistence_threshold`: parameters smaller than this stay gathered (DeepSpeed's name:
    stage3_param_persistence_threshold).
    """

    precision: Literal["fp32", "bf16"]
    micro_batch_size: Count | None
    persistence_threshold: Index


class Optim(Section):
    """AdamW; `grad_clip` is the global norm above which gradients are scaled down, 0 turns it off."""

    lr: Positive
    beta1: Fraction
    beta2: Fraction
    eps: Positive
    weight_decay: NonNegative
    grad_clip: NonNegative
    warmup_updates: Index


class Train(Section):
    """A rollout step draws `prompts_per_step` x `group_size` sequences and does `passes` x `mini_batches` updates.

    `max_skipped_in_a_row` updates with a non-finite loss or gradient, one after the other, end the run.
    """

    max_steps: Count
    prompts_per_step: Count
    group_size: Count
    passes: Count
    mini_batches: Count
    max_skipped_in_a_row: Count


class Evaluation(Section):
    """Greedy pass@1 on `prompts` held-out prompts: at step 0, every `interval` rollout steps and at the end."""

    interval: Count
    prompts: Count


class Checkpoint(Section):
    """Rollout steps between checkpoints, and how many whole ones are kept."""

    interval: Count
    keep: Count


class Export(Section):
    """Rollout steps between exported weights: the candidates of the selection."""

    interval: Count


class Select(Section):
    """EMA selection: `span` as in pandas' ewm, candidates up to `cap` (null: max_steps)."""

    span: Count
    cap: Count | None


class Validity(Section):
    """Findings that may stand although they refuse a plan; each allowed id is printed wherever results are."""

    allow: tuple[str, ...]


class Sweep(Section):
    """A question and its design. `factors` cross into a grid; `arms` names single combinations; both may be given."""

    name: str | None = None
    question: str | None = None
    base: tuple[str, ...] = ()
    factors: dict[str, tuple[Any, ...]] = {}
    arms: dict[str, dict[str, Any]] = {}
    seeds: tuple[Index, ...] = ()
    smallest_effect: Positive | None = None
    analysis: str | None = None


class Launch(Section):
    """How the plan is carried out. `pilot` > 0 runs that many steps of every distinct arm under pilot/."""

    pilot: Index
    progress_seconds: Positive


class Cluster(Section):
    """Resources of one run: `nodes` x `ranks_per_node` processes, one per GPU where there are GPUs."""

    nodes: Count
    ranks_per_node: Count
    cores_per_rank: Count


class Wandb(Section):
    """Where results are also shown, beside the records: by a process of its own, never by the trainer."""

    mode: Literal["disabled", "offline", "online"]
    project: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    entity: str | None
    tags: tuple[Annotated[str, StringConstraints(min_length=1, max_length=64)], ...]


SECTIONS: dict[str, type[Section]] = {
    "objective": Objective, "task": Task, "model": Model, "rollout": Rollout, "engine": Engine, "optim": Optim,
    "train": Train, "eval": Evaluation, "checkpoint": Checkpoint, "export": Export, "select": Select,
    "validity": Validity, "sweep": Sweep, "launch": Launch, "cluster": Cluster,
    "wandb": Wandb,
}  # fmt: skip

# What does not change what is trained: resources, selection, logging and where things lie. Not part of the identity.
_NOT_IDENTITY = frozenset({"checkpoint", "select", "validity", "sweep", "launch", "cluster", "wandb"})


@dataclass(frozen=True)
class Config:
    """One resolved run. `tree` is what config.yaml holds; the sections below are its typed, checked form."""

    seed: int
    output: str
    clip: BaseModel
    reduction: BaseModel
    tis: BaseModel
    advantage: BaseModel
    kl: BaseModel
    objective: Objective
    task: Task
    model: Model
    rollout: Rollout
    engine: Engine
    optim: Optim
    train: Train
    eval: Evaluation
    checkpoint: Checkpoint
    export: Export
    select: Select
    validity: Validity
    sweep: Sweep
    launch: Launch
    cluster: Cluster
    wandb: Wandb

    @property
    def max_response_len(self) -> int:
        """What token-sum norms divide by, in tokens."""
        return self.objective.max_response_len or self.rollout.max_response_len

    @property
    def updates_per_step(self) -> int:
        return self.train.passes * self.train.mini_batches

    @property
    def selection_cap(self) -> int:
        return self.select.cap or self.train.max_steps

    def tree(self) -> dict[str, Any]:
        """The config as plain data, in the order of config.yaml."""
        plain: dict[str, Any] = {"seed": self.seed, "output": self.output}
        return plain | {name: getattr(self, name).model_dump(mode="json") for name in (*FACTORS, *SECTIONS)}

    def digest(self, without: Iterable[str] = ()) -> str:
        """Identity of what is trained: 64 bits of SHA-256 as hex, over every section but resources, paths and logging.

        `without` leaves out further sections or dotted keys (say `seed`, `clip`, `optim.lr`): the digest of an arm
        leaves out the seed, that of a sweep all that varies in it.
        """
        dropped = {*without}
        sections = [n for n in (*FACTORS, *SECTIONS) if n not in _NOT_IDENTITY | dropped]
        text = ";".join(f"{n}={_canonical(getattr(self, n), tuple(_keys_under(n, dropped)))}" for n in sections)
        return _hash(text) if "seed" in dropped else run_digest(_hash(text), self.seed)


def run_digest(arm_digest: str, seed: int) -> str:
    """The digest of an arm (`digest(without=("seed",))`) at one seed."""
    return _hash(f"{arm_digest};seed={seed}")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _keys_under(section: str, dotted: Iterable[str]) -> Iterable[str]:
    return sorted(d.split(".", 1)[1] for d in dotted if d.startswith(section + "."))


@lru_cache(maxsize=4096)
def _canonical(value: BaseModel, dropped: tuple[str, ...]) -> str:
    plain = {k: v for k, v in value.model_dump(mode="json").items() if k not in dropped}
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def parse(tree: Mapping[str, Any]) -> Config:
    """Check a resolved tree and give it types.

    Raises:
        UsageError: unknown key, wrong type or value out of range, as one line with the key, the value and what is
            valid; or sections that contradict each other.
    """
    known = ("seed", "output", *FACTORS, *SECTIONS)
    for key in tree:
        if key not in known:
            raise UsageError(f"{key}: unknown key; {nearest(str(key), known)}")
    for key in known:
        if key not in tree:
            raise UsageError(f"{key}: missing from the configuration")
    parts = {name: section(name, tree[name]) for name in (*FACTORS, *SECTIONS)}
    config = Config(seed=whole_number("seed", tree["seed"]), output=_folder(tree["output"]), **parts)
    _check_together(config)
    return config


def _folder(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"output={'' if value is None else value}: must be a folder, such as output=outputs")
    return value


def whole_number(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise UsageError(f"{key}={value}: must be a whole number from 0 to 2^63 - 1")
    return value


_parsed: dict[tuple[str, str], BaseModel] = {}


def section(name: str, tree: Any) -> Any:
    """One section of a tree as its typed model; equal trees give the same object (a plan has few distinct sections)."""
    if not isinstance(tree, Mapping):
        raise UsageError(f"{name}={tree}: must be a section of keys, not a single value")
    # repr and not JSON: 1 and True must not meet in the cache
    key = (name, repr(sorted(tree.items(), key=lambda kv: str(kv[0]))))
    if key not in _parsed:
        schema = level_schema(name, str(tree.get("name"))) if name in FACTORS else SECTIONS[name]
        try:
            _parsed[key] = schema.model_validate(dict(tree))
        except ValidationError as error:
            raise UsageError(_explain(name, schema, error)) from None
    return _parsed[key]


def _explain(name: str, schema: type[BaseModel], error: ValidationError) -> str:
    """The first fault of a section, in one line."""
    fault = error.errors()[0]
    key = ".".join([name, *map(str, fault["loc"])])
    if fault["type"] == "extra_forbidden":
        return f"{key}: unknown key; {nearest(str(fault['loc'][-1]), schema.model_fields)}"
    if fault["type"] == "missing":
        return f"{key}: missing; give it a value"
    text = fault["msg"].removeprefix("Input should be ").replace("'", "").replace("tuple", "list")
    return f"{key}={fault['input']}: must be {text}"


def _check_together(c: Config) -> None:
    """Contradictions between sections that would only show after the resources are taken."""
    t = c.train
    low, high = c.task.min_digits, c.task.max_digits
    if low is not None and high is not None and low > high:
        raise UsageError(f"task.min_digits={low}: above task.max_digits={high}")
    if c.task.name == "reverse" and c.task.reward != "binary":
        raise UsageError(f"task.reward={c.task.reward}: task=reverse is scored right or wrong; use task.reward=binary")
    if t.mini_batches > t.prompts_per_step:
        raise UsageError(
            f"train.mini_batches={t.mini_batches}: a mini-batch holds whole prompts, so at most "
            f"train.prompts_per_step={t.prompts_per_step}"
        )
    if t.prompts_per_step > c.task.train_size:
        raise UsageError(
            f"train.prompts_per_step={t.prompts_per_step}: the task has only "
            f"task.train_size={c.task.train_size} prompts"
        )
    if c.eval.prompts > c.task.heldout_size:
        raise UsageError(
            f"eval.prompts={c.eval.prompts}: the task holds out only task.heldout_size={c.task.heldout_size}"
        )
    if bad := set("/\\#?%:") & set(c.wandb.project):
        raise UsageError(f"wandb.project={c.wandb.project}: W&B refuses {min(bad)} in a project's name; choose another")
    if c.select.cap is not None and c.select.cap > t.max_steps:
        raise UsageError(f"select.cap={c.select.cap}: beyond train.max_steps={t.max_steps}")
    if c.kl.name == "none" and c.kl.kl_coef > 0:  # type: ignore[attr-defined]
        raise UsageError(
            f"kl.kl_coef={c.kl.kl_coef}: kl=none has no term to weigh; use kl=k2 or k3"  # type: ignore[attr-defined]
        )
    if c.kl.name == "k1" and c.kl.place == "loss":  # type: ignore[attr-defined]
        raise UsageError(
            "kl.name=k1 kl.place=loss: as a loss its gradient is free of the reference and zero in expectation "
            "(kl-k1-loss); use kl=k1_in_reward, k2 or k3"
        )
