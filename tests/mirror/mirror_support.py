"""Synthetic runs written by the real record, and W&B's files read back by W&B's own reader."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from ablate import files, record

SWEEP = "clip_x_tis-12345678"


def make_run(folder: Path, arm: str = "clip=sym,tis=on", seed: int = 0, **wandb: Any) -> Path:
    """A run folder as planning leaves it, below a sweep's folder with its plan.json."""
    run = folder / arm / f"seed={seed}"
    run.mkdir(parents=True)
    plan = folder / "plan.json"
    entries = files.read_json(plan)["runs"] if plan.is_file() else []
    levels = {"clip": "sym", "optim.lr": 2e-4, "sweep.note": f'{arm} "quoted", and longer than W&B lets a tag be; ü'}
    digest = f"{len(entries):016x}"
    entry = {"folder": f"{arm}/seed={seed}", "arm": arm, "seed": seed, "levels": levels, "digest": digest}
    files.write_json(plan, {"name": folder.name, "runs": [*entries, entry]})
    tree = {"seed": seed, "clip": {"name": "clip", "clip_low": 0.2}, "select": {"cap": None}, "wandb": wandb}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    (run / "digest").write_text(digest + "\n")
    return run


def write_step(run: Path, attempt: int, step: int) -> None:
    """A row with everything that rows hold: floats that need all their digits, nulls, texts, booleans, NaN."""
    updates = [
        {"global_step": 2 * step + k, "loss/total": math.sin(step + k) / 3, "optim/skipped": k == 1,
         "ratio/max": None if k else 1 + 1e-15, "ratio/p99": math.nan, "kl/mean": -0.0}
        for k in range(2)
    ]  # fmt: skip
    row = {
        "step": step, "global_step": 2 * step, "prompts_hash": "ab12", "weights_hash": None,
        "nested": {"a": {"b": step}},
        "reward/mean": (0.1 + attempt) / (step + 3), "length/mean": math.inf if step % 3 == 1 else 5.25,
        "heldout/greedy": 0.5 if step % 2 == 0 else None, "tokens": 2**53 - step, "updates": updates if step else None,
    }  # fmt: skip
    record.append_row(run, attempt, row)


def expected(row: dict[str, Any]) -> dict[str, Any]:
    """What W&B must hold of a row of metrics.jsonl, in other words than the mirror's."""
    out = {"rollout_step": row["step"], "nonfinite": len(row["nonfinite"]), "nested/a/b": row["nested"]["a"]["b"]}
    for key in ("attempt", "global_step", "reward/mean", "length/mean", "heldout/greedy", "tokens"):
        if row[key] is not None:
            out[key] = row[key]
    if row["updates"]:
        first, second = row["updates"]
        out["update/loss/total"] = (first["loss/total"] + second["loss/total"]) / 2
        out |= {"update/optim/skipped": 0.5, "update/ratio/max": first["ratio/max"], "update/kl/mean": 0.0}
    return out


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def records(folder: Path) -> list[dict[str, Any]]:
    """All records of a W&B folder's transaction log; also of one whose writer was killed."""
    command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json"]
    read: list[dict[str, Any]] = []
    for path in folder.glob("run-*.wandb"):
        with tempfile.TemporaryDirectory() as scratch:  # it writes a log where it is called
            done = subprocess.run([*command, path], cwd=scratch, capture_output=True, text=True, check=False)
        read += [json.loads(line) for line in done.stdout.splitlines()]
    return read


def history(folder: Path) -> list[dict[str, Any]]:
    return [r["history"]["item"] for r in records(folder) if r["type"] == "history"]


def without_clock(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if not k.startswith("_")} for item in items]


def wandb_folders(run: Path) -> list[Path]:
    return sorted((run / "wandb").glob("offline-run-*"))


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.1)
