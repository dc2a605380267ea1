"""The study's rules on curves worked by hand, its noise against its own claims, and the command."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ablate.resample import ema_rows
from ablate.select import ema
from ablate.selection_study import (
    RULES,
    SPAN,
    STEPS,
    WORLDS,
    Observed,
    draw_curves,
    ema_variance,
    judge_run,
    main,
    study,
)  # fmt: skip
from fake_sweep import grid, write_sweep

PAGE = Path(__file__).resolve().parents[2] / "docs" / "selection.md"
BY_NAME = {w.name: w for w in WORLDS}


def observed(rewards: list[float], steps: list[int], se: float = 0.0) -> Observed:
    averages = np.array(ema(rewards, SPAN))[[s - 1 for s in steps]]
    raw = np.array(rewards)[[s - 1 for s in steps]]
    by_step = dict(enumerate(rewards, start=1))
    return Observed(by_step, SPAN, tuple(steps), raw, averages, np.full(len(steps), se))


def test_rules_on_a_curve_worked_by_hand() -> None:
    """Level .4, one lucky step 4 (.9), a rise to .6 from 6 on. EMA at 4: .567, at 6: .528, at 8: .568, at 10: .586."""
    seen = observed([0.4, 0.4, 0.4, 0.9, 0.4, 0.6, 0.6, 0.6, 0.6, 0.6], [4, 6, 8, 10])
    assert seen.ema == pytest.approx([0.4 + 0.5 / 3, 0.5407, 0.5737, 0.5883], abs=1e-4)
    assert {name: rule(seen) for name, rule in RULES.items()} == {
        "EMA-5": 10, "raw arg-max": 4, "last step": 10, "EMA lower bound": 10, "latest within noise": 10,
    }  # fmt: skip
    falling = observed([0.4, 0.5, 0.6, 0.6, 0.6, 0.55, 0.5, 0.45], [4, 6, 8], se=0.02)
    assert RULES["EMA-5"](falling) == 6
    assert RULES["latest within noise"](falling) == 8  # .5247 against .5638: under 1.645 * .02 * sqrt(2) = .0465
    assert RULES["latest within noise"](observed([0.4, 0.5, 0.6, 0.6, 0.6, 0.55, 0.5, 0.45], [4, 6, 8])) == 6


def test_a_wide_error_is_held_against_a_candidate() -> None:
    seen = Observed(
        {1: 0.5, 2: 0.52}, SPAN, (1, 2), np.array([0.5, 0.52]), np.array([0.5, 0.51]), np.array([0.01, 0.05])
    )
    assert RULES["EMA-5"](seen) == 2
    assert RULES["EMA lower bound"](seen) == 1


def test_the_row_wise_ema_is_the_selection_s() -> None:
    rewards = np.random.default_rng(0).random((3, 20))
    assert ema_rows(rewards, 5) == pytest.approx(np.array([ema(r, 5) for r in rewards.tolist()]), abs=1e-14)


def test_recorded_means_scatter_about_the_truth_as_their_errors_say() -> None:
    """A standard error of .05 at a mean of one half; step n is drawn with the weights after n - 1."""
    world = BY_NAME["peaked at 30 of 78"]
    rewards, variance = draw_curves(world, 4000)
    truth = world.value(np.arange(STEPS, dtype=float))
    assert np.abs(rewards.mean(axis=0) - truth).max() < 4.5 * 0.05 / np.sqrt(4000)
    assert rewards[:, 30].std() == pytest.approx(0.05, abs=0.003)
    assert variance.mean(axis=0) == pytest.approx(rewards.var(axis=0), rel=0.15)
    averages = ema_rows(rewards, SPAN)
    assert ema_variance(variance, SPAN).mean(axis=0) == pytest.approx(averages.var(axis=0), rel=0.15)


def test_rules_meet_the_truth_where_it_is_plain() -> None:
    rising = {v.rule: v for v in study(BY_NAME["rising to the end"], 200)}
    assert rising["last step"].regret == 0 and rising["EMA-5"].over_ema == 0
    assert rising["raw arg-max"].regret > rising["EMA-5"].regret > 0
    collapsed = {v.rule: v for v in study(BY_NAME["collapsing after 40"], 200)}
    assert collapsed["last step"].regret == pytest.approx(0.5 - 0.01 - 0.04 * 3 / 32, abs=0.01)
    narrow = {v.rule: v for v in study(BY_NAME["narrow peak at 30"], 200)}
    assert narrow["raw arg-max"].over_ema + narrow["raw arg-max"].over_ema_half < 0  # a case that EMA-5 loses


def test_a_maximum_of_a_flat_curve_flatters() -> None:
    flat = {v.rule: v for v in study(BY_NAME["flat but for a wave"], 300)}
    assert flat["raw arg-max"].optimism > flat["EMA-5"].optimism > 0.02
    assert abs(flat["last step"].optimism) < 0.015


def test_real_runs_are_judged_by_their_held_out_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reward peaks at 20 and falls; held-out is best at 15: EMA-5 picks 25 or 20, the last step 40."""
    heldout = {0: 0.2, 5: 0.3, 10: 0.5, 15: 0.8, 20: 0.7, 25: 0.6, 30: 0.5, 35: 0.4, 40: 0.3}
    write_sweep(
        tmp_path / "sw", grid(clip=["sym", "asym"]), [0], lambda arm, seed, step: 0.6 - abs(step - 20) / 100,
        heldout=lambda arm, seed, step: heldout[step], stops={("clip=asym", 0): 20}, rollouts=True,
    )  # fmt: skip
    found = judge_run(tmp_path / "sw" / "clip=sym" / "seed=0")
    assert found is not None and set(found) == set(RULES)
    assert found["last step"] == pytest.approx(0.5)
    assert found["raw arg-max"] == pytest.approx(0.1)
    assert found["EMA-5"] == pytest.approx(0.1)  # EMA at 20 is .575 (a lag of 2), at 25 .569
    assert main(["--simulations", "2", str(tmp_path / "sw")]) == 0
    assert "| sw (1 runs) | 10.00 | 10.00 | 50.00 |" in capsys.readouterr().out
    assert main(["--simulations", "2", str(tmp_path)]) == 1
    assert "plan.json: not there" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_shows_what_the_command_computes() -> None:
    text = PAGE.read_text()
    for name, digits in (("regret", 2), ("optimism", 1)):
        table = re.search(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", text, re.S)
        assert table is not None
        header, _, *rows = [[c.strip() for c in r.strip("| \n").split("|")] for r in table[1].strip().splitlines()]
        assert header[1:] == list(RULES) and [r[0] for r in rows] == [w.name for w in WORLDS]
        if digits == 2:  # 500 of the 2,000 simulations: within 3 of the wider half widths
            for row in rows:
                for v, cell in zip(study(BY_NAME[row[0]], 500), row[1:], strict=True):
                    shown = float(cell.strip("*").split()[0]) / 100
                    assert shown == pytest.approx(v.regret, abs=3 * v.half + 0.0005), (row[0], v.rule)
