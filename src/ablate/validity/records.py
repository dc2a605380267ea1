"""What runs have written, as plain records for the checks, and the designs they belong to. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from pathlib import Path
from typing import Any

from ablate import files, record
from ablate.config import Config
from ablate.errors import UsageError
from ablate.levels import FACTORS
from ablate.record import Row
from ablate.runs import load_config, read_plan
from ablate.select import exported_steps
from ablate.validity.table import Table


@dataclass(frozen=True)
class RunRecord:
    """One run as it was recorded.

    `rows` are the curve, one row per rollout step, last attempt wins; `all_rows` is every row of metrics.jsonl in file
    order; `attempts` one row per attempt; `code` what code.json says; `exported` the steps with whole weights; `torn`
    counts the lines of metrics.jsonl that are no row.

    Example: RunRecord("clip=sym", 0, {"clip": "sym"}, config, rows, all_rows, attempts, {"commit": "3f0c"}, (10, 20))
    """

    arm: str
    seed: int
    levels: dict[str, Any]
    config: Config = field(repr=False)
    rows: Sequence[Row] = field(repr=False, default=())
    all_rows: Sequence[Row] = field(repr=False, default=())
    attempts: Sequence[Row] = field(repr=False, default=())
    code: Mapping[str, Any] = field(repr=False, default_factory=dict)
    exported: tuple[int, ...] = ()
    torn: int = 0

    @property
    def folder(self) -> str:
        return f"{self.arm}/seed={self.seed}"


@dataclass(frozen=True)
class FrozenArm:
    """An arm as it was frozen before anything started."""

    arm: str
    levels: dict[str, Any]
    config: Config = field(repr=False)


@dataclass(frozen=True)
class Frozen:
    """A design read back from a sweep's folder: what `pairs` and `evaluate` need of a plan."""

    factors: dict[str, Any]
    arms: dict[str, FrozenArm]

    @property
    def config(self) -> Config:
        return next(iter(self.arms.values())).config


def load_records(folder: Path) -> list[RunRecord]:
    """The records of a sweep's folder or of one run's: every run that has been frozen, begun or not.

    Raises:
        UsageError: the folder is neither, or a file in it cannot be read.
    """
    if (folder / "config.yaml").is_file() and not (folder / "plan.json").is_file():
        arm, config = folder.parent.name, load_config(folder)
        return [load_record(folder, arm, config.seed, {}, config)]
    found = []
    for run in _planned(folder)["runs"]:
        path = folder / run["folder"]
        if (path / "config.yaml").is_file():
            found.append(load_record(path, run["arm"], run["seed"], run["levels"], load_config(path)))
    return found


def load_record(run: Path, arm: str, seed: int, levels: dict[str, Any], config: Config) -> RunRecord:
    """The record of one run folder."""
    lines = record.read_lines(run / "metrics.jsonl")
    rows = [r for r in lines.rows if isinstance(r.get("step"), int) and isinstance(r.get("attempt"), int)]
    torn = lines.torn + len(lines.rows) - len(rows)
    code = files.read_json(run / "code.json") if (run / "code.json").is_file() else {}
    everything = Table(rows)
    latest = record.lineage(rows)
    # almost always no step was written twice: hold the rows once
    same = len(latest) == len(rows) and all(map(is_, latest, rows))
    kept = everything if same else Table(latest)
    return RunRecord(
        arm, seed, levels, config, kept, everything, record.attempts(run), code, tuple(exported_steps(run)), torn
    )


def load_design(folder: Path) -> Frozen:
    """The arms of a sweep's folder, from plan.json and the frozen configs.

    Raises:
        UsageError: no sweep, or no run of it was frozen yet.
    """
    document = _planned(folder)
    arms: dict[str, FrozenArm] = {}
    for run in document["runs"]:
        if run["arm"] not in arms and (folder / run["folder"] / "config.yaml").is_file():
            arms[run["arm"]] = FrozenArm(run["arm"], run["levels"], load_config(folder / run["folder"]))
    if not arms:
        raise UsageError(f"{folder}: no run of this sweep has been frozen yet")
    return Frozen(document["factors"], arms)


def _planned(folder: Path) -> dict[str, Any]:
    if not (folder / "plan.json").is_file():
        raise UsageError(f"{folder}: neither a sweep (plan.json) nor a run (config.yaml)")
    return read_plan(folder)


def objective_sections(c: Config) -> dict[str, Any]:
    """What `ablate.objective.dose.bind_arm` takes: the factor levels, and `objective` with its length resolved."""
    levels = {name: getattr(c, name).model_dump() for name in FACTORS}
    return {**levels, "objective": {**c.objective.model_dump(), "max_response_len": c.max_response_len}}


def alternatives(run: Path) -> dict[str, dict[str, Any] | None]:
    """For a run's folder: `<key>=<level>` -> its objective with that one level exchanged, for all levels of its sweep.

    None is the level the run has itself. Keys outside the objective (lr, task, ...) are left out; a folder that is in
    no sweep has none.

    Example: {"clip=sym": None, "clip=asym": {"clip": {"name": "clip", "clip_low": 0.2, ...}, "reduction": ...}}
    """
    sweep = run.parent.parent
    if not (sweep / "plan.json").is_file():
        return {}
    design = load_design(sweep)
    own = design.arms.get(run.parent.name)
    if own is None:
        return {}
    mine = objective_sections(own.config)
    found: dict[str, dict[str, Any] | None] = {}
    for key in sorted(k for k in design.factors if k.split(".")[0] in mine):
        levels = {repr(a.levels.get(key)): a for a in reversed(design.arms.values())}
        for arm in sorted(levels.values(), key=lambda a: str(a.levels.get(key))):
            level = arm.levels.get(key)
            other = objective_sections(arm.config)
            if level == own.levels.get(key):
                found[f"{key}={level}"] = None
            elif _can_exchange(mine, other, key):
                found[f"{key}={level}"] = _exchanged(mine, other, key)
    return found


def _can_exchange(mine: dict[str, Any], other: dict[str, Any], key: str) -> bool:
    """Whether both mechanisms take the keyword that a dotted key names."""
    section, _, name = key.partition(".")
    return not name or (name in mine[section] and name in other[section])


def _exchanged(mine: dict[str, Any], other: dict[str, Any], key: str) -> dict[str, Any]:
    section, _, name = key.partition(".")
    return {**mine, section: {**mine[section], name: other[section][name]} if name else other[section]}
