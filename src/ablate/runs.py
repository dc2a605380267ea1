"""Run folders and the plan file, as the stages after planning see them. Imports no torch."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ablate import __version__, files, record
from ablate.config import Config, parse
from ablate.errors import UsageError
from ablate.plan import Plan, Run


def plan_folder(plan: Plan) -> Path:
    """Where the sweep lies."""
    return Path(plan.config.output) / plan.name


def write_plan(plan: Plan, findings: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Write plan.json, or extend the one that lies there, before anything starts; returns the sweep's folder.

    Raises:
        UsageError: the folder holds another sweep, or cannot be written.
    """
    folder = plan_folder(plan)
    path = folder / "plan.json"
    old = read_plan(folder) if path.is_file() else None
    if old is None and folder.is_dir() and any(p for p in folder.iterdir() if p.name not in ("lock", "pilot")):
        raise UsageError(f"{folder}: holds files that are no sweep; choose another sweep.name= or output=")
    if old is not None and old.get("base_digest") != plan.base_digest:
        raise UsageError(
            f"{folder}: holds another sweep ({' '.join(old.get('command', ())) or 'the default'}), whose base differs; "
            f"choose another sweep.name= or remove that folder"
        )
    files.write_json(path, {**_merged(old, plan), "findings": list(findings)})
    return folder


def _merged(old: dict[str, Any] | None, plan: Plan) -> dict[str, Any]:
    runs = {r["folder"]: r for r in (old or {}).get("runs", [])}
    for run in plan.runs:
        known = runs.get(run.folder)
        if known is not None and known["digest"] != run.digest:
            raise UsageError(f"{plan.name}/{run.folder}: holds another run; choose another sweep.name=")
        runs[run.folder] = {
            "folder": run.folder, "arm": run.arm, "seed": run.seed, "levels": run.levels, "digest": run.digest,
        }  # fmt: skip
    levels = {key: list(dict.fromkeys(r["levels"].get(key) for r in runs.values())) for key in plan.factors}
    return {
        "ablate": __version__,
        "name": plan.name,
        "created": (old or {}).get("created") or files.now(),
        "question": plan.question,
        "smallest_effect": plan.sweep.smallest_effect,
        "analysis": plan.sweep.analysis,
        "command": list(plan.overrides),
        "factors": levels,
        "seeds": sorted({r["seed"] for r in runs.values()}),
        "base_digest": plan.base_digest,
        "runs": list(runs.values()),
    }


def drop_other_pilot(plan: Plan) -> None:
    """Remove the records of an earlier pilot of other length or settings: a pilot is for planning and is not kept."""
    folder = plan_folder(plan)
    if (folder / "plan.json").is_file() and files.holder_of(folder / "lock") is None:
        known = {r["folder"]: r["digest"] for r in read_plan(folder)["runs"]}
        if any(known.get(run.folder, run.digest) != run.digest for run in plan.runs):
            shutil.rmtree(folder)


def freeze(run: Run, folder: Path) -> None:
    """Write the run's resolved config and identity; what lies there already must be the same run.

    Raises:
        UsageError: the folder holds a run with another digest.
    """
    digest = folder / "digest"
    if digest.is_file() and digest.read_text().strip() != run.digest:
        raise UsageError(
            f"{folder}: holds another run (digest {digest.read_text().strip()}); choose another sweep.name="
        )
    files.write_text(folder / "config.yaml", yaml.safe_dump(run.config.tree(), sort_keys=False))
    files.write_text(digest, run.digest + "\n")


# libyaml's parser where PyYAML was built with it: ten times as fast, and a report reads hundreds of configs
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_config(folder: Path) -> Config:
    """The frozen config of a run folder.

    Raises:
        UsageError: it cannot be read, or this version of ablate takes no such configuration; names the file.
    """
    path = folder / "config.yaml"
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: is not a configuration")
    try:
        return parse(tree)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def read_plan(folder: Path) -> dict[str, Any]:
    """plan.json of a sweep's folder.

    Raises:
        UsageError: there is none, or it is no plan.
    """
    path = folder / "plan.json"
    if not path.is_file():
        raise UsageError(f"{folder}: no sweep (a sweep's folder holds plan.json, written before its first run)")
    document = files.read_json(path)
    runs = document.get("runs") if isinstance(document, dict) else None
    needed = {"folder", "arm", "seed", "levels", "digest"}
    if not isinstance(runs, list) or not all(isinstance(r, dict) and needed <= r.keys() for r in runs):
        raise UsageError(f"{path}: is not a plan; move it away, or run the sweep's command again elsewhere (output=)")
    return dict(document)


@dataclass(frozen=True)
class State:
    """What a run's own files say. `word` is new, running, stopped, failed or done."""

    word: str
    step: int
    max_steps: int
    error: str | None
    log: str | None


def state(folder: Path, max_steps: int) -> State:
    """The state of one run: done.json decides, then the lock, then how the last attempt ended."""
    rows = record.read_metrics(folder)
    return state_after(folder, int(rows[-1]["step"]) if rows else 0, record.attempts(folder), max_steps)


def state_after(folder: Path, step: int, tries: Sequence[record.Row], max_steps: int) -> State:
    """As `state`, of a run whose last recorded step and attempts are known already."""
    last = tries[-1] if tries else {}
    log = str(folder / "logs" / f"attempt-{last['attempt']}.log") if last else None
    if (folder / "done.json").is_file():
        word = "done"
    elif files.holder_of(folder / "lock") is not None:
        word = "running"
    elif not tries:
        word = "new"
    else:
        word = "failed" if last.get("outcome") == "failed" else "stopped"
    return State(word, step, max_steps, last.get("error"), log)
