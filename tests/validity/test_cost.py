"""Costs: sensible sizes for the tiny default and for 8B on 56 GPUs, and a pilot's rate where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ablate.compose import Composer
from ablate.plan import make_plan
from ablate.validity.cost import estimate
from ablate.validity.pilot import read_pilot
from ablate.validity.scale import parameter_count
from fake_sweep import grid, make_fake_plan, write_sweep


def test_the_default_is_minutes_of_one_core(composer: Composer) -> None:
    cost = estimate(make_plan(composer, ["clip=sym,asym", "tis=on,off"]))
    assert (cost.basis, cost.device, cost.runs, cost.ranks) == ("planner", "core", 4, 1)
    # measured on one core of 2026: 28 s a run, 9.2 MB of files
    assert 10 < cost.run_hours * 3600 < 90
    assert 5e6 < cost.storage / 4 < 20e6
    assert "a planner's rate" in cost.line()


def test_the_seed_is_counted_in_gpu_hours_and_terabytes(composer: Composer) -> None:
    plan = make_plan(composer, ["preset=symclip", "tis=on,off"])
    cost = estimate(plan)
    parameters = 8_190_735_360
    assert (cost.device, cost.ranks, cost.at_once) == ("GPU", 56, 1)
    assert cost.exports == 2 * (80 // 5) * parameters * 2
    assert cost.checkpoints == 2 * 3 * parameters * 14
    # bf16 copy for sampling, and 16 bytes a weight over 56 ranks
    assert cost.memory == pytest.approx(parameters * (2 + 16 / 56))
    assert cost.device_hours == pytest.approx(56 * 2 * cost.run_hours)
    assert 20 < cost.device_hours < 20_000
    assert "GPU hours" in cost.line()
    assert "TB" in cost.line()


def test_the_tiny_model_is_counted_by_its_shapes(composer: Composer) -> None:
    config = make_plan(composer, []).runs[0].config
    # 100 thousand weights, as its level says: exported in fp32 as 0.41 MB
    assert parameter_count(config) == pytest.approx(103_000, rel=0.08)


def test_a_pilot_sets_rate_and_memory(tmp_path: Path) -> None:
    arms = grid(clip=["sym", "asym"])
    plan = make_fake_plan(tmp_path / "sweep", arms, [0, 1, 2], steps=100)
    write_sweep(tmp_path / "pilot", arms, [0], lambda a, s, step: 0.5, steps=3)
    cost = estimate(plan, tmp_path / "pilot")
    assert cost.basis == "pilot"
    # the invented rows' phases take .296 s with the evaluation; a run starts in 8 s
    assert cost.run_hours * 3600 == pytest.approx(100 * 0.296 + 8, rel=0.05)
    assert cost.memory == 900 * 2**20
    assert "the pilot's rate" in cost.line()
    assert estimate(plan, tmp_path / "nowhere").basis == "planner"


def test_earlier_records_tell_lengths_and_spread(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    offset = {0: 0.0, 1: 0.02, 2: 0.05}

    def curve(arm: str, seed: int, step: int) -> float:
        lift = 0.03 * seed * (arm == "clip=asym")
        return 0.3 + 0.01 * step + offset[seed] + lift

    write_sweep(folder, grid(clip=["sym", "asym"]), range(3), curve, steps=20)
    pilot = read_pilot(folder)
    assert pilot.length_mean == pytest.approx(5.0)
    assert pilot.length_cv == pytest.approx(1.1 / 5)
    # paired differences .0 .03 .06: sd .03, upper 80% limit with 2 df by the chi-square .446
    assert pilot.sd == pytest.approx(0.03 * (2 / 0.446287) ** 0.5, rel=1e-4)
    assert read_pilot(tmp_path / "nowhere").sd is None
