"""What earlier records tell a plan: response lengths, and the spread over seeds. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ablate.errors import UsageError
from ablate.validity.curves import by_arm, mean, reported, values
from ablate.validity.plan_checks import Pilot
from ablate.validity.records import RunRecord, load_records


def read_pilot(sweep: Path) -> Pilot:
    """What the sweep's own folder holds (earlier seeds), else its pilot's; nothing known where there are no records."""
    for folder in (sweep, sweep / "pilot"):
        if (folder / "plan.json").is_file():
            runs = load_records(folder)
            if by_arm(runs):
                return pilot_of(runs)
    return Pilot()


def pilot_of(runs: Sequence[RunRecord]) -> Pilot:
    """Response lengths over all runs, and the spread of the paired effects on the held-out score."""
    lengths = [v for run in runs for v in values(run, "length/mean")]
    spreads = [v for run in runs for v in values(run, "length/std")]
    length, spread = mean(lengths), mean(spreads)
    cv = spread / length if length and spread is not None else None
    return Pilot(length, cv, _paired_spread(runs))


def _paired_spread(runs: Sequence[RunRecord]) -> float | None:
    """The largest spread, at its upper 80% limit, of the sweep's contrasts; None under two seeds of two arms."""
    scores = [(run, c.heldout) for run in runs if (c := reported(run)) is not None and c.heldout is not None]
    if len({run.arm for run, _ in scores}) < 2 or len({run.seed for run, _ in scores}) < 2:
        return None
    import pandas as pd

    from ablate.stats import power_table

    factors = sorted({key for run, _ in scores for key in run.levels})
    rows = [
        {**{k: str(run.levels.get(k)) for k in factors}, "arm": run.arm, "seed": run.seed, "heldout": score}
        for run, score in scores
    ]
    try:
        table = power_table(pd.DataFrame(rows), factors, "heldout")
    except UsageError:
        return None
    largest = float(table["sd_upper"].max())
    return largest if largest > 0 else None
