"""Sampling: requests in, scored token sequences out. Importing the package imports no torch."""

from ablate.rollout.types import Request, Rollout, Sampling

__all__ = ["Request", "Rollout", "Sampling"]
