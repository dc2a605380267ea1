"""Run by test_two_ranks.py, once per rank: checks on two ranks what needs more than one. Prints `passed` per rank."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from engine_support import TEMPERATURE, VOCABULARY, WIDTH, engine_update, loss_of, loss_weights, plain_update, sequences

from ablate.config import Engine as EngineConfig
from ablate.config import Optim as OptimConfig
from ablate.engine.deepspeed import CheckpointMismatch, Engine
from ablate.engine.model import collate, load_policy

OPTIM = OptimConfig(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.01, grad_clip=1.0, warmup_updates=0)
SPLITS = [[[[0, 2, 4, 6]], [[1, 3, 5, 7]]], [[[0, 1, 2, 3, 4], [5, 6]], [[7], []]]]


def start(base: Path, threshold: int) -> Engine:
    config = EngineConfig(precision="fp32", micro_batch_size=None, persistence_threshold=threshold)
    return Engine.start(lambda: load_policy(base, VOCABULARY, "eager"), OPTIM, config)


def updates_equal_plain_torch(base: Path, threshold: int) -> None:
    """Uneven shares, and a rank whose last micro-batch is empty."""
    rows = sequences()
    for split in SPLITS:
        engine, policy = start(base, threshold), load_policy(base, VOCABULARY, "eager")
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01)
        for update in range(3):
            weights = loss_weights(rows, update) * 10
            loss, norm = plain_update(policy, optimizer, rows, weights, 1.0)
            share, result = engine_update(engine, rows, weights, split[engine.rank])
            assert math.isclose(sum(engine.all_gather(share)), loss, rel_tol=1e-5, abs_tol=1e-5)
            assert math.isclose(result.grad_norm, norm, rel_tol=1e-5)
        full = dict(engine.named_full_tensors())
        for name, parameter in policy.lm.named_parameters():
            torch.testing.assert_close(full[name], parameter.data, atol=1e-3, rtol=1e-3)


def one_bad_rank_skips_the_update_everywhere(base: Path) -> None:
    rows, engine = sequences(), start(base, 0)
    before = dict(engine.named_full_tensors())
    loss = loss_of(*engine.forward(collate(rows, 0, WIDTH), TEMPERATURE), loss_weights(rows, 0))
    engine.backward(loss + (math.nan if engine.rank == 1 else 0.0), last=True)
    assert engine.all_gather(engine.step().skipped) == [True, True]
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.named_full_tensors())


def a_rank_that_raises_while_gathering_leaves_the_others_whole(base: Path) -> None:
    engine = start(base, 0)
    try:
        for _ in engine.named_full_tensors():
            if engine.rank == 0:
                raise RuntimeError("consumer")
    except RuntimeError:
        pass
    engine_update(engine, sequences(), loss_weights(sequences(), 0), SPLITS[0][engine.rank])


def resumed_equals_uninterrupted(base: Path, folder: Path) -> None:
    rows, engine = sequences(), start(base, 0)
    engine_update(engine, rows, loss_weights(rows, 0), SPLITS[0][engine.rank])
    engine.save(folder)
    resumed = start(base, 0)
    resumed.load(folder)
    for k in range(1, 3):
        ours, theirs = (engine_update(e, rows, loss_weights(rows, k), SPLITS[0][e.rank]) for e in (engine, resumed))
        assert ours == theirs
    for (name, a), (_, b) in zip(engine.named_full_tensors(), resumed.named_full_tensors(), strict=True):
        assert torch.equal(a, b), name


def another_world_size_is_refused(base: Path, saved_by_one: Path) -> None:
    try:
        start(base, 0).load(saved_by_one)
    except CheckpointMismatch as mismatch:
        assert "saved by 1 ranks, this run has 2" in str(mismatch)
    else:
        raise AssertionError("loaded")


def main(base: Path, saved_by_one: Path, scratch: Path) -> None:
    updates_equal_plain_torch(base, 0)
    updates_equal_plain_torch(base, 100_000)
    one_bad_rank_skips_the_update_everywhere(base)
    a_rank_that_raises_while_gathering_leaves_the_others_whole(base)
    resumed_equals_uninterrupted(base, scratch / "saved")
    another_world_size_is_refused(base, saved_by_one)
    print("passed", flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
