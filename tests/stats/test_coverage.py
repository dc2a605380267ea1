"""The t interval holds the truth in 95% of simulated sweeps, and the page says what the simulation finds."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from ablate.stats.coverage import SEEDS, WORLDS, coverage, main, simulate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "statistics.md"
NORMAL = WORLDS[0]


@pytest.mark.parametrize("seeds", SEEDS)
def test_the_t_interval_covers_the_truth_of_normal_runs(seeds: int) -> None:
    """93 to 97% is required; with 40,000 simulations the standard error is 0.11%, so 95% within 4 of them is asked."""
    found = {c.method: c.covered for c in coverage(NORMAL, seeds, 40_000, bootstrapped=0)}
    allowed = 4 * math.sqrt(0.95 * 0.05 / 40_000)
    assert found["pooled t"] == pytest.approx(0.95, abs=allowed)
    assert found["paired t"] == pytest.approx(0.95, abs=allowed)
    assert 0.93 < found["paired t where flagged"] < 0.97


def test_worlds_have_the_truth_they_claim() -> None:
    for world in WORLDS:
        values = simulate(world, 3, 100_000)
        estimates = (values[:, 2:].mean(axis=1) - values[:, :2].mean(axis=1)).mean(axis=1)
        se = estimates.std() / math.sqrt(len(estimates))
        assert abs(estimates.mean() - world.truth) < 4 * se, world.name


@pytest.mark.slow
def test_the_page_shows_what_the_command_computes() -> None:
    """Fewer simulations than the page's: within 5 standard errors of both."""
    table = re.search(r"<!-- coverage:begin -->\n(.*?)<!-- coverage:end -->", PAGE.read_text(), re.S)
    assert table is not None
    header, _, *rows = [[c.strip() for c in line.strip("| \n").split("|")] for line in table[1].strip().splitlines()]
    assert [row[0] for row in rows] == [world.name for world in WORLDS]
    for world, row in zip(WORLDS, rows, strict=True):
        shown = dict(zip(header[1:], row[1:], strict=True))
        for seeds in SEEDS:
            for c in coverage(world, seeds, 8_000, 1_000):
                if (name := f"{c.method} n={seeds}") in shown:
                    # the same random numbers are among the page's, so their difference is smaller than this
                    allowed = 5 * math.sqrt(c.covered * (1 - c.covered) / c.simulations) + 0.0005
                    assert float(shown[name]) / 100 == pytest.approx(c.covered, abs=allowed), (world.name, name)


def test_the_command_rewrites_the_table_of_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- coverage:begin -->\nold\n<!-- coverage:end -->\nafter\n")
    assert main(["--simulations", "50", "--bootstrapped", "20", "--write", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- coverage:begin -->\n| runs are |") and text.endswith(
        "<!-- coverage:end -->\nafter\n"
    )
    assert "old" not in text and capsys.readouterr().out.strip() in text
    assert main(["--simulations", "50", "--bootstrapped", "0", "--write", str(tmp_path / "none.md")]) == 1
    assert "needs the lines <!-- coverage:begin -->" in capsys.readouterr().err


def test_simulations_can_be_replayed() -> None:
    assert np.array_equal(simulate(NORMAL, 3, 5), simulate(NORMAL, 3, 5))
