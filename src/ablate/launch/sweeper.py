"""Plan the whole sweep, check it, write it down, launch it once. Plain class; src/hydra_plugins subclasses it."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from hydra.core.plugins import Plugins
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from ablate.compose import Composer
from ablate.errors import UsageError
from ablate.plan import Plan, make_plan, pilot_plan
from ablate.report.tables import finding_lines
from ablate.resume import refuse_untrainable
from ablate.runs import drop_other_pilot, plan_folder
from ablate.validity import check_plan, read_pilot, refusals


class SweepEnded(Exception):
    """A sweep was carried out; `code` is what the process is to end with."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


class PlanLauncher(Protocol):
    """What carries out a plan; returns the sweep's exit code."""

    def launch_plan(self, plan: Plan) -> int: ...


def checked_plan(composer: Composer, arguments: list[str]) -> Plan:
    """The plan of a command line with its findings printed.

    Raises:
        UsageError: a finding refuses it; every refusal is in the message with its remedy.
    """
    plan = make_plan(composer, arguments)
    findings = check_plan(plan, read_pilot(plan_folder(plan)))
    refused = refusals(findings)
    for line in finding_lines([f for f in findings if f not in refused]):
        print(line, file=sys.stderr)
    if refused:
        lines = "\n".join(finding_lines(refused))
        ids = ",".join(dict.fromkeys(f.id for f in refused))
        raise UsageError(
            f"this plan cannot answer its question; nothing was launched\n{lines}\n"
            f"(to run it all the same: 'validity.allow=[{ids}]')"
        )
    return plan


class PlanningSweeper:
    """Hydra's sweeper interface over `make_plan` and one `launch_plan`."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._composer = Composer(hydra_context.config_loader, config.hydra.job.config_name)
        launcher: Any = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        if not hasattr(launcher, "launch_plan"):
            raise UsageError(
                f"hydra/launcher={config.hydra.runtime.choices['hydra/launcher']}: cannot carry out a plan; use local"
            )
        self._launcher = launcher

    def sweep(self, arguments: list[str]) -> None:
        """Carry out one command line.

        Raises:
            SweepEnded: always, with the sweep's exit code: Hydra has no other way to return one.
        """
        plan = checked_plan(self._composer, arguments)
        for line in plan.merged:
            print(line, file=sys.stderr)
        if plan.config.launch.pilot:
            plan = pilot_plan(plan, plan.config.launch.pilot)
            drop_other_pilot(plan)
        for run in plan.arms.values():
            refuse_untrainable(run.config)
        raise SweepEnded(self._launcher.launch_plan(plan))
