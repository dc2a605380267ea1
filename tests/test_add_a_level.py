"""CONTRIBUTING's worked example, followed to the letter: one function and one YAML add a level, nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources with the example's two files applied."""
    for name in ("src", "conf", "sweeps"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    function, level = (re.search(rf"```{kind}\n(.*?)```", text, re.S) for kind in ("python", "yaml"))
    assert function is not None
    assert level is not None
    with (tmp_path / "src/ablate/objective/surrogate.py").open("a") as stream:
        stream.write("\n\n" + function[1])
    (tmp_path / "conf/clip/above.yaml").write_text(level[1])
    return tmp_path


def python(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def test_the_new_level_is_planned_listed_and_bounded(checkout: Path) -> None:
    planned = python(checkout, "-m", "ablate.cli", "plan", "clip=sym,above")
    assert planned.returncode == 0, planned.stderr
    assert "above (clip_high=0.2)" in planned.stdout
    assert "no lower bound, 0.2 above" in python(checkout, "-m", "ablate.run", "--help").stdout
    refused = python(checkout, "-m", "ablate.cli", "plan", "clip=above", "clip.clip_high=-1")
    assert (refused.returncode, "clip.clip_high=-1: must be greater than or equal to 0" in refused.stderr) == (1, True)


def test_the_new_level_computes_what_it_says(checkout: Path) -> None:
    code = """
import torch
from ablate.objective.loss import Tokens, bind_objective, per_token
objective = bind_objective(
    clip={"name": "clip_above", "clip_high": 0.2}, tis={"name": "off", "renormalize": False},
    kl={"name": "none", "kl_coef": 0.0, "place": "loss"}, entropy_coef=0.0,
)
ratio = torch.tensor([[0.5, 1.5, 0.5, 1.5]], dtype=torch.float64)
credit = torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=torch.float64)
old = torch.zeros_like(ratio)
mask = torch.ones_like(ratio, dtype=torch.bool)
print(per_token(objective, Tokens(ratio.log(), old, old, credit, mask)).total.tolist())
"""
    done = python(checkout, "-c", code)
    assert done.returncode == 0, done.stderr
    # by hand: -min(0.5, 0.5), -min(1.5, 1.2), -min(-0.5, -0.5), -min(-1.5, -1.2)
    assert eval(done.stdout)[0] == pytest.approx([-0.5, -1.2, 0.5, 1.5])
