"""How large a gradient will be, from the configuration alone. Imports no torch.

The loss is a sum of c * logprob over tokens, so its gradient is about |c| (the norm over all tokens of an update) times
the gradient of one token's log-probability. Estimates, good to a factor of a few: rewards 0 or 1, success rates of
prompts spread evenly, token gradients that do not add up coherently.
"""

from __future__ import annotations

import math

from ablate.config import Config

TOKEN_GRADIENT = 100.0
"""Norm over all weights of the gradient of one token's log-probability. About 80 for the tiny default (measured), about
90 for the published 8B runs (implied by their gradient norm of 3.6e-5 and their normaliser)."""


def mean_length(c: Config) -> float:
    """Expected tokens of a response: known for the task that is shipped, else half of the limit."""
    if c.task.name == "reverse":
        return ((c.task.min_digits or 2) + (c.task.max_digits or 5)) / 2 + 1
    return c.rollout.max_response_len / 2


def advantage_rms(c: Config) -> float | None:
    """Root mean square of advantages over all rollouts; None for an estimator that is not known here."""
    n = c.train.group_size
    name = c.advantage.name  # type: ignore[attr-defined]
    if n < 2:
        return None
    squares = [_square(name, n, k / n) for k in range(n + 1)]
    known = [s for s in squares if s is not None]
    return math.sqrt(sum(known) / (n + 1)) if len(known) == n + 1 else None


def _square(name: str, n: int, q: float) -> float | None:
    """Mean squared advantage in a group of n of which the share q succeeded."""
    if q in (0.0, 1.0):
        return 0.0
    return {
        "grpo": (n - 1) / n,
        "grpo_no_std": q * (1 - q),
        "rloo": q * (1 - q) * (n / (n - 1)) ** 2,
        "rloo_n": q * (1 - q) * (n / (n - 1)) ** 2,
        "maxrl": (1 - q) / q,
    }.get(name)


def coefficient_norm(c: Config, length: float) -> float | None:
    """|d loss / d logprobs| of one update with responses of `length` tokens; None if a mechanism is not known here."""
    rms = advantage_rms(c)
    rows = c.train.prompts_per_step * c.train.group_size / c.train.mini_batches
    tokens = rows * length
    effective = (c.train.group_size - 1) / (c.train.group_size + 1)
    mean = 1 / math.sqrt(tokens)
    weights = {
        "token_mean": mean,
        "sequence_mean": mean,
        "prompt_mean": mean,
        "seq_mean_token_sum_norm": math.sqrt(tokens) / (rows * c.max_response_len),
        "seq_mean_token_sum_norm_global": math.sqrt(tokens) / (max(effective, 1e-9) * rows * c.max_response_len),
    }
    weight = weights.get(c.reduction.name)  # type: ignore[attr-defined]
    return None if rms is None or weight is None else rms * weight * c.objective.loss_scale


def parameter_gradient(c: Config, norm: float) -> float:
    """Root mean square of the gradient of one parameter, for |c| = `norm`."""
    return TOKEN_GRADIENT * norm / math.sqrt(parameter_count(c))


def parameter_count(c: Config) -> int:
    """Weights of the model: as stated, or counted from the shapes of the tiny one; 8e9 where nothing is known."""
    m = c.model
    if m.parameters is not None:
        return m.parameters
    if m.kind == "pretrained" or not all((m.hidden_size, m.intermediate_size, m.layers, m.heads, m.head_dim)):
        return 8_000_000_000
    hidden, inner, head = m.hidden_size or 0, m.intermediate_size or 0, m.head_dim or 0
    queries, keys = (m.heads or 0) * head, (m.kv_heads or m.heads or 0) * head
    layer = hidden * (2 * queries + 2 * keys + 3 * inner) + 2 * hidden + 2 * head
    return (m.layers or 0) * layer + hidden + 2 * 64 * hidden  # embedding and head of a character vocabulary
