"""A real run with its mirror: what W&B holds is what was recorded, and a broken W&B changes nothing that is trained."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mirror_support import history, wait_for, wandb_folders

from ablate.record import read_metrics

pytestmark = pytest.mark.slow

SHORT = ["train.max_steps=3", "train.prompts_per_step=4", "eval.interval=3", "eval.prompts=8", "checkpoint.interval=3"]


def train(folder: Path, name: str, mode: str, **environment: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "ablate.run", f"sweep.name={name}", f"wandb.mode={mode}", *SHORT],
        cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "outputs" / name / "base" / "seed=0"


def learned(run: Path) -> list[dict[str, Any]]:
    clock = ("time", "job", "memory")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in read_metrics(run)]


def test_training_is_the_same_with_a_mirror_without_and_with_a_broken_one(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "wandb.py").write_text("raise ImportError('no wandb here')\n")
    without = train(tmp_path, "without", "disabled")
    mirrored = train(tmp_path, "mirrored", "offline")
    failing = train(tmp_path, "failing", "offline", PYTHONPATH=f"{broken}:{os.environ.get('PYTHONPATH', '')}")
    assert learned(without) == learned(mirrored) == learned(failing)
    assert not wandb_folders(without) and not (without / "logs" / "mirror.log").exists()
    wait_for(lambda: wandb_folders(mirrored) and len(history(wandb_folders(mirrored)[0])) == 4)
    seen = history(wandb_folders(mirrored)[0])
    for item, row in zip(seen, read_metrics(mirrored), strict=True):
        assert item["rollout_step"] == row["step"]
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
        assert {k: item.get(k) for k in numbers} == numbers and len(numbers) > (5 if row["step"] else 2)
        losses = [u["loss/total"] for u in row["updates"] or ()]
        assert not losses or math.isclose(item["update/loss/total"], sum(losses) / len(losses), rel_tol=1e-12)
    wait_for(lambda: (failing / "logs" / "mirror.log").read_text().count("W&B cannot be used (ImportError") == 1)
