"""The records that pass between the trainer and a rollout backend. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ablate.task.base import Prompt

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Request:
    """One response to draw.

    `key` names this response's own noise: (run seed, stream, rollout step, prompt id, sample). Equal keys give equal
    draws whatever the batch, its order, or the rank.

    Example: `Request(prompt=Prompt(17, (4, 5, 6, 13), "123=", "321"), sample=3, key=(0, 1, 12, 17, 3))`.
    """

    prompt: Prompt
    sample: int
    key: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn, with vLLM's names and order: temperature, then min_p, top_k and top_p.

    `temperature` 0 is greedy and the log-probabilities are those of temperature 1. `top_k` 0, `top_p` 1 and `min_p` 0
    keep the whole support. `max_response_len` counts tokens, the end token included.

    Example: `Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_response_len=6)`.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_response_len: int

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or not 0 <= self.min_p < 1:
            raise ValueError(f"out of range: {self}")
        if self.max_response_len < 1:
            raise ValueError(f"max_response_len must be at least 1, got {self.max_response_len}")

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be drawn, so that reported log-probabilities are renormalised."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One drawn response, as recorded.

    `logprobs[t]` is the sampler's log-probability of `response_ids[t]` under the distribution it was drawn from.
    `response_ids` keeps the end token. `policy_version` is the rollout step whose last update made the weights.
    `text` is the response without its end token; `reward` is None until scored and where scoring failed.

    Example: `Rollout(prompt_id=17, sample=3, prompt_ids=(4, 5, 6, 13), response_ids=(6, 5, 4, 1),
    logprobs=(-0.1, -0.2, -0.1, -0.01), finish_reason="stop", policy_version=11, text="321", reward=1.0)`.
    """

    prompt_id: int
    sample: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    text: str
    reward: float | None = None
