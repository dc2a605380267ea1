"""Shared by all tests: a composer over conf/, and the command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ablate.cli import composer as open_composer
from ablate.compose import Composer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def composer() -> Iterator[Composer]:
    with open_composer() as source:
        yield source


Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Run `python -m MODULE ARGUMENTS...` in an empty folder, as a user would."""

    def run(module: str, *arguments: str, timeout: float = 280, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    return run
