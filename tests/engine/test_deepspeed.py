"""ZeRO-3 on one rank against the same loop in plain torch, and what checkpoints, skips and gathers must keep."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ablate.config import Engine as EngineConfig
from ablate.engine import deepspeed as adapter
from ablate.engine.deepspeed import CheckpointMismatch, Engine, Reference, ScalingError
from ablate.engine.model import collate, load_policy

from .conftest import Start
from .engine_support import (
    TEMPERATURE,
    VOCABULARY,
    WIDTH,
    engine_update,
    loss_weights,
    plain_update,
    random_base,
    sequences,
)

ROWS = sequences()
ALL = [list(range(8))]
SPLITS = {1: [[i] for i in range(8)], 2: [[0, 1], [2, 3], [4, 5], [6, 7]], 3: [[0, 1, 2], [3, 4, 5], [6, 7]], 8: ALL}


def tensors(engine: Engine) -> dict[str, torch.Tensor]:
    return dict(engine.named_full_tensors())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("threshold", [0, 100_000])
@pytest.mark.parametrize("size", SPLITS)
def test_three_updates_equal_plain_torch_for_every_split(start: Start, base: Path, size: int, threshold: int) -> None:
    engine = start(persistence_threshold=threshold)
    policy = load_policy(base, VOCABULARY, "eager")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01)
    for update in range(3):
        weights = loss_weights(ROWS, update) * 10
        expected_loss, expected_norm = plain_update(policy, optimizer, ROWS, weights, 1.0)
        loss, result = engine_update(engine, ROWS, weights, [*SPLITS[size], []])
        assert expected_norm > 1.0  # so that clipping acts
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-5)
        assert result.grad_norm == pytest.approx(expected_norm, rel=1e-5)
        assert (result.skipped, result.lr) == (False, 1e-2)
    for name, parameter in policy.lm.named_parameters():
        torch.testing.assert_close(tensors(engine)[name], parameter.data, atol=1e-4, rtol=1e-4)


def test_tied_weights_train_as_in_plain_torch_and_come_once(start: Start, tied_base: Path) -> None:
    # a large eps, or Adam's first step turns rounding of near-zero gradients into whole steps
    engine, policy = start(tied_base, eps=1e-3), load_policy(tied_base, VOCABULARY, "eager")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.01)
    for update in range(2):
        weights = loss_weights(ROWS, update)
        expected_loss, expected_norm = plain_update(policy, optimizer, ROWS, weights, 1.0)
        loss, result = engine_update(engine, ROWS, weights, SPLITS[3])
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-5)
        assert result.grad_norm == pytest.approx(expected_norm, rel=1e-5)
    assert "lm_head.weight" not in tensors(engine)


def test_scoring_changes_nothing(start: Start, base: Path) -> None:
    engine, policy = start(), load_policy(base, VOCABULARY, "eager")
    batch, weights = collate(ROWS, 0, WIDTH), loss_weights(ROWS, 0)
    logprobs, entropy = engine.score(batch, TEMPERATURE)
    assert not logprobs.requires_grad
    with torch.no_grad():
        expected = policy(*batch, TEMPERATURE)
    torch.testing.assert_close((logprobs, entropy), expected)
    quiet = start()
    for update in range(2):
        engine.score(batch, TEMPERATURE)
        assert engine_update(engine, ROWS, weights, ALL) == engine_update(quiet, ROWS, weights, ALL), update
        engine.score(batch, TEMPERATURE)
    assert same(tensors(engine), tensors(quiet))


@pytest.mark.parametrize("threshold", [0, 100_000])
def test_full_tensors_equal_the_module_and_can_be_kept(start: Start, base: Path, threshold: int) -> None:
    engine = start(persistence_threshold=threshold)
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    first = tensors(engine)
    assert same(first, {name: p.data for name, p in lm.named_parameters()})
    engine_update(engine, ROWS, loss_weights(ROWS, 0), ALL)
    assert same(first, {name: p.data for name, p in lm.named_parameters()})
    assert not same(first, tensors(engine))


def test_a_consumer_that_raises_leaves_the_engine_whole(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_SYNC_GROUP_ELEMENTS", 1)
    engine, quiet = start(), start()
    kept: list[Any] = []
    with pytest.raises(RuntimeError, match="consumer"):
        for named in engine.named_full_tensors():
            kept.append(named)
            if len(kept) == 5:
                raise RuntimeError("consumer")
    weights = loss_weights(ROWS, 0)
    assert engine_update(engine, ROWS, weights, ALL) == engine_update(quiet, ROWS, weights, ALL)
    assert same(tensors(engine), tensors(quiet))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("threshold", [0, 100_000])
def test_a_non_finite_update_is_skipped_and_leaves_no_trace(
    start: Start, bad: float, where: str, threshold: int
) -> None:
    engine, quiet = start(persistence_threshold=threshold), start(persistence_threshold=threshold)
    weights = loss_weights(ROWS, 0)
    engine_update(engine, ROWS, weights, ALL)
    engine_update(quiet, ROWS, weights, ALL)
    logprobs, _ = engine.forward(collate(ROWS, 0, WIDTH), TEMPERATURE)
    if where == "gradient":
        logprobs.register_hook(lambda grad: grad * bad)
    engine.backward((logprobs * weights).sum() + (bad if where == "loss" else 0.0), last=False)
    logprobs, _ = engine.forward(collate(ROWS, 0, WIDTH), TEMPERATURE)
    engine.backward((logprobs * weights).sum(), last=True)
    result = engine.step()
    assert result.skipped
    assert math.isnan(result.grad_norm)
    assert same(tensors(engine), tensors(quiet))
    assert engine.updates == quiet.updates + 1
    for seed in (1, 2):
        ours, theirs = (engine_update(e, ROWS, loss_weights(ROWS, seed), ALL) for e in (engine, quiet))
        assert ours == theirs
    assert same(tensors(engine), tensors(quiet))


def test_the_learning_rate_warms_up_and_stays(start: Start) -> None:
    engine = start(warmup_updates=4)
    rates = [engine_update(engine, ROWS, loss_weights(ROWS, k), ALL)[1].lr for k in range(6)]
    assert rates == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2, 1e-2])
    still = start(warmup_updates=1000, weight_decay=0.0)
    before = tensors(still)
    engine_update(still, ROWS, loss_weights(ROWS, 0), ALL)
    moved = max(float((before[name] - after).abs().max()) for name, after in tensors(still).items())
    assert moved == pytest.approx(1e-5, rel=0.05)  # Adam's first step is the rate itself


def test_grad_clip_zero_turns_clipping_off(start: Start) -> None:
    weights = loss_weights(ROWS, 0) * 100
    results = {clip: engine_update(start(grad_clip=clip), ROWS, weights, ALL)[1].grad_norm for clip in (0.0, 1.0)}
    assert results[0.0] == results[1.0] > 10


@pytest.mark.parametrize("threshold", [0, 100_000])
def test_resumed_equals_uninterrupted_to_the_bit(start: Start, tmp_path: Path, threshold: int) -> None:
    engine = start(warmup_updates=5, persistence_threshold=threshold)
    for k in range(3):
        engine_update(engine, ROWS, loss_weights(ROWS, k), SPLITS[3])
    engine.save(tmp_path / "step_3.tmp")
    (tmp_path / "step_3.tmp").rename(tmp_path / "step_3")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_3"]
    resumed = start(warmup_updates=5, persistence_threshold=threshold)
    resumed.load(tmp_path / "step_3")
    assert same(tensors(engine), tensors(resumed))
    assert resumed.updates == 3
    for k in range(3, 6):
        ours, theirs = (engine_update(e, ROWS, loss_weights(ROWS, k), SPLITS[3]) for e in (engine, resumed))
        assert ours == theirs
    assert same(tensors(engine), tensors(resumed))


def test_checkpoints_that_do_not_fit_are_refused_by_what_differs(start: Start, tmp_path: Path) -> None:
    engine = start()
    engine.save(tmp_path / "saved")
    other = start(random_base(tmp_path / "wide", intermediate_size=64))
    with pytest.raises(CheckpointMismatch, match=r"mlp.*\[32, 48\] there and \[32, 64\] here"):
        other.load(tmp_path / "saved")
    with pytest.raises(CheckpointMismatch, match="not a whole checkpoint"):
        engine.load(tmp_path / "nowhere")
    description = tmp_path / "saved" / "engine.json"
    description.write_text(description.read_text().replace('"world_size": 1', '"world_size": 4'))
    with pytest.raises(CheckpointMismatch, match="saved by 4 ranks, this run has 1"):
        engine.load(tmp_path / "saved")


def test_a_truncated_checkpoint_is_refused(start: Start, tmp_path: Path) -> None:
    engine = start()
    engine.save(tmp_path / "saved")
    largest = max((tmp_path / "saved").glob("*.pt"), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    with pytest.raises(CheckpointMismatch, match="not a whole checkpoint"):
        start().load(tmp_path / "saved")
    largest.unlink()
    with pytest.raises(CheckpointMismatch, match="not a whole checkpoint"):
        start().load(tmp_path / "saved")


def test_a_full_disk_is_an_oserror_with_its_number(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = start()
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        engine.save(tmp_path / "saved")
    assert caught.value.errno == errno.ENOSPC


def test_another_scaling_is_refused_at_start(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    right = adapter._config

    def averaging(engine: EngineConfig, grad_clip: float) -> dict[str, Any]:
        return {**right(engine, grad_clip), "gradient_accumulation_steps": 2}

    monkeypatch.setattr(adapter, "_config", averaging)
    with pytest.raises(ScalingError, match=r"0\.5"):
        start()


def test_a_reference_scores_like_the_base_while_the_policy_trains(start: Start, base: Path) -> None:
    engine = start()
    config = EngineConfig(precision="fp32", micro_batch_size=None, persistence_threshold=0)
    reference = Reference(lambda: load_policy(base, VOCABULARY, "eager"), config)
    batch = collate(ROWS, 0, WIDTH)
    before = engine.score(batch, TEMPERATURE)
    for update in range(2):
        engine_update(engine, ROWS, loss_weights(ROWS, update), ALL)
        torch.testing.assert_close(reference.score(batch, TEMPERATURE), before)
    assert (engine.score(batch, TEMPERATURE)[0] - before[0]).abs().max() > 1e-3


def test_bf16_computes_in_bf16_and_keeps_fp32_masters(start: Start) -> None:
    exact, rounded = start(lr=1e-4), start(precision="bf16", lr=1e-4)
    batch = collate(ROWS, 0, WIDTH)
    gap = (exact.score(batch, TEMPERATURE)[0] - rounded.score(batch, TEMPERATURE)[0]).abs().max()
    assert 1e-5 < gap < 0.3
    for update in range(20):
        ours, theirs = (engine_update(e, ROWS, loss_weights(ROWS, update % 2), ALL) for e in (exact, rounded))
        assert not theirs[1].skipped
        assert theirs[1].grad_norm == pytest.approx(ours[1].grad_norm, rel=0.1)
    # twenty steps of 1e-4 on weights of 1: lost if each were rounded to bf16, whose spacing there is 8e-3
    norm = "model.norm.weight"
    moved = float((tensors(exact)[norm] - 1).abs().max())
    assert moved > 1e-3
    masters = rounded._deepspeed.optimizer.fp32_partitioned_groups_flat
    assert all(master.dtype == torch.float32 for master in masters)


def test_collectives_of_one_rank(start: Start) -> None:
    engine = start()
    assert (engine.rank, engine.world_size, engine.all_gather("x")) == (0, 1, ["x"])
    assert engine.any_rank(True)
    assert not engine.any_rank(False)
