"""The updates of one rollout step: passes x mini-batches, each one optimizer step over all ranks.

Legend: B sequences of the rollout step, M of one mini-batch (all ranks), b of one forward, T response positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ablate.batch import StepBatch, micro_batches, mini_batches
from ablate.config import Config
from ablate.engine.deepspeed import Engine, Reference, StepResult
from ablate.engine.model import Inputs, collate
from ablate.errors import UsageError
from ablate.objective import metrics
from ablate.objective.loss import (
    Tokens,
    Weights,
    bind_objective,
    bind_reduction,
    per_token,
    reduce,
    reward_penalty,
    weigh,
)

# rows of the batch, and their log-probabilities and entropies [b,T] without gradient
_Part = tuple[list[int], tuple[Tensor, Tensor]]


@dataclass
class StepLogprobs:
    """Log-probabilities [B,T] that all updates of a rollout step share; NaN where not (yet) known.

    `start`: the trainer's weights at the step's beginning. `reference`: the frozen base, None without a KL term.
    """

    start: Float[Tensor, "B T"]
    reference: Float[Tensor, "B T"] | None


class Updater:
    """Holds the bound objective and the counters; `begin` and `train` are one rollout step's training."""

    def __init__(self, engine: Engine, reference: Reference | None, config: Config, pad_id: int) -> None:
        self._engine, self._reference, self._config, self._pad_id = engine, reference, config, pad_id
        self._objective = bind_objective(
            clip=config.clip.model_dump(),
            tis=config.tis.model_dump(),
            kl=config.kl.model_dump(),
            entropy_coef=config.objective.entropy_coef,
        )
        self._reduction = bind_reduction(config.reduction.model_dump())
        self.global_step = 0
        self._skipped_in_a_row = 0

    def state(self) -> dict[str, int]:
        """What a resume needs beyond weights and moments."""
        return {"global_step": self.global_step, "skipped_in_a_row": self._skipped_in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        self.global_step = int(state["global_step"])
        self._skipped_in_a_row = int(state["skipped_in_a_row"])

    def begin(self, batch: StepBatch) -> tuple[StepLogprobs, Float[Tensor, " B"]]:
        """What is known before the first update, and what a KL in the reward subtracts from each reward."""
        in_reward = self._objective.kl_place == "reward" and self._objective.kl_coef > 0
        # the first update's own forward gives the log-probabilities at the start, unless something needs them earlier
        early = self._config.train.mini_batches > 1 or self._objective.renormalize or in_reward
        start = self._score(batch, self._engine) if early else torch.full_like(batch.rollout_logprobs, torch.nan)
        reference = self._score(batch, self._reference) if self._reference is not None else None
        shared = StepLogprobs(start, reference)
        if not in_reward or reference is None:
            return shared, torch.zeros(len(batch.rollouts))
        return shared, reward_penalty(self._objective, start, reference, batch.loss_mask)

    def train(
        self, batch: StepBatch, advantages: Float[Tensor, " B"], shared: StepLogprobs
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """All updates of one rollout step: the mismatch of trainer and sampler at its start, and one row per update."""
        train = self._config.train
        rows = [
            self._update(batch, advantages, index, shared)
            for _ in range(train.passes)
            for index in mini_batches(batch, train.mini_batches)
        ]
        return metrics.mismatch_metrics(shared.start, batch.rollout_logprobs, batch.drawn), rows

    def _score(self, batch: StepBatch, policy: Engine | Reference) -> Float[Tensor, "B T"]:
        """Log-probabilities of all sequences under frozen weights, on every rank."""
        out = torch.full_like(batch.rollout_logprobs, torch.nan)
        for rows, (logprobs, _) in self._collect(self._score_parts(batch, range(len(batch.rollouts)), policy)):
            out[rows] = logprobs
        return out

    def _score_parts(
        self, batch: StepBatch, index: Sequence[int], policy: Engine | Reference | None = None
    ) -> list[_Part]:
        """This rank's share of a forward without gradient."""
        scored = []
        for rows in self._split(index):
            logprobs, entropy = (policy or self._engine).score(
                self._inputs(batch, rows), self._config.rollout.temperature
            )
            scored.append((rows, (logprobs.cpu(), entropy.cpu())))
        return scored

    def _split(self, rows: Sequence[int]) -> list[list[int]]:
        engine = self._engine
        return micro_batches(rows, self._config.engine.micro_batch_size, engine.rank, engine.world_size)

    def _inputs(self, batch: StepBatch, rows: Sequence[int]) -> Inputs:
        return collate([batch.rollouts[i] for i in rows], self._pad_id, batch.drawn.shape[1])

    def _collect(self, parts: Sequence[_Part]) -> list[_Part]:
        """The parts of all ranks, empty ones left out."""
        return [part for share in self._engine.all_gather(list(parts)) for part in share if part[0]]

    def _update(
        self, batch: StepBatch, advantages: Float[Tensor, " B"], index: list[int], shared: StepLogprobs
    ) -> dict[str, Any]:
        """One optimizer step over the sequences `index`; fills `shared.start` where this is their first forward."""
        weights = self._weights(batch, advantages, index, shared)
        # momentum would move the weights even so; every rank sees the same weights and decides alike
        idle = not bool(weights.policy.any() or weights.penalty.any())
        parts = self._score_parts(batch, index) if idle else self._backward(batch, advantages, index, shared, weights)
        result = None if idle else self._engine.step()
        self._count(result)
        return {
            "global_step": self.global_step,
            **self._metrics(batch, advantages, index, shared, parts, weights),
            "optim/grad_norm": result.grad_norm if result else 0.0,
            "optim/lr": result.lr if result else 0.0,
            "optim/skipped": result.skipped if result else False,
            "optim/idle": idle,
        }

    def _backward(
        self,
        batch: StepBatch,
        advantages: Float[Tensor, " B"],
        index: list[int],
        shared: StepLogprobs,
        weights: Weights,
    ) -> list[_Part]:
        """Forward and backward of this rank's micro-batches: the gradient of the mini-batch's plain sum."""
        place = {row: k for k, row in enumerate(index)}
        parts: list[_Part] = []
        split = self._split(index)
        for k, rows in enumerate(split):
            logprobs, entropy = self._engine.forward(self._inputs(batch, rows), self._config.rollout.temperature)
            logprobs, entropy = logprobs.cpu(), entropy.cpu()
            if rows:
                _fill(shared.start, rows, logprobs)
                terms = per_token(self._objective, self._tokens(batch, advantages, rows, shared, logprobs, entropy))
                here = weights.rows(torch.tensor([place[i] for i in rows]))
                loss = reduce(terms, here) * self._config.objective.loss_scale
            else:
                loss = 0.0 * logprobs.sum()
            self._engine.backward(loss, last=k == len(split) - 1)
            parts.append((rows, (logprobs.detach(), entropy.detach())))
        return parts

    def _weights(
        self, batch: StepBatch, advantages: Float[Tensor, " B"], index: list[int], shared: StepLogprobs
    ) -> Weights:
        rows = torch.tensor(index)
        mask, prompts = batch.loss_mask[rows], batch.prompts[rows]
        old = self._old(batch, shared)[rows]
        numbers = self._micro_batch_numbers(index)
        limit = self._config.max_response_len
        log_ratio = old - batch.rollout_logprobs[rows]
        return weigh(self._objective, self._reduction, mask, prompts, advantages[rows], log_ratio, limit, numbers)

    def _micro_batch_numbers(self, index: list[int]) -> Tensor:
        """Which forward, over all ranks, each sequence of the mini-batch is in."""
        size, world_size = self._config.engine.micro_batch_size, self._engine.world_size
        numbers = torch.zeros(len(index), dtype=torch.long)
        place = {row: k for k, row in enumerate(index)}
        for rank in range(world_size):
            for k, rows in enumerate(micro_batches(index, size, rank, world_size)):
                numbers[[place[i] for i in rows]] = k * world_size + rank
        return numbers

    def _old(self, batch: StepBatch, shared: StepLogprobs) -> Float[Tensor, "B T"]:
        return shared.start if self._config.objective.old_logprobs == "trainer" else batch.rollout_logprobs

    def _tokens(
        self,
        batch: StepBatch,
        advantages: Tensor,
        rows: Sequence[int],
        shared: StepLogprobs,
        logprobs: Tensor,
        entropy: Tensor,
    ) -> Tokens:
        at = torch.tensor(rows)
        mask = batch.loss_mask[at]
        return Tokens(
            logprobs=logprobs,
            old_logprobs=self._old(batch, shared)[at],
            rollout_logprobs=batch.rollout_logprobs[at],
            advantages=advantages[at, None].expand_as(mask),
            loss_mask=mask,
            ref_logprobs=None if shared.reference is None else shared.reference[at],
            entropy=entropy,
        )

    def _count(self, result: StepResult | None) -> None:
        self.global_step += 1
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result and result.skipped else 0
        most = self._config.train.max_skipped_in_a_row
        if self._skipped_in_a_row >= most:
            raise UsageError(
                f"{most} updates in a row had a non-finite loss or gradient (update {self.global_step}); the last "
                f"checkpoint is kept: lower optim.lr or look at the rollouts before it"
            )

    def _metrics(
        self,
        batch: StepBatch,
        advantages: Float[Tensor, " B"],
        index: list[int],
        shared: StepLogprobs,
        parts: list[_Part],
        weights: Weights,
    ) -> dict[str, float]:
        """Metrics of the whole mini-batch, from all ranks' tokens: the same numbers for every split."""
        logprobs = torch.full_like(batch.rollout_logprobs, torch.nan)
        entropy = torch.full_like(logprobs, torch.nan)
        for rows, (part_logprobs, part_entropy) in self._collect(parts):
            logprobs[rows], entropy[rows] = part_logprobs, part_entropy
            _fill(shared.start, rows, part_logprobs)
        at = torch.tensor(index)
        tokens = self._tokens(batch, advantages, index, shared, logprobs[at], entropy[at])
        terms, mask = per_token(self._objective, tokens), tokens.loss_mask
        loss = reduce(terms, weights) * self._config.objective.loss_scale
        return {
            "loss/total": float(loss),
            **metrics.ratio_metrics(tokens.logprobs - tokens.old_logprobs, mask),
            **metrics.clip_metrics(terms.surrogate, mask),
            **metrics.tis_metrics(terms.tis_weight, mask),
            **metrics.reduction_metrics(weights.policy, mask, advantages[at]),
            **metrics.term_metrics(terms.kl, tokens.entropy, mask),
        }


def _fill(start: Float[Tensor, "B T"], rows: Sequence[int], logprobs: Float[Tensor, "b T"]) -> None:
    """Remember the first log-probabilities of each row: those of the weights that the rollout step began with."""
    if start[rows[0]].isnan().all():
        start[rows] = logprobs.detach()
