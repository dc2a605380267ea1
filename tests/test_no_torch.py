"""Stages other than training import no torch: a login node plans, selects and reports in a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = [
    "ablate.run", "ablate.cli", "ablate.config", "ablate.compose", "ablate.plan", "ablate.validity", "ablate.record",
    "ablate.runs", "ablate.resume", "ablate.select", "ablate.files", "ablate.code", "ablate.base", "ablate.task.base",
    "ablate.task.reverse", "ablate.rollout.types", "ablate.launch.local", "ablate.launch.sweeper",
    "ablate.launch.progress", "ablate.launch.worker", "ablate.report.tables", "hydra_plugins.ablate.sweepers",
    "hydra_plugins.ablate.launchers",
]  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_importing_it_leaves_torch_alone(module: str) -> None:
    heavy = "{'torch', 'deepspeed', 'transformers', 'vllm', 'wandb'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_planning_leaves_torch_alone() -> None:
    code = (
        "import sys; from ablate.cli import main; "
        "assert main(['plan', 'clip=sym,asym', 'tis=on,off', 'seed=0,1']) == 0; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_objective_imports_torch_alone() -> None:
    code = "import sys, ablate.objective.loss, ablate.objective.metrics; print(sorted({'deepspeed', 'transformers', 'hydra', 'pydantic', 'ablate.config'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
