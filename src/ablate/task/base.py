"""What a task is, and which prompts a rollout step sees: a function of (seed, step), so a resume needs no state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from ablate.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerFast

    from ablate.config import Task as TaskConfig

_PLAN_ONLY = ("pymethods2test", "unitsyn_python")
HELDOUT_ID_OFFSET = 1 << 40
"""Held-out prompt ids start here, so that no id, and no noise stream keyed by it, is shared with training."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question.

    Example: `Prompt(id=17, ids=(4, 5, 6, 13), text="123=", answer="321")` of the reverse task: train prompt 17.
    """

    id: int
    ids: tuple[int, ...]
    text: str
    answer: str


@runtime_checkable
class Task(Protocol):
    """A prompt source and its verifier.

    `length_cv` declares the coefficient of variation of the length of a right response, None where it is not known:
    a task of fixed length cannot tell reductions apart. `max_prompt_len` is in tokens. `vocab_size` counts the
    tokenizer's tokens: a model may have more rows, and none of those may ever be drawn.
    """

    @property
    def name(self) -> str: ...

    @property
    def train_size(self) -> int: ...

    @property
    def heldout_size(self) -> int: ...

    @property
    def length_cv(self) -> float | None: ...

    @property
    def max_prompt_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    def train_prompt(self, i: int) -> Prompt:
        """Train prompt `i` in [0, train_size)."""
        ...

    def heldout_prompt(self, i: int) -> Prompt:
        """Held-out prompt `i` in [0, heldout_size)."""
        ...

    def verify(self, prompt: Prompt, response_text: str) -> float:
        """Reward of a decoded response, without its end-of-sequence token."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a response; one final end-of-sequence token is dropped, any other special token shows."""
        ...

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The same vocabulary as a tokenizer that `save_pretrained` writes beside the weights."""
        ...


@dataclass(frozen=True)
class PlannedTask:
    """A task known to plans only: its prompts and verifier are not part of this package."""

    name: str
    train_size: int
    heldout_size: int
    length_cv: float | None = None
    max_prompt_len: int = 0

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise UsageError(f"task={self.name} can be planned but not run here; task=reverse runs anywhere")


def make_task(config: TaskConfig) -> Task:
    """The task a config section names.

    Raises:
        UsageError: unknown name, naming those that exist.
    """
    if config.name == "reverse":
        from ablate.task.reverse import Reverse

        return Reverse(
            train_size=config.train_size,
            heldout_size=config.heldout_size,
            min_digits=2 if config.min_digits is None else config.min_digits,
            max_digits=5 if config.max_digits is None else config.max_digits,
        )
    if config.name in _PLAN_ONLY:
        return PlannedTask(config.name, config.train_size, config.heldout_size)
    raise UsageError(f"task {config.name!r} is unknown; known tasks: {', '.join(('reverse', *_PLAN_ONLY))}")


def steps_per_epoch(train_size: int, n: int) -> int:
    """Rollout steps of `n` prompts that one epoch of `train_size` prompts gives; the remainder is dropped.

    Raises:
        UsageError: `n` is larger than the task.
    """
    if not 0 < n <= train_size:
        raise UsageError(f"{n} prompts per step do not fit into a task of {train_size} train prompts")
    return train_size // n


def epoch_of(task: Task, step: int, n: int) -> int:
    """Epoch, from 0, that rollout step `step`, from 1, belongs to: 5,000 prompts by 64 give 78 steps an epoch."""
    if step < 1:
        raise ValueError(f"rollout steps count from 1, got {step}")
    return (step - 1) // steps_per_epoch(task.train_size, n)


def train_prompts(task: Task, seed: int, step: int, n: int) -> list[Prompt]:
    """The `n` distinct train prompts of rollout step `step` (from 1).

    Each epoch is a fresh permutation of all train prompts, keyed by (seed, epoch); steps walk through it without
    overlap and the `train_size % n` last ones of an epoch are left out, others in each epoch.
    """
    epoch = epoch_of(task, step, n)
    start = (step - 1 - epoch * steps_per_epoch(task.train_size, n)) * n
    return [task.train_prompt(int(i)) for i in _permutation(seed, epoch, task.train_size)[start : start + n]]


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(size)
