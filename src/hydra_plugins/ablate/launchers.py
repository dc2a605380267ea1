"""The launchers that conf/hydra/launcher/*.yaml name."""

from hydra.plugins.launcher import Launcher

from ablate.launch.local import PlanOnLocalCores


class LocalLauncher(PlanOnLocalCores, Launcher):
    """`ablate.launch.local.PlanOnLocalCores` as a Hydra plugin."""
