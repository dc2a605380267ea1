"""Effects of factors with honest uncertainty, and the seeds they take. Pure functions on tidy tables; imports no torch.

A table is a pandas DataFrame with one row per run: a column for each factor, `seed`, and outcome columns. Outcomes may
be NaN. What the numbers mean, and how often the intervals hold the truth, is in docs/statistics.md.
"""

from ablate.stats.blocks import (
    Blocks,
    arm_correlation,
    complete_blocks,
    iqm,
    restricted_steps,
    threshold_summary,
)
from ablate.stats.effects import Effect, effects, effects_frame, holm, interactions, is_grid, main_effects
from ablate.stats.power import (
    power_table,
    power_to_detect,
    sd_upper,
    seeds_needed,
    smallest_detectable_effect,
)

__all__ = [
    "Blocks", "Effect", "arm_correlation", "complete_blocks", "effects", "effects_frame", "holm", "interactions", "iqm",
    "is_grid", "main_effects", "power_table", "power_to_detect", "restricted_steps", "sd_upper", "seeds_needed",
    "smallest_detectable_effect", "threshold_summary",
]  # fmt: skip
