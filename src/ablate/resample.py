"""How sure is the choice of a step? Bootstrap of the prompts within each rollout step, picking anew. Imports no torch.

The mean reward of a step is a sample: other prompts would have given another EMA and perhaps another reported step. The
rollouts of one prompt are alike, so prompts are resampled, never single rollouts. What the resampling cannot show is a
difference between seeds; it says only how firmly this run's own record points at its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ablate.config import Config
from ablate.errors import UsageError
from ablate.record import read_metrics
from ablate.select import curve, exported_steps

Floats = NDArray[np.float64]
DRAWS = 2000


@dataclass(frozen=True)
class Resampled:
    """How often each candidate would have been reported, and the standard errors of the means behind it.

    Example: Resampled(draws=2000, share={10: 0.0, 15: 0.12, 20: 0.88}, reward_se={1: .04, ...}, ema_se={1: .04, ...})

    `reward_se` is of a step's mean reward, `ema_se` of the EMA at it; both over prompts.
    """

    draws: int
    share: dict[int, float]
    reward_se: dict[int, float]
    ema_se: dict[int, float]


def resample_selection(
    rollouts: pd.DataFrame,
    exported: Iterable[int],
    *,
    span: int,
    interval: int,
    cap: int,
    draws: int = DRAWS,
    seed: int = 0,
) -> Resampled:
    """Re-pick the step `draws` times, each time with the prompts of every step drawn anew with replacement.

    Args:
        rollouts: columns step, prompt_id, reward; one row per rollout. Rewards that are missing are left out, as in the
            recorded mean.
        exported: steps with exported weights; candidates are those from twice `interval` up to `cap`, as in `select`.

    Raises:
        UsageError: there are no rollouts, or every step has a single prompt or row, so that means are all there is.
    """
    scored = rollouts.dropna(subset=["reward"])
    if scored.empty or not scored.duplicated("step").any():
        raise UsageError("no rollouts: only means by step exist, and a mean cannot be resampled by prompt")
    noise = np.random.Generator(np.random.Philox(key=seed))
    groups = scored.groupby(["step", "prompt_id"])["reward"].agg(["sum", "size"])
    steps = sorted(scored["step"].unique())
    means = np.stack([_redraw(groups.loc[step].to_numpy(dtype=float), draws, noise) for step in steps], axis=1)
    averages = ema_rows(means, span)
    candidates = [i for i, s in enumerate(steps) if s in set(exported) and 2 * interval <= s <= cap]
    # argmax takes the first of equals, and steps ascend: ties go to the earliest, as in select
    winners = averages[:, candidates].argmax(axis=1) if candidates else np.zeros(0, dtype=int)
    share = np.bincount(winners, minlength=len(candidates)) / draws
    return Resampled(
        draws,
        {int(steps[i]): float(x) for i, x in zip(candidates, share, strict=True)},
        {int(s): float(x) for s, x in zip(steps, means.std(axis=0, ddof=1), strict=True)},
        {int(s): float(x) for s, x in zip(steps, averages.std(axis=0, ddof=1), strict=True)},
    )


def _redraw(groups: Floats, draws: int, noise: np.random.Generator) -> Floats:
    """Mean rewards [draws] of one step with its prompts resampled; groups [prompts, 2] of reward sums and counts."""
    prompts = len(groups)
    times = noise.multinomial(prompts, np.full(prompts, 1 / prompts), size=draws)
    totals = times @ groups
    return np.asarray(totals[:, 0] / totals[:, 1])


def ema_rows(values: Floats, span: int) -> Floats:
    """`select.ema` along the last axis."""
    alpha = 2.0 / (span + 1.0)
    out = np.array(values, dtype=float)
    for i in range(1, out.shape[-1]):
        out[..., i] = alpha * out[..., i] + (1.0 - alpha) * out[..., i - 1]
    return out


def read_rollouts(run: Path, columns: Sequence[str] = ("step", "prompt_id", "reward")) -> pd.DataFrame:
    """The recorded rollouts of a run. A step that was redone after a kill may lie in two files: the newer one counts.

    Raises:
        UsageError: there are none, or a file cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    found: list[pd.DataFrame] = []
    # newest first, and of equally old ones the later name: the first file that has a step gives its rows
    for path in sorted(
        (run / "rollouts").glob("*.parquet"), key=lambda p: (p.stat().st_mtime_ns, p.name), reverse=True
    ):
        try:
            part = pq.read_table(path, columns=list(columns)).to_pandas()
        except (OSError, pa.ArrowException) as error:
            raise UsageError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None
        known = {int(s) for p in found for s in p["step"].unique()}
        found.append(part[~part["step"].isin(known)])
    if not found:
        raise UsageError(
            f"{run}: no rollouts were recorded, only means by step, and a mean cannot be resampled by prompt"
        )
    return pd.concat(found).sort_values("step", kind="stable", ignore_index=True)


def resample_run(run: Path, config: Config, draws: int = DRAWS) -> Resampled:
    """`resample_selection` of a run folder.

    Raises:
        UsageError: rollouts are missing, wholly or of steps that the curve has.
    """
    rollouts = read_rollouts(run)
    missing = sorted(set(curve(read_metrics(run))) - {int(s) for s in rollouts["step"].unique()})
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UsageError(
            f"{run}: no rollouts of step {', '.join(map(str, missing[:3]))}{more}; their means cannot be redrawn"
        )
    return resample_selection(
        rollouts, exported_steps(run),
        span=config.select.span, interval=config.export.interval, cap=config.selection_cap, draws=draws,
    )  # fmt: skip
