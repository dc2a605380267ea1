"""Overrides or a sweep file -> a frozen list of runs. Imports no torch.

    python -m ablate.run -m clip=sym,asym tis=on,off seed=0,1

is a grid of 4 arms x 2 seeds = 8 runs in `outputs/clip_x_tis-<digest>/clip=sym,tis=on/seed=0` and so on. The sweep's
folder follows from its factors and from everything that does not vary, so the same command again finds its own runs,
more seeds or levels extend the sweep, and another learning rate is another sweep.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ablate.compose import Composer, build, replace_value
from ablate.config import Config, Sweep, parse, run_digest, whole_number
from ablate.errors import UsageError


@dataclass(frozen=True)
class Run:
    """One arm at one seed.

    Example: Run(arm="clip=sym,tis=on", seed=0, levels={"clip": "sym", "tis": "on"}, digest="3f0c...", config=...)
    """

    arm: str
    seed: int
    levels: dict[str, Any]
    digest: str
    config: Config = field(repr=False, compare=False)

    @property
    def folder(self) -> str:
        """Below the sweep's folder."""
        return f"{self.arm}/seed={self.seed}"


@dataclass(frozen=True)
class Plan:
    """A sweep before anything starts: what is asked, and every run that answers it.

    `base_digest` identifies all that does not vary between the runs; `merged` says which requested combinations were
    the same run under another name.
    """

    name: str
    sweep: Sweep
    factors: dict[str, tuple[Any, ...]]
    seeds: tuple[int, ...]
    base_digest: str
    overrides: tuple[str, ...]
    runs: tuple[Run, ...]
    merged: tuple[str, ...] = ()

    @property
    def question(self) -> str | None:
        return self.sweep.question

    @property
    def arms(self) -> dict[str, Run]:
        """The first run of every arm, by arm name."""
        first: dict[str, Run] = {}
        for run in self.runs:
            first.setdefault(run.arm, run)
        return first

    @property
    def config(self) -> Config:
        """Settings that hold for the whole sweep (launching, output, selection), as the first run has them."""
        return self.runs[0].config


# sections that say where and how a sweep is run
_NO_FACTORS = frozenset({"output", "launch", "validity", "sweep", "wandb"})


@dataclass(frozen=True)
class _Arm:
    label: str
    levels: dict[str, Any]
    config: Config
    digest: str


def make_plan(composer: Composer, arguments: Iterable[str]) -> Plan:
    """Resolve a command line (with or without `+sweep=NAME`) into its runs.

    Raises:
        UsageError: anything in it that is unknown, out of range or contradictory; nothing was started.
    """
    arguments = tuple(arguments)
    overrides = composer.parse(arguments)
    sweep = parse(composer.tree(overrides.fixed)).sweep
    fixed = (*sweep.base, *overrides.fixed)
    base = parse(composer.tree(fixed))
    swept = dict(overrides.swept)
    seeds = _seeds(swept.pop("seed", None), sweep.seeds, base.seed, overrides.fixed)
    factors: dict[str, Any] = {**sweep.factors, **swept}
    grid = [] if sweep.arms and not factors else [(None, levels) for levels in _grid(factors)]
    wanted = [*grid, *sweep.arms.items()]
    varying = sorted({key for _, changes in wanted for key in changes})
    if fixed_keys := [key for key in varying if key.split(".")[0] in _NO_FACTORS]:
        raise UsageError(f"{fixed_keys[0]}: holds for the whole sweep and cannot be a factor; give it one value")
    resolved = [_resolve(composer, fixed, varying, label, changes) for label, changes in wanted]
    arms, merged = _distinct(resolved)
    digest = base.digest(without={*varying, "seed"})
    name = sweep.name or _default_name(varying, digest)
    levels = {key: tuple(dict.fromkeys(arm.levels[key] for arm in arms)) for key in varying}
    runs = tuple(_run(arm, seed) for arm in arms for seed in seeds)
    return Plan(safe_name(name), sweep, levels, seeds, digest, arguments, runs, merged)


def pilot_plan(plan: Plan, steps: int) -> Plan:
    """`steps` steps of every arm at the first seed, under pilot/: what fails, fails before the resources are taken."""

    def shorten(run: Run) -> Run:
        tree = replace_value(run.config.tree(), "train.max_steps", steps)
        config = parse(replace_value(tree, "select.cap", None))
        return replace(run, config=config, digest=config.digest())

    runs = tuple(shorten(run) for run in plan.arms.values())
    return replace(plan, name=f"{plan.name}/pilot", seeds=plan.seeds[:1], runs=runs)


def _seeds(swept: Sequence[Any] | None, of_sweep: Sequence[int], base: int, fixed: Sequence[str]) -> tuple[int, ...]:
    """The command line's seeds, else the sweep file's, else the one of the base; each once, in the order given."""
    if swept is None and any(o.startswith("seed=") for o in fixed):
        return (base,)
    seeds = tuple(dict.fromkeys(swept if swept is not None else of_sweep)) or (base,)
    return tuple(whole_number("seed", seed) for seed in seeds)


def _grid(factors: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Every combination, the last factor varying fastest."""
    for key, values in factors.items():
        if not isinstance(values, (list, tuple)) or not values:
            raise UsageError(f"sweep.factors.{key}: must be a list with at least one level")
    for combination in itertools.product(*factors.values()):
        yield dict(zip(factors, combination, strict=True))


def _resolve(
    composer: Composer, fixed: Sequence[str], varying: Sequence[str], label: str | None, changes: Mapping[str, Any]
) -> _Arm:
    config = parse(build(composer, fixed, changes))
    levels = {key: _level_of(composer, fixed, config, key, changes) for key in varying}
    return _Arm(safe_name(label) if label else _label(levels), levels, config, config.digest(without=("seed",)))


def _level_of(composer: Composer, fixed: Sequence[str], config: Config, key: str, changes: Mapping[str, Any]) -> Any:
    """What an arm has at a varying key: a level's name, or a value in the form that the schema gave it."""
    if composer.options(key):
        return composer.level_name(key, changes[key]) if key in changes else composer.choices(fixed)[key]
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _label(levels: Mapping[str, Any]) -> str:
    """`clip=sym,tis=on`; a dotted key goes by its last part unless two would then look alike."""
    last = [key.rsplit(".", 1)[-1] for key in levels]
    names = [short if last.count(short) == 1 else key for key, short in zip(levels, last, strict=True)]
    return safe_name(",".join(f"{n}={v}" for n, v in zip(names, levels.values(), strict=True)) or "base")


def _distinct(arms: Iterable[_Arm]) -> tuple[list[_Arm], tuple[str, ...]]:
    """Arms that train differently, and a line for each that turned out to be another one under a second name."""
    kept: dict[str, _Arm] = {}
    labels: set[str] = set()
    merged: list[str] = []
    for arm in arms:
        if arm.digest not in kept:
            if arm.label in labels:
                raise UsageError(f"{arm.label}: two arms have this name; give sweep.arms distinct ones")
            labels.add(arm.label)
            kept[arm.digest] = arm
        elif (first := kept[arm.digest].label) == arm.label:
            merged.append(f"{arm.label} was asked for twice: one arm")
        else:
            merged.append(f"{arm.label} trains exactly what {first} trains: one arm")
    return list(kept.values()), tuple(dict.fromkeys(merged))


def _run(arm: _Arm, seed: int) -> Run:
    return Run(arm.label, seed, arm.levels, run_digest(arm.digest, seed), replace(arm.config, seed=seed))


def _default_name(varying: Sequence[str], digest: str) -> str:
    return f"{'_x_'.join(key.rsplit('.', 1)[-1] for key in varying) or 'single'}-{digest[:8]}"


def safe_name(text: str, limit: int = 80) -> str:
    """A folder name that needs no quoting: letters, digits and `._+=,-`; what was changed or cut gets a hash."""
    name = re.sub(r"[^A-Za-z0-9._+=,-]+", "-", text).lstrip(".-")
    if name == text and 0 < len(name) <= limit:
        return name
    mark = hashlib.sha256(text.encode()).hexdigest()[:6]
    return f"{name[: limit - 7]}-{mark}" if name else mark
