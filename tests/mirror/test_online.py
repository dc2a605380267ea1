"""Online, against a small server of our own: one run across attempts, each row once; and a server that goes away."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mirror_support import SWEEP, expected, lines, make_run, wait_for, without_clock, write_step
from wandb_server import Server

from ablate import files, record
from ablate.mirror import start_mirror
from ablate.sync import sync
from ablate.wandb_view import identity

pytestmark = pytest.mark.slow


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    yield server
    server.shutdown()
    server.server_close()


def test_attempts_are_one_run(tmp_path: Path, server: Server) -> None:
    """The first mirror is killed, the second attempt's rollout steps go back: nothing is missing, nothing twice."""
    run = make_run(tmp_path / SWEEP)
    who = identity(run)
    first = start_mirror(run, "online", 1)
    assert first is not None
    record.start_attempt(run, None)
    for step in range(6):
        write_step(run, 1, step)
    wait_for(lambda: len(server.history(who.id)) == 6)
    first.kill()
    first.wait()
    write_step(run, 1, 6)  # nobody follows
    record.end_attempt(run, 1, "failed", 6)
    second = start_mirror(run, "online", 2)
    assert second is not None
    record.start_attempt(run, None)
    for step in range(3, 9):
        write_step(run, 2, step)
    record.end_attempt(run, 2, "done", 8)
    files.write_json(run / "done.json", {"outcome": "done", "last_step": 8})
    assert second.wait(120) == 0
    assert list(server.runs) == [who.id]
    seen = server.history(who.id)
    assert without_clock(seen) == [expected(row) for row in lines(run)]
    assert [item["_step"] for item in seen] == list(range(7 + 6))


def test_a_server_that_goes_away_delays_nobody(tmp_path: Path, server: Server) -> None:
    run = make_run(tmp_path / SWEEP)
    mirror = start_mirror(run, "online", 1)
    assert mirror is not None
    record.start_attempt(run, None)
    write_step(run, 1, 0)
    wait_for(lambda: server.history(identity(run).id))
    server.shutdown()
    server.server_close()
    before = time.monotonic()
    for step in range(1, 4):
        write_step(run, 1, step)
    assert time.monotonic() - before < 1.0
    time.sleep(2.0)
    assert mirror.poll() is None and len(lines(run)) == 4
    mirror.kill()
    mirror.wait()


def test_the_printed_lines_upload_the_lineage(tmp_path: Path, server: Server) -> None:
    """`wandb sync` as a login node would call it, with this server in place of W&B's."""
    runs = [make_run(tmp_path / SWEEP, seed=seed) for seed in (0, 1)]
    for run in runs:
        for attempt, steps in ((1, range(5)), (2, range(3, 8))):
            for step in steps:
                write_step(run, attempt, step)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for line in sync(tmp_path / SWEEP):
        subprocess.run(line, shell=True, cwd=tmp_path, env=environment, check=True, capture_output=True)
    for run in runs:
        seen = server.history(identity(run).id)
        assert without_clock(seen) == [expected(row) for row in record.read_metrics(run)]
        assert [(i["_step"], i["attempt"]) for i in seen] == [(step, 1 if step < 3 else 2) for step in range(8)]
