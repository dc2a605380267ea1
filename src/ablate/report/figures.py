"""Figures from the tidy tables, for notebooks. Imports no torch."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette: distinguishable with the common colour-vision deficiencies
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_TAG_COLOURS = {"cold-start": "#dddddd", "post-resume": "#fde0c5", "epoch-boundary": "#d9ead3"}


def reward_curves(steps: pd.DataFrame, runs: pd.DataFrame, columns: int = 2) -> Figure:
    """One panel per arm: mean reward with the range over seeds, EMA, held-out points, reported steps and tagged steps.

    Args:
        steps: `frames.steps_table`.
        runs: `frames.runs_table`.
    """
    arms = list(dict.fromkeys(steps["arm"]))
    rows = -(-len(arms) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(5.5 * columns, 3.2 * rows),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for k, arm in enumerate(arms):
        _arm_panel(axes.flat[k], arm, steps[steps["arm"] == arm], runs[runs["arm"] == arm], _COLOURS[k % len(_COLOURS)])
    for axis in list(axes.flat)[len(arms) :]:
        axis.set_axis_off()
    figure.supxlabel("rollout step")
    figure.supylabel("reward")
    axes.flat[0].legend(loc="lower right", fontsize="small")
    return figure


def _arm_panel(axis: Axes, arm: str, steps: pd.DataFrame, runs: pd.DataFrame, colour: str) -> None:
    drawn = steps[steps["step"] > 0]
    by_step = drawn.groupby("step")
    reward = by_step["reward/mean"]
    axis.fill_between(
        reward.mean().index, reward.min(), reward.max(), color=colour, alpha=0.2, label="range over seeds"
    )
    axis.plot(reward.mean(), color=colour, alpha=0.5, linewidth=0.8, label="mean reward")
    axis.plot(by_step["ema"].mean(), color=colour, linewidth=2, label="EMA of the reward")
    heldout = steps.dropna(subset=["heldout/greedy"]).groupby("step")["heldout/greedy"].mean()
    axis.plot(heldout, linestyle="none", marker="o", markersize=3, color="#444444", label="held-out, greedy")
    for label, step in _once("reported step", runs["reported_step"].dropna()):
        axis.axvline(float(step), color=colour, linestyle=":", label=label)
    _shade_tags(axis, drawn)
    axis.set_title(arm, fontsize="medium")


def _once(label: str, values: Any) -> list[tuple[str | None, Any]]:
    """Values with the label on the first only: one entry in the legend."""
    return [(label if k == 0 else None, v) for k, v in enumerate(values)]


def _shade_tags(axis: Axes, steps: pd.DataFrame) -> None:
    for tag, colour in _TAG_COLOURS.items():
        tagged = sorted(set(steps.loc[steps["tags"].str.contains(tag, regex=False), "step"]))
        for label, step in _once(tag, tagged):
            axis.axvspan(step - 0.5, step + 0.5, color=colour, zorder=0, label=label)
