"""What W&B is told of a run: names it accepts, and numbers only."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from mirror_support import SWEEP, make_run

from ablate.mirror import Tail
from ablate.wandb_view import identity, scalars


def test_a_row_becomes_numbers() -> None:
    row = {
        "attempt": 2, "job": None, "time": "2026-01-01T00:00:00+00:00", "step": 7,
        "reward/mean": 0.5, "weights_hash": "x",
        "a": {"b": {"c": 1}, "d": None}, "ids": [1, 2], "bad": math.nan, "worse": -math.inf,
        "updates": [
            {"global_step": 13, "loss/total": 1.0, "optim/skipped": True, "kl/mean": None},
            {"global_step": 14, "loss/total": 2.0, "optim/skipped": False, "kl/mean": 3.0},
        ],
        "nonfinite": ["ratio/max"],
    }  # fmt: skip
    assert scalars(row) == {
        "rollout_step": 7, "attempt": 2, "reward/mean": 0.5, "a/b/c": 1, "nonfinite": 1,
        "update/loss/total": 1.5, "update/optim/skipped": 0.5, "update/kl/mean": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize("updates", [None, [], [{}], [{"loss/total": None}]])
def test_a_row_without_updates(updates: object) -> None:
    assert scalars({"step": 0, "updates": updates}) == {"rollout_step": 0, "nonfinite": 0}


def test_attempts_share_an_identity_and_sweeps_do_not(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / SWEEP), make_run(tmp_path / "other")
    who = identity(run)
    assert who == identity(run) and who.id != identity(other).id
    assert (who.group, who.job_type, who.name) == (SWEEP, "clip=sym,tis=on", "clip=sym,tis=on/seed=0")
    assert who.tags[:2] == ("clip=sym", "optim.lr=0.0002") and "seed=0" in who.tags
    assert who.config["clip"] == {"name": "clip", "clip_low": 0.2} and who.project == "ablate"


@pytest.mark.parametrize("arm", ["x" * 200, "a b'c\"d;$(e)", "ü,=%", "-"])
def test_every_name_is_one_that_wandb_accepts(tmp_path: Path, arm: str) -> None:
    who = identity(make_run(tmp_path / SWEEP, arm, tags=["t" * 99, "t" * 98 + "u", "clip=sym"]))
    assert all(1 <= len(tag) <= 64 for tag in who.tags) and len(set(who.tags)) == len(who.tags) == 6
    assert max(len(who.name), len(who.group), len(who.job_type)) <= 128
    assert who.id.replace("-", "").isalnum() and who.id.isascii()


def test_a_run_alone_has_an_identity(tmp_path: Path) -> None:
    run = make_run(tmp_path / SWEEP)
    (tmp_path / SWEEP / "plan.json").unlink()
    assert (identity(run).group, identity(run).job_type) == (SWEEP, "clip=sym,tis=on")


def test_lines_are_numbered_over_torn_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert list(tail.lines()) == []
    path.write_bytes(b'{"step": 0}\n{"st')
    assert [(n, json.loads(line)) for n, line in tail.lines()] == [(0, {"step": 0})]
    assert list(tail.lines()) == []
    with path.open("ab") as stream:
        stream.write(b'\n{"step": 1}\r\n')
    assert list(tail.lines()) == [(1, b'{"st\n'), (2, b'{"step": 1}\r\n')]
    assert list(tail.lines()) == [] and [n for n, _ in Tail(path).lines()] == [0, 1, 2]
