"""The report of a sweep as Markdown and tidy CSVs: what was asked, what was found, and what it cannot say.

A partial or running sweep gives a report of what there is, and says so. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.table import Table

from ablate import files
from ablate.report.frames import OUTCOMES, SweepData, runs_table, steps_table
from ablate.report.tables import finding_lines
from ablate.stats import Effect, arm_correlation, effects, effects_frame, iqm, power_table, threshold_summary
from ablate.stats.effects import PRIMARY
from ablate.validity import Finding, check_records

FORMATS = ("md", "csv")

_OUTCOME_NAMES = {
    "heldout_reported": "held-out score at the reported step",
    "ema_reported": "EMA reward at the reported step",
    "auc": "area under the reward curve",
    "final": "held-out score at the end",
    "steps_to_threshold": "steps to the threshold (restricted mean)",
}


@dataclass(frozen=True)
class Report:
    """Everything a report shows, as tables; rendering adds nothing."""

    sweep: SweepData
    runs: pd.DataFrame
    steps: pd.DataFrame
    effects: tuple[Effect, ...]
    findings: tuple[Finding, ...]
    threshold: float
    horizon: float

    @property
    def answer(self) -> str:
        """One sentence on the declared contrasts of the primary outcome."""
        declared = [e for e in self.effects if not e.exploratory]
        if not declared:
            return "No answer yet: no seed has been finished by every arm."
        smallest = self.sweep.document.get("smallest_effect")
        return " ".join(_sentence(e, smallest) for e in declared)


def make_report(sweep: SweepData, threshold: float = 0.8) -> Report:
    """Compute a report from a loaded sweep: its planned findings, and those of the checks on its records."""
    findings = [Finding(**f) for f in sweep.document.get("findings", ())]
    findings += check_records([r.record for r in sweep.runs])
    runs = runs_table(sweep, threshold)
    horizon = float(max((r.record.config.train.max_steps for r in sweep.runs), default=0))
    found: list[Effect] = []
    # a run that is half way must not be compared with finished ones
    done = runs[runs["state"] == "done"] if len(runs) else runs
    if len(done) and len(sweep.arms) > 1:
        for outcome in OUTCOMES:
            found += effects(done, sweep.factors, outcome, horizon=horizon)
    return Report(sweep, runs, steps_table(sweep), tuple(found), tuple(findings), threshold, horizon)


def write_report(report: Report, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write report.md and the CSVs into `folder`; returns what was written."""
    written: list[Path] = []
    if "md" in formats:
        files.write_text(folder / "report.md", markdown(report))
        written.append(folder / "report.md")
    if "csv" in formats:
        tables = {"runs": report.runs, "steps": report.steps, "effects": effects_frame(report.effects)}
        for name, table in tables.items():
            files.write_text(folder / f"{name}.csv", table.to_csv(index=False))
            written.append(folder / f"{name}.csv")
    return written


def read_interval(e: Effect) -> tuple[float, float]:
    """The interval to read: the paired one where this contrast scatters more than the pooled residual supposes."""
    return e.paired if e.paired is not None and not e.pooled_ok else (e.low, e.high)


def _sentence(e: Effect, smallest: float | None) -> str:
    name = f"{e.factor}, {e.contrast}"
    if not math.isfinite(e.low):
        return f"{name}: {e.estimate:+.3f} from {e.n} seed{'s' if e.n != 1 else ''}, without an interval: undecided."
    low, high = read_interval(e)
    interval = f"{e.estimate:+.3f} [{low:+.3f}, {high:+.3f}] over {e.n} seeds"
    if e.p_adjusted < 0.05 and (low > 0 or high < 0):
        return f"{name}: {interval}, a difference."
    if smallest is not None and -smallest < low and high < smallest:
        return f"{name}: {interval}, no effect as large as {smallest:g}."
    doubt = "" if smallest is None else f"; effects of {smallest:g} are not ruled out"
    return f"{name}: {interval}, no difference detected{doubt}."


def markdown(report: Report) -> str:
    """The whole document."""
    sweep = report.sweep
    unfinished = [r for r in sweep.runs if r.state.word != "done"]
    planned = len(sweep.document["runs"])
    partial = planned - (len(sweep.runs) - len(unfinished))
    parts = [
        f"# {sweep.name}",
        f"**Question.** {sweep.document.get('question') or 'none was written down'}",
        f"**Answer.** {report.answer}",
        f"This report is partial: {partial} of {planned} runs are not finished." if partial else "",
        _design(report),
        _effects(report),
        _arms(report),
        _findings(report),
        _lineage(report),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def _design(report: Report) -> str:
    document = report.sweep.document
    lines = [f"- `{key}`: {', '.join(map(str, levels))}" for key, levels in document["factors"].items()]
    rest = {"seeds": document["seeds"], "smallest effect of interest": document.get("smallest_effect")}
    lines += [f"- {k}: {v if v is not None else 'not stated'}" for k, v in rest.items()]
    lines += [f"- analysis, as declared: {document['analysis']}"] if document.get("analysis") else []
    command = f"`python -m ablate.run {' '.join(document['command'])}`"
    return "\n".join(["## Design", "", *lines, f"- planned by: {command}"])


def _table(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    cells = [list(head), ["---"] * len(head), *(list(r) for r in rows)]
    return "\n".join("| " + " | ".join(_escape(c) for c in row) + " |" for row in cells)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _number(value: float | None, form: str = "+.3f") -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def _effects(report: Report) -> str:
    if not report.effects:
        return "## Effects\n\nNone: there is one arm, or no run has records yet."
    rows = [_effect_row(e) for e in sorted(report.effects, key=lambda e: e.exploratory)]
    head = [
        "contrast",
        "outcome",
        "difference",
        "95% interval",
        "p",
        "p (Holm)",
        "seeds",
        "paired interval",
        "bootstrap-t",
        "",
    ]
    dropped = max(e.dropped for e in report.effects)
    notes = [
        "t intervals with seeds as blocks and the pooled residual; Holm over the declared contrasts of the primary "
        f"outcome, {_OUTCOME_NAMES[PRIMARY]}. Everything else is exploratory.",
        f"{dropped} seed(s) left out because not every arm finished them." if dropped else "",
        f"Threshold for the steps: EMA reward {report.threshold:g}, within {report.horizon:g} steps.",
    ]
    return "\n\n".join(["## Effects", _table(rows, head), " ".join(n for n in notes if n), _correlation(report)])


def _effect_row(e: Effect) -> list[str]:
    interval = f"{_number(e.low)} to {_number(e.high)}" if math.isfinite(e.low) else "none"
    mark = "" if e.pooled_ok else " (read this)"
    paired = f"{_number(e.paired[0])} to {_number(e.paired[1])}{mark}" if e.paired else "-"
    bootstrap = f"{_number(e.bootstrap[0])} to {_number(e.bootstrap[1])}" if e.bootstrap else "-"
    return [
        e.name,
        _OUTCOME_NAMES[e.outcome],
        _number(e.estimate),
        interval,
        _number(e.p, ".3f"),
        _number(e.p_adjusted, ".3f"),
        str(e.n),
        paired,
        bootstrap,
        "exploratory" if e.exploratory else "declared",
    ]


def _correlation(report: Report) -> str:
    matrix = arm_correlation(report.runs, report.sweep.factors, PRIMARY).to_numpy(dtype=float)
    pairs = [matrix[i][j] for i in range(len(matrix)) for j in range(i) if math.isfinite(matrix[i][j])]
    if not pairs:
        return "Correlation between arms over seeds: not known (under 3 complete seeds, or no spread)."
    return (
        f"Correlation between arms over seeds, {_OUTCOME_NAMES[PRIMARY]}: {min(pairs):+.2f} to {max(pairs):+.2f}. "
        "The higher, the more sharing seeds has bought."
    )


def _arms(report: Report) -> str:
    if not len(report.runs):
        return "## Arms\n\nNo run has started."
    reached = threshold_summary(report.runs, report.sweep.factors, horizon=report.horizon).set_index("arm")
    rows = []
    for arm, runs in report.runs.groupby("arm", sort=False):
        middle = iqm(runs["heldout_reported"].dropna())
        rows.append(
            [
                str(arm),
                f"{(runs['state'] == 'done').sum()}/{len(runs)}",
                ",".join(str(int(s)) for s in runs["reported_step"].dropna()) or "-",
                _number(runs["ema_reported"].mean(), ".3f"),
                _number(runs["heldout_start"].mean(), ".3f"),
                _number(runs["heldout_reported"].mean(), ".3f"),
                _number(middle, ".3f"),
                _number(runs["auc"].mean(), ".3f"),
                _number(float(reached.loc[arm, "share_reached"]), ".0%"),
            ]
        )
    head = [
        *("arm", "done", "reported steps", "EMA", "held-out at 0", "held-out at reported", "IQM of it", "area"),
        "reached the threshold",
    ]
    return "## Arms\n\n" + _table(rows, head)


def arms_table(report: Report) -> Table:
    """The arms of one sweep for the terminal."""
    table = Table(title=report.sweep.name)
    columns = ("state", "reported_step", "ema_reported", "heldout_start", "heldout_reported", "auc")
    for column in ("arm", "seed", *columns):
        table.add_column(column)
    for row in report.runs.to_dict("records"):
        cells = [_number(v, ".3f") if isinstance(v, float) else str(v) for v in (row[c] for c in columns)]
        table.add_row(str(row["arm"]), str(row["seed"]), *cells)
    return table


def power_summary(sweep: SweepData, effect: float | None) -> Table:
    """Per contrast of the primary outcome: spread over seeds, what these seeds can find, seeds needed."""
    runs = runs_table(sweep, threshold=0.8)
    wanted = effect if effect is not None else sweep.document.get("smallest_effect")
    frame = power_table(runs[runs["state"] == "done"], sweep.factors, PRIMARY, wanted)
    table = Table(title=f"{sweep.name}: power for {_OUTCOME_NAMES[PRIMARY]}, effect {wanted or 'not given'}")
    for column in frame.columns:
        table.add_column(str(column))
    for row in frame.itertuples(index=False):
        table.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row))
    return table


def _findings(report: Report) -> str:
    lines = finding_lines(report.findings)
    return "## Findings\n\n" + ("\n".join(f"- {line}" for line in lines) if lines else "None of the checks fired.")


def _lineage(report: Report) -> str:
    lines = [f"- {p}" for p in report.sweep.problems]
    for run in report.sweep.runs:
        steps = [r["step"] for r in run.record.all_rows]
        again = sorted({s for s in steps if steps.count(s) > 1}) if len(set(steps)) < len(steps) else []
        if again:
            shown = f"{again[0]}" if len(again) == 1 else f"{again[0]} to {again[-1]}"
            lines.append(f"- {run.name}: steps {shown} trained more than once; the last attempt counts")
    return "## Lineage\n\n" + ("\n".join(lines) or "Every planned run is done, in one piece.")
