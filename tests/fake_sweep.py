"""Invented sweeps of known truth, written by the real planner and the real writers of records. Imports no torch.

    write_sweep(tmp_path / "sweep", grid(clip=["sym", "asym"], tis=["on", "off"]), range(4), curve, steps=40)

`curve(arm, seed, step)` is the mean training reward of rollout step 1..steps. Whatever else a row holds is that of a
healthy run of the default; `changes` replaces single keys, by a value or by a function of (arm, seed, step):

    write_sweep(folder, arms, seeds, curve, **{"length/truncated_share": 0.3, "mismatch/k3": lambda a, s, step: ...})
    write_sweep(folder, arms, seeds, curve, updates=lambda arm, seed, step: [update(**{"optim/grad_norm": 9.0})])
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml

from ablate import files, record
from ablate.cli import composer
from ablate.code import code_version
from ablate.plan import Plan, Run, make_plan
from ablate.runs import freeze, write_plan

Arms = Mapping[str, Mapping[str, Any]]
Curve = Callable[[str, int, int], float | None]
Seeds = Iterable[int]

_PHASES = {"generate": 0.06, "train": 0.18, "sync": 0.005, "evaluate": 0.05, "export": 0.001}


def grid(**factors: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Every combination under the name the planner gives it: grid(clip=["sym"]) is {"clip=sym": {"clip": "sym"}}."""
    combinations = [dict(zip(factors, c, strict=True)) for c in itertools.product(*factors.values())]
    return {",".join(f"{k}={v}" for k, v in levels.items()): levels for levels in combinations}


def make_fake_plan(
    folder: Path, arms: Arms, seeds: Seeds, *, steps: int = 40, interval: int = 5,
    overrides: Sequence[str] = (), **sweep: Any,
) -> Plan:  # fmt: skip
    """The plan of these arms, planned as a sweep file would be; `sweep` adds its keys (question, smallest_effect)."""
    levels = {key: list(dict.fromkeys(a[key] for a in arms.values() if key in a)) for a in arms.values() for key in a}
    is_grid = grid(**levels) == {name: dict(a) for name, a in arms.items()}
    design = {"factors": levels} if is_grid else {"arms": {name: dict(a) for name, a in arms.items()}}
    base = [
        f"train.max_steps={steps}", f"export.interval={interval}", f"eval.interval={interval}",
        f"checkpoint.interval={interval}",
    ]  # fmt: skip
    tree = {"name": folder.name, "seeds": list(seeds), "base": base, **design, **sweep}
    with tempfile.TemporaryDirectory() as extra:
        (Path(extra) / "sweep").mkdir()
        (Path(extra) / "sweep" / "fake.yaml").write_text("# invented\n" + yaml.safe_dump(tree, sort_keys=False))
        with composer(extra) as source:
            return make_plan(source, ["+sweep=fake", f"output='{folder.parent}'", *overrides])


def write_sweep(
    folder: Path, arms: Arms, seeds: Seeds, curve: Curve, *,
    heldout: Curve | None = None, steps: int = 40, interval: int = 5,
    stops: Mapping[tuple[str, int], int] | None = None, rollouts: bool = False,
    overrides: Sequence[str] = (), sweep: Mapping[str, Any] | None = None, **changes: Any,
) -> Plan:  # fmt: skip
    """Write plan.json and every run's folder, as a finished sweep leaves them; returns the plan.

    Args:
        arms: levels of each arm by its name (`grid` makes a full factorial).
        curve: mean reward of (arm, seed, step); None is a step without any scored rollout.
        heldout: held-out score of (arm, seed, step), asked for at step 0 and every `interval`; by default the curve.
        stops: (arm, seed) -> last recorded step of runs that were stopped; 0 for one that never started.
        rollouts: also write rollouts/*.parquet, with rewards 0/1 whose mean is the curve's up to rounding.
        overrides: further overrides of every run, such as `optim.lr=1e-4`.
        sweep: further keys of the sweep file (question, smallest_effect, analysis).
        changes: keys of a metrics row -> value, or function of (arm, seed, step); rows of steps from 1 on.
    """
    plan = make_fake_plan(folder, arms, seeds, steps=steps, interval=interval, overrides=overrides, **dict(sweep or {}))
    # the records are not precious: 200 runs of 1,000 rows would otherwise wait for the disk 200,000 times
    with patch("os.fsync"):
        write_plan(plan)
        for run in plan.runs:
            last = (stops or {}).get((run.arm, run.seed), steps)
            _write_run(folder / run.folder, run, curve, heldout or curve, last, rollouts, changes)
    return plan


def _write_run(
    folder: Path, run: Run, curve: Curve, heldout: Curve, last: int, rollouts: bool, changes: Mapping[str, Any]
) -> None:
    folder.mkdir(parents=True)
    freeze(run, folder)
    config = run.config
    if last == 0:
        return
    files.write_json(folder / "code.json", code_version())
    attempt = record.start_attempt(folder, None)
    pending: list[record.Row] = []
    for step in range(last + 1):
        evaluated = step % config.eval.interval == 0 or step == config.train.max_steps
        score = heldout(run.arm, run.seed, step) if evaluated else None
        reward = curve(run.arm, run.seed, step) if step else None
        row = metrics_row(run, step, reward, score)
        for key, change in changes.items() if step else ():
            row[key] = change(run.arm, run.seed, step) if callable(change) else change
        record.append_row(folder, attempt, row)
        pending += rollout_rows(run, step, reward) if rollouts and reward is not None else []
        if pending and (step % config.checkpoint.interval == 0 or step == last):
            record.write_rollouts(folder, pending[0]["step"], step, pending)
            pending = []
        if step and step % config.export.interval == 0:
            (folder / "export" / f"step_{step}").mkdir(parents=True)
    done = last >= config.train.max_steps
    if done:
        files.write_json(folder / "done.json", {"outcome": "done", "last_step": last, "time": files.now()})
    record.end_attempt(folder, attempt, "done" if done else "stopped", last)


def metrics_row(run: Run, step: int, reward: float | None, heldout: float | None) -> record.Row:
    """One row as train.py writes it, of a healthy run of the default task; at step 0 only the evaluation."""
    p = 0.0 if reward is None else min(max(reward, 0.0), 1.0)
    spread = (p * (1 - p)) ** 0.5
    drawn = {
        "global_step": 2 * step, "epoch": 0, "policy_version": step - 1, "memory/host_peak_mib": 900.0,
        "memory/device_peak_mib": None, "prompts_hash": record.hash_ids((run.seed, step)),
        "reward/mean": reward, "reward/std": spread, "reward/min": 0.0, "reward/max": 1.0,
        "reward/groups_effective": min(1.0, 2 * spread), "reward/excluded": 0.0, "reward/excluded_share": 0.0,
        "advantage/abs_mean": spread / 2, "advantage/min": -1.0, "advantage/max": 1.0,
        "advantage/nonzero_share": min(1.0, 2 * spread),
        "length/mean": 5.0, "length/std": 1.1, "length/min": 3.0, "length/max": 6.0, "length/truncated_share": 0.02,
        "rollout/duplicate_share": 0.4,
        "mismatch/rho_mean": 1.0001, "mismatch/rho_std": 0.0035, "mismatch/rho_median": 1.0,
        "mismatch/rho_p99": 1.013, "mismatch/rho_max": 1.02, "mismatch/share_over_cap": 0.0,
        "mismatch/share_under_inverse_cap": 0.0, "mismatch/abs_log_rho_mean": 0.0016, "mismatch/k1": -8e-5,
        "mismatch/k3": 6e-6, "mismatch/ess": 0.99999, "mismatch/tokens": 640.0, "mismatch/missing_tokens": 0.0,
        "updates": [update(global_step=2 * step - 1), update(global_step=2 * step)],
    }  # fmt: skip
    rest = {
        "heldout/greedy": heldout, "heldout/prompts": None if heldout is None else 200,
        "weights_hash": hash_of(run, step) if step and step % run.config.export.interval == 0 else None,
        **{f"time/{phase}": seconds if step else None for phase, seconds in _PHASES.items()},
    }  # fmt: skip
    return {"step": step, **(drawn if step else dict.fromkeys(drawn)), **rest}


def hash_of(run: Run, step: int) -> str:
    """Weights differ between any two runs and steps."""
    return hashlib.sha256(f"{run.digest} {step}".encode()).hexdigest()[:16]


def update(**changes: Any) -> dict[str, Any]:
    """One optimizer update as a row's `updates` holds it, with changes such as update(**{"clip/fraction": 0.1})."""
    healthy = {
        "global_step": 1, "loss/total": -0.01, "ratio/min": 0.6, "ratio/max": 1.6, "ratio/p99": 1.2,
        "clip/fraction_low": 0.03, "clip/fraction_high": 0.02, "clip/fraction": 0.05, "clip/fraction_dual": 0.0,
        "tis/weight_mean": 1.0, "tis/weight_min": 1.0, "tis/weight_max": 1.0, "tis/ess": 1.0,
        "tis/dropped_tokens": 0.0, "tis/dropped_sequences": 0.0,
        "reduction/denominator": 480.0, "reduction/num_sequences": 80.0, "reduction/scale": 1.34,
        "reduction/tokens": 640.0, "reduction/masked_sequences": 0.0,
        "kl/mean": 0.0, "entropy/mean": 0.7, "optim/grad_norm": 0.8, "optim/lr": 2e-4, "optim/skipped": False,
        "optim/idle": False,
    }  # fmt: skip
    return healthy | changes


def rollout_rows(run: Run, step: int, reward: float, prompts: int = 16, group: int = 8) -> list[record.Row]:
    """A step's rollouts: each prompt has a difficulty of its own, so the rewards of one group are alike."""
    noise = np.random.default_rng((run.seed, step))
    ease = np.clip(reward + noise.uniform(-0.4, 0.4, prompts), 0.0, 1.0)
    return [
        {
            "step": step, "prompt_id": step * prompts + p, "sample": k, "prompt_ids": [1], "response_ids": [2],
            "logprobs": [-0.1], "prompt": "1=", "response": "1",
            "reward": float(noise.random() < ease[p]), "advantage": 0.0,
            "finish_reason": "stop", "policy_version": step - 1,
        }
        for p in range(prompts)
        for k in range(group)
    ]  # fmt: skip
