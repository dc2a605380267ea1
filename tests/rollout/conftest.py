"""A tiny base, warmed up just enough to be neither uniform nor certain."""

from __future__ import annotations

from pathlib import Path

import pytest

from ablate.base import prepare_base
from ablate.config import Model as ModelConfig
from ablate.config import Task as TaskConfig
from ablate.rollout.types import Request
from ablate.task.base import Task, make_task, train_prompts

TASK = TaskConfig(name="reverse", train_size=1000, heldout_size=50, reward="binary")
MODEL = ModelConfig(
    kind="tiny", hidden_size=32, intermediate_size=64, layers=2, heads=4, kv_heads=2, head_dim=32, warmup_steps=15
)


@pytest.fixture(scope="session")
def task() -> Task:
    return make_task(TASK)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_base(MODEL, TASK, tmp_path_factory.mktemp("bases"))


@pytest.fixture
def requests_16(task: Task) -> list[Request]:
    """4 samples of each of 4 prompts of different lengths."""
    prompts = train_prompts(task, 0, 1, 4)
    assert len({len(p.ids) for p in prompts}) > 1
    return [Request(p, k, (0, 0, 1, p.id, k)) for p in prompts for k in range(4)]
