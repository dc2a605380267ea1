"""A tiny base with random weights, and one DeepSpeed process group for the whole test process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ablate.config import Engine as EngineConfig
from ablate.config import Optim as OptimConfig
from ablate.engine.deepspeed import Engine
from ablate.engine.model import Policy, load_policy

from .engine_support import VOCABULARY, random_base

Start = Callable[..., Engine]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def tied_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_base(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture
def policy(base: Path) -> Policy:
    return load_policy(base, VOCABULARY, "eager")


@pytest.fixture(scope="session")
def start(base: Path) -> Start:
    """A fresh engine on the base; keywords replace those of the engine and the optimizer."""

    def make(folder: Path = base, *, persistence_threshold: int = 0, precision: str = "fp32", **optim: float) -> Engine:
        return Engine.start(
            lambda: load_policy(folder, VOCABULARY, "eager"),
            OptimConfig(**{**OPTIM, **optim}),
            EngineConfig(precision=precision, micro_batch_size=None, persistence_threshold=persistence_threshold),
        )

    return make


OPTIM = {
    "lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01, "grad_clip": 1.0, "warmup_updates": 0
}  # fmt: skip
