"""Two ranks over gloo, each a process: the checks themselves are in two_ranks.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Start


@pytest.mark.slow
def test_two_ranks(start: Start, base: Path, tmp_path: Path) -> None:
    start().save(tmp_path / "one")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("two_ranks.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, base, tmp_path / "one", tmp_path],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert all(output.rstrip().endswith("passed") for output in outputs), "\n".join(outputs)[-6000:]
