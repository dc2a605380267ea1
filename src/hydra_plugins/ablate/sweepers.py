"""The sweeper that conf/hydra/sweeper/ablate.yaml names."""

from hydra.plugins.sweeper import Sweeper

from ablate.launch.sweeper import PlanningSweeper


class AblateSweeper(PlanningSweeper, Sweeper):
    """`ablate.launch.sweeper.PlanningSweeper` as a Hydra plugin."""
