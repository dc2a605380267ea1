"""Stages other than training import no torch: a login node plans, selects and reports in a second."""

from __future__ import annotations

import ast
import subprocess
import sys

MODULES = [
    "ablate.run", "ablate.cli", "ablate.config", "ablate.compose", "ablate.plan", "ablate.validity", "ablate.record",
    "ablate.runs", "ablate.resume", "ablate.select", "ablate.files", "ablate.code", "ablate.base", "ablate.task.base",
    "ablate.task.reverse", "ablate.rollout.types", "ablate.launch.local", "ablate.launch.sweeper",
    "ablate.launch.progress", "ablate.launch.worker", "ablate.report.tables", "hydra_plugins.ablate.sweepers",
    "hydra_plugins.ablate.launchers", "ablate.mirror", "ablate.sync", "ablate.wandb_view", "ablate.stats",
    "ablate.stats.coverage", "ablate.resample", "ablate.selection_study", "ablate.validity.record_checks",
    "ablate.report.frames", "ablate.report.figures", "ablate.report.document",
]  # fmt: skip


HEAVY = ("torch", "deepspeed", "transformers", "vllm", "wandb")


def loaded(code: str, among: tuple[str, ...] = HEAVY) -> list[str]:
    """Which of the modules `among` a fresh interpreter holds after `code`."""
    program = f"{code}\nimport sys; print(sorted(set({among!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return list(ast.literal_eval(done.stdout.splitlines()[-1]))


def test_importing_the_stages_leaves_torch_alone() -> None:
    guilty = (
        [module for module in MODULES if loaded(f"import {module}")] if loaded(f"import {', '.join(MODULES)}") else []
    )
    assert guilty == []


def test_planning_leaves_torch_alone() -> None:
    assert (
        loaded("from ablate.cli import main; assert main(['plan', 'clip=sym,asym', 'tis=on,off', 'seed=0,1']) == 0")
        == []
    )


def test_the_objective_imports_torch_alone() -> None:
    others = ("deepspeed", "transformers", "hydra", "pydantic", "ablate.config")
    assert loaded("import ablate.objective.loss, ablate.objective.metrics", others) == []
