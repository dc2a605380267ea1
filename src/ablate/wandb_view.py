"""What W&B is told of a run, from its records alone: names, tags, config and rows of numbers. Imports no wandb."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from ablate import files

AXIS = "rollout_step"


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """One row of metrics.jsonl as W&B gets it: numbers under the record's keys; nulls, texts and lists are left out.

    `step` goes by the name of the axis; `updates` becomes the mean over the updates that have a value, under
    `update/<key>`; `nonfinite` becomes the number of values that were not finite.
    """
    flat = _numbers({key: value for key, value in row.items() if key not in ("step", "updates", "nonfinite")})
    updates = [_numbers(update) for update in row.get("updates") or ()]
    for key in dict.fromkeys(key for update in updates for key in update if key != "global_step"):
        values = [update[key] for update in updates if key in update]
        flat[f"update/{key}"] = math.fsum(values) / len(values)
    return {AXIS: int(row["step"]), **flat, "nonfinite": len(row.get("nonfinite") or ())}


def _numbers(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
            flat[f"{prefix}{key}"] = value
    return flat


@dataclass(frozen=True)
class Identity:
    """What W&B calls one run of a sweep. `id` follows from the sweep's name and the run's digest: attempts share it."""

    id: str
    name: str
    group: str
    job_type: str
    project: str
    entity: str | None
    tags: tuple[str, ...]
    config: dict[str, Any]


def identity(folder: Path) -> Identity:
    """Read from the run's config.yaml and digest, and from the plan.json above it if there is one."""
    tree: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    digest = (folder / "digest").read_text(encoding="utf-8").strip()
    sweep, entry = _in_plan(folder)
    arm, seed = str(entry.get("arm", folder.parent.name)), entry.get("seed", tree.get("seed"))
    settings = tree.get("wandb") or {}
    levels = [f"{key}={level}" for key, level in entry.get("levels", {}).items()]
    return Identity(
        id=f"{digest}-{hashlib.sha256(sweep.encode()).hexdigest()[:8]}",
        name=_short(f"{arm}/seed={seed}", 128),
        group=_short(sweep, 128),
        job_type=_short(arm, 128),
        project=settings.get("project") or "ablate",
        entity=settings.get("entity"),
        tags=tuple(dict.fromkeys(_short(tag, 64) for tag in (*levels, f"seed={seed}", *settings.get("tags", ())))),
        config={**tree, "arm": arm, "digest": digest},
    )


def _in_plan(folder: Path) -> tuple[str, dict[str, Any]]:
    """The sweep's name and the run's entry in its plan.json."""
    for above in folder.resolve().parents[:3]:
        if (above / "plan.json").is_file():
            plan = files.read_json(above / "plan.json")
            return str(plan["name"]), next((r for r in plan["runs"] if above / r["folder"] == folder.resolve()), {})
    return folder.resolve().parent.parent.name, {}


def _short(text: str, limit: int) -> str:
    """W&B refuses longer ones: cut, with a mark that keeps two of them apart."""
    return text if len(text) <= limit else f"{text[: limit - 7]}~{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def written_at(row: Mapping[str, Any]) -> dict[str, float]:
    """When the row was written, in W&B's own column: not when the mirror saw it."""
    try:
        return {"_timestamp": datetime.fromisoformat(row["time"]).timestamp()}
    except (KeyError, TypeError, ValueError):
        return {}
