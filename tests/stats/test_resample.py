"""Re-picking the step by a bootstrap of prompts: against formulas, a plain loop, and a run folder."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ablate.errors import UsageError
from ablate.resample import read_rollouts, resample_run, resample_selection
from ablate.runs import load_config
from ablate.select import ema
from fake_sweep import grid, write_sweep


def rollouts(means: list[float], prompts: int = 20, group: int = 4) -> pd.DataFrame:
    """Prompts are all right or all wrong: the share of right ones is the step's mean."""
    return pd.DataFrame([
        {"step": step, "prompt_id": p, "reward": float(p < round(mean * prompts))}
        for step, mean in enumerate(means, start=1) for p in range(prompts) for _ in range(group)
    ])  # fmt: skip


def test_prompts_are_resampled_and_not_rollouts() -> None:
    """Whole prompts right or wrong: a mean has the error of 20 coins, sqrt(p (1-p) / 20), whatever the group's size."""
    found = resample_selection(rollouts([0.5, 0.3, 0.5]), [2, 3], span=5, interval=1, cap=3, draws=20_000)
    assert found.reward_se[1] == pytest.approx(math.sqrt(0.25 / 20), rel=0.03)
    assert found.reward_se[2] == pytest.approx(math.sqrt(0.21 / 20), rel=0.03)
    # EMA_3 = r3/3 + 2/9 r2 + 4/9 r1
    expected = math.sqrt((0.25 / 9 + 0.21 * 4 / 81 + 0.25 * 16 / 81) / 20)
    assert found.ema_se[3] == pytest.approx(expected, rel=0.03)
    assert sum(found.share.values()) == pytest.approx(1.0)


def test_shares_agree_with_a_loop_over_uneven_groups() -> None:
    noise = np.random.default_rng(0)
    frame = pd.DataFrame([
        {"step": s, "prompt_id": p, "reward": float(noise.random() < 0.5)}
        for s in range(1, 7) for p in range(6) for _ in range(1 + p % 3)
    ])  # fmt: skip
    groups = [
        [g["reward"].tolist() for _, g in part.groupby("prompt_id")] for _, part in frame.groupby("step")
    ]  # fmt: skip
    wins = {2: 0, 4: 0, 6: 0}
    for _ in range(4000):
        drawn = [[r for k in noise.integers(0, 6, 6) for r in prompts[k]] for prompts in groups]
        means = [sum(rewards) / len(rewards) for rewards in drawn]
        averages = dict(enumerate(ema(means, 5), start=1))
        wins[max(wins, key=lambda s: (averages[s], -s))] += 1
    found = resample_selection(frame, [2, 4, 6], span=5, interval=1, cap=6, draws=20_000)
    for step, count in wins.items():
        assert found.share[step] == pytest.approx(count / 4000, abs=4 * math.sqrt(0.25 / 4000))


def test_a_clear_winner_wins_always_and_ties_go_to_the_earliest() -> None:
    clear = resample_selection(rollouts([0.0, 0.0, 1.0, 0.0]), [2, 3, 4], span=1, interval=1, cap=4)
    assert clear.share == {2: 0.0, 3: 1.0, 4: 0.0}
    tied = resample_selection(rollouts([1.0] * 4), [2, 3, 4], span=5, interval=1, cap=4)
    assert tied.share == {2: 1.0, 3: 0.0, 4: 0.0}


def test_candidates_are_the_selection_s() -> None:
    found = resample_selection(rollouts([0.5] * 9), [2, 4, 6, 8, 20], span=5, interval=2, cap=7)
    assert list(found.share) == [4, 6]
    assert resample_selection(rollouts([0.5] * 3), [2], span=5, interval=2, cap=7).share == {}


def test_missing_rewards_are_left_out_as_in_the_recorded_mean() -> None:
    frame = rollouts([0.5, 0.5, 0.5])
    failed = pd.concat([frame, pd.DataFrame({"step": [1], "prompt_id": [99], "reward": [None]})])
    options = {"span": 5, "interval": 1, "cap": 3}
    assert resample_selection(failed, [2, 3], **options) == resample_selection(frame, [2, 3], **options)  # type: ignore[arg-type]


def test_means_alone_are_refused() -> None:
    means = pd.DataFrame({"step": [1, 2, 3], "prompt_id": [0, 0, 0], "reward": [0.1, 0.2, 0.3]})
    for frame in (means, means.iloc[:0]):
        with pytest.raises(UsageError, match="only means by step exist"):
            resample_selection(frame, [2, 3], span=5, interval=1, cap=3)


def test_a_run_folder(tmp_path: Path) -> None:
    arms = grid(clip=["sym", "asym"])
    write_sweep(tmp_path / "sw", arms, [0], lambda arm, seed, step: 0.2 + step / 60, steps=20, rollouts=True)
    run = tmp_path / "sw" / "clip=sym" / "seed=0"
    config = load_config(run)
    found = resample_run(run, config, draws=500)
    assert list(found.share) == [10, 15, 20] and sum(found.share.values()) == pytest.approx(1.0)
    assert found.share[20] == max(found.share.values())
    assert len(read_rollouts(run)) == 20 * 16 * 8

    (run / "rollouts" / "000006-000010.parquet").unlink()
    with pytest.raises(UsageError, match="no rollouts of step 6, 7, 8 and 2 more"):
        resample_run(run, config)
    for path in (run / "rollouts").iterdir():
        path.unlink()
    with pytest.raises(UsageError, match="no rollouts were recorded, only means by step"):
        resample_run(run, config)
    (run / "rollouts" / "000001-000005.parquet").write_bytes(b"torn")
    with pytest.raises(UsageError, match="cannot be read"):
        resample_run(run, config)


def test_of_a_step_in_two_files_the_newer_counts(tmp_path: Path) -> None:
    """A kill between the rollouts' file and the checkpoint makes the next attempt redo the steps."""
    import os

    folder = tmp_path / "rollouts"
    folder.mkdir()
    rollouts([0.0] * 4).to_parquet(folder / "000001-000004.parquet")
    rollouts([1.0] * 2).to_parquet(folder / "000001-000002.parquet")
    os.utime(folder / "000001-000004.parquet", ns=(10, 10))
    frame = read_rollouts(tmp_path)
    assert frame.groupby("step")["reward"].mean().to_dict() == {1: 1.0, 2: 1.0, 3: 0.0, 4: 0.0}
    assert len(frame) == 4 * 20 * 4
