"""The native backend: an unsharded copy of the policy and a KV-cache loop, no serving engine.

One gather fills the copy; sampling on it is several times faster than generating on the sharded engine, and ranks may
stop at different lengths because no collective runs inside the token loop.

Axes: B sequences, Q distinct prompts, P padded prompt length, K cached positions, V vocabulary rows, T new tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from ablate.errors import UsageError
from ablate.rollout.noise import uniforms
from ablate.rollout.types import FinishReason, Request, Rollout, Sampling
from ablate.task.base import Task

Precision = Literal["bf16", "fp32"]


class NativeSampler:
    """Draws responses from its own copy of the policy.

    On a GPU, `bf16` is bf16 throughout. On a CPU, whose bf16 products are emulated and 20 times slower, `bf16` rounds
    the weights and computes in fp32: the sampler still differs from an fp32 trainer by the rounding of every weight.
    """

    def __init__(
        self, folder: Path, task: Task, precision: Precision, device: str = "cpu", max_batch: int = 512
    ) -> None:
        """Copy the weights in `folder` (version 0). `max_batch` sequences are sampled at once, with equal results."""
        self._task = task
        self._device = torch.device(device)
        self._rounding = torch.bfloat16 if precision == "bf16" else torch.float32
        self._dtype = torch.float32 if self._device.type == "cpu" else self._rounding
        self._max_batch = max_batch
        transformers_logging.disable_progress_bar()
        # eager: on a CPU three times faster than the fused kernel at one query per step
        self._lm = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager" if self._device.type == "cpu" else "sdpa"
        )
        self._lm.requires_grad_(False).eval().to(device=self._device, dtype=self._dtype)
        self._parameters = dict(self._lm.named_parameters())
        self._version: int | None = None
        self.load([(name, p.clone()) for name, p in self._parameters.items()], version=0)

    @property
    def policy_version(self) -> int | None:
        """Rollout step whose weights are loaded; None while a load is unfinished or failed."""
        return self._version

    def load(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy in the full weights of rollout step `version`, rounded to the sampler's precision.

        Raises:
            ValueError: a parameter is missing, unknown or of another shape; the sampler then refuses to draw.
        """
        self._version = None
        missing = set(self._parameters)
        with torch.no_grad():
            for name, tensor in named_tensors:
                if name not in self._parameters or self._parameters[name].shape != tensor.shape:
                    raise ValueError(f"the sampler has no parameter {name} of shape {tuple(tensor.shape)}")
                self._parameters[name].copy_(tensor.to(self._rounding))
                missing.discard(name)
        if missing:
            first = ", ".join(sorted(missing)[:3])
            raise ValueError(f"weights lack {len(missing)} of the sampler's parameters: {first}")
        self._version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """One rollout per request, in their order; rewards are not filled in.

        Raises:
            RuntimeError: no whole set of weights is loaded.
        """
        if self._version is None:
            raise RuntimeError("the sampler's last weight update did not finish: load weights before sampling")
        chunks = [requests[i : i + self._max_batch] for i in range(0, len(requests), self._max_batch)]
        return [rollout for chunk in chunks for rollout in self._generate(chunk, sampling)]

    def _generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        noise = torch.from_numpy(uniforms([r.key for r in requests], sampling.max_response_len)).to(self._device)
        with torch.no_grad():  # not inference_mode: its tensors may never enter autograd
            tokens, logprobs = self._loop(requests, sampling, noise)
        return [
            self._rollout(request, ids, values)
            for request, ids, values in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True)
        ]

    def _loop(
        self, requests: Sequence[Request], sampling: Sampling, noise: Float[Tensor, "B T"]
    ) -> tuple[Int[Tensor, "B L"], Float[Tensor, "B L"]]:
        logits, state = self._prefill(requests, sampling.max_response_len)
        done = torch.zeros(len(requests), dtype=torch.bool, device=self._device)
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        for t in range(sampling.max_response_len):
            token, logprob = draw(logits[:, : self._task.vocab_size], noise[:, t], sampling)
            tokens.append(token)
            logprobs.append(logprob)
            done |= token == self._task.eos_id
            if t + 1 == sampling.max_response_len or bool(done.all()):
                break
            logits = self._decode(token, state)
        return torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1)

    def _prefill(self, requests: Sequence[Request], new_tokens: int) -> tuple[Float[Tensor, "B V"], _State]:
        """Run each distinct prompt once, then share its cache rows among its samples."""
        prompts = list(dict.fromkeys(r.prompt.ids for r in requests))
        index = {ids: row for row, ids in enumerate(prompts)}
        rows = torch.tensor([index[r.prompt.ids] for r in requests], device=self._device)
        width = max(len(ids) for ids in prompts)
        padded = [(self._task.pad_id,) * (width - len(ids)) + ids for ids in prompts]
        lengths = torch.tensor([len(ids) for ids in prompts], device=self._device)
        column = torch.arange(width + new_tokens, device=self._device)
        positions = column - (width - lengths)[:, None]
        cache = DynamicCache(config=self._lm.config)
        causal = column[:width] <= column[:width, None]
        # a padding row attends to itself, so that its softmax is not over nothing
        visible = causal & ((positions >= 0)[:, None, :width] | torch.eye(width, dtype=torch.bool, device=self._device))
        logits = self._forward(
            torch.tensor(padded, device=self._device), positions[:, :width].clamp(min=0), visible[:, None], cache
        )
        cache.batch_select_indices(rows)
        return logits[rows], _State(cache, positions[rows], (positions >= 0)[rows], width)

    def _decode(self, token: Int[Tensor, " B"], state: _State) -> Float[Tensor, "B V"]:
        at = state.filled
        state.filled += 1
        visible = state.real[:, None, None, : at + 1]
        return self._forward(token[:, None], state.positions[:, at : at + 1], visible, state.cache)

    def _forward(
        self,
        ids: Int[Tensor, "B S"],
        positions: Int[Tensor, "B S"],
        visible: Bool[Tensor, "B 1 S K"],
        cache: DynamicCache,
    ) -> Float[Tensor, "B V"]:
        """Logits after the last of S new tokens, fp32."""
        bias = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        bias.masked_fill_(~visible, torch.finfo(self._dtype).min)
        hidden = self._lm.model(
            input_ids=ids, attention_mask=bias, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state
        return self._lm.lm_head(hidden[:, -1]).float()

    def _rollout(self, request: Request, ids: list[int], logprobs: list[float]) -> Rollout:
        finish: FinishReason = "length"
        if self._task.eos_id in ids:
            end = ids.index(self._task.eos_id) + 1
            ids, logprobs, finish = ids[:end], logprobs[:end], "stop"
        assert self._version is not None
        return Rollout(
            prompt_id=request.prompt.id,
            sample=request.sample,
            prompt_ids=request.prompt.ids,
            response_ids=tuple(ids),
            logprobs=tuple(logprobs),
            finish_reason=finish,
            policy_version=self._version,
            text=self._task.decode(ids),
        )


@dataclass(slots=True)
class _State:
    """What decoding carries: `positions` and `real` [B, P+T] per cache column, `filled` columns so far."""

    cache: DynamicCache
    positions: Tensor
    real: Tensor
    filled: int


def draw(
    logits: Float[Tensor, "B V"], uniform: Float[Tensor, " B"], sampling: Sampling
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """One token per row by inversion of the distribution at `uniform` (float64), and its log-probability.

    Raises:
        UsageError: the policy has diverged: there are no finite probabilities to draw from.
    """
    if not bool(logits.isfinite().all()):
        raise UsageError("the policy has diverged: its logits are not finite; lower optim.lr or set optim.grad_clip")
    if sampling.temperature == 0:
        token = logits.argmax(dim=-1)
        return token, _at(torch.log_softmax(logits, dim=-1), token)
    logprobs = torch.log_softmax(truncate(logits / sampling.temperature, sampling), dim=-1)
    cdf = logprobs.double().exp().cumsum(dim=-1)
    total = cdf[:, -1:]
    # below the total, so that rounding cannot select a token of probability 0 past the end
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cdf, target, right=True)[:, 0]
    return token, _at(logprobs, token)


def truncate(logits: Float[Tensor, "B V"], sampling: Sampling) -> Float[Tensor, "B V"]:
    """Tempered logits with excluded tokens at -inf, in vLLM's order: min_p, then top_k, then top_p of what remains.

    min_p is relative to the largest probability; tokens tied with the k-th stay; top_p keeps the fewest most probable
    tokens that reach it, at least one.
    """
    if sampling.min_p > 0:
        floor = logits.max(dim=-1, keepdim=True).values + torch.log(torch.tensor(sampling.min_p))
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        before = ordered.double().softmax(dim=-1).cumsum(dim=-1) - ordered.double().softmax(dim=-1)
        excluded = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, before >= sampling.top_p)
        logits = logits.masked_fill(excluded, -torch.inf)
    return logits


def _at(values: Float[Tensor, "B V"], token: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    return values.gather(-1, token[:, None])[:, 0]
