"""Factor `kl`: per-token estimators of KL(policy || reference), with d = logprobs - ref_logprobs.

Legend: B sequences, T response positions. Every public function is one mechanism:

    f(logprobs, ref_logprobs) -> [B, T]

Inputs must be finite: the composition selects loss tokens first. Names after J. Schulman, "Approximating KL
divergence" (2020). As a LOSS what counts is the gradient, and there the order of merit is another one: see
`k2`, `k3`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ablate.objective.tensors import MAX_EXPONENT

_MAX_K3 = 10.0


def none(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """0: no reference model is needed."""
    return torch.zeros_like(logprobs)


def k1(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """d: unbiased value. For `place: reward`; as a loss its gradient would not depend on the reference."""
    return logprobs - ref_logprobs


def k2(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """d^2 / 2: biased value; on policy its gradient, d * grad log pi, is exactly that of the reverse KL."""
    difference = logprobs - ref_logprobs
    return difference * difference / 2.0


def k3(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """exp(-d) + d - 1: unbiased value, never negative; its gradient, 1 - exp(-d), is that of the forward KL.

    d is held in [-20, 20] in both places and the value at 10, beyond which the gradient is 0.
    """
    difference = (logprobs - ref_logprobs).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return ((-difference).exp() + difference - 1.0).clamp(-_MAX_K3, _MAX_K3)
