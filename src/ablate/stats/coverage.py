"""How often do the intervals hold the truth? `python -m ablate.stats.coverage [--write docs/statistics.md]`

Simulated sweeps of known truth, through the same functions that analyse real ones. The contrast is the main effect of
the first factor in a grid of 2 x 2 arms. Imports no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ablate.errors import UsageError
from ablate.stats.blocks import Floats
from ablate.stats.doctable import markdown_table, rewrite
from ablate.stats.effects import BCA_FROM, BOOTSTRAP_FROM, POOLING_ALPHA
from ablate.stats.intervals import bca, bootstrap_t, contrast_fit, paired_t, pooling_p

ARMS = 4
WEIGHTS = np.array([-0.5, -0.5, 0.5, 0.5])  # arms sym/on, sym/off, asym/on, asym/off
SEEDS = (3, 8, 20)
SIMULATIONS = 20_000  # the Monte Carlo standard error of a coverage of 95% is 0.15%
BOOTSTRAPPED = 4_000  # 0.34%
COLLAPSE = 10.0  # a collapsed run ends this many standard deviations lower
FOLLOWED = "paired t where flagged"  # as the flag `pooled_ok` asks the reader to
_CHUNK = 500

Noise = np.random.Generator


@dataclass(frozen=True)
class World:
    """Where runs come from: errors [simulations, arms, seeds] around arm means of 0, and the contrast's true value."""

    name: str
    errors: Callable[[Noise, tuple[int, int, int]], Floats]
    truth: float


def _skewed(noise: Noise, shape: tuple[int, int, int]) -> Floats:
    """A long tail of bad runs: a negated exponential with mean 0 and standard deviation 1 (skewness -2)."""
    return 1.0 - noise.exponential(1.0, shape)


def _collapsing(noise: Noise, shape: tuple[int, int, int], share: Sequence[float]) -> Floats:
    """Normal errors, and of each arm's runs this share collapses."""
    fell = noise.random(shape) < np.array(share)[:, None]
    return noise.normal(size=shape) - COLLAPSE * fell


def _treated(values: Floats, untreated: Floats) -> Floats:
    """The last two arms of `values`, the first two of `untreated`."""
    return np.concatenate([untreated[:, :2], values[:, 2:]], axis=1)


def _shared_by_factor(noise: Noise, shape: tuple[int, int, int]) -> Floats:
    """The second factor does nothing: its two arms repeat each other's runs but for a tenth of the noise."""
    pairs = np.repeat(noise.normal(size=(shape[0], 2, shape[2])), 2, axis=1)
    return pairs + 0.1 * noise.normal(size=shape)


WORLDS = (
    World("normal", lambda noise, shape: noise.normal(size=shape), 0.0),
    World("skewed, all arms", _skewed, 0.0),
    World(
        "skewed, one level only",
        lambda noise, shape: _treated(_skewed(noise, shape), 0.3 * noise.normal(size=shape)),
        0.0,
    ),
    World(
        "one level 3 times as noisy",
        lambda noise, shape: noise.normal(size=shape) * np.array([1, 1, 3, 3])[:, None],
        0.0,
    ),
    World("10% of all runs collapse", lambda noise, shape: _collapsing(noise, shape, [0.1] * 4), 0.0),
    World(
        "10% collapse, one level only",
        lambda noise, shape: _collapsing(noise, shape, [0, 0, 0.1, 0.1]),
        -0.1 * COLLAPSE,
    ),
    World("the other factor is inert", _shared_by_factor, 0.0),
)  # fmt: skip


@dataclass(frozen=True)
class Coverage:
    """Share of intervals that hold the truth, and their median width in standard deviations of a run."""

    world: str
    seeds: int
    method: str
    covered: float
    width: float
    simulations: int


def simulate(world: World, seeds: int, simulations: int, key: int = 0) -> Floats:
    """Outcomes [simulations, arms, seeds]: what a seed does to all arms, plus the errors of the world."""
    noise = np.random.Generator(np.random.Philox(key=key))
    shared = noise.normal(0, 2.0, (simulations, 1, seeds))
    return shared + world.errors(noise, (simulations, ARMS, seeds))


def coverage(
    world: World, seeds: int, simulations: int = SIMULATIONS, bootstrapped: int = BOOTSTRAPPED
) -> list[Coverage]:
    """Coverage of every interval that a report would show at this number of seeds."""
    values = simulate(world, seeds, simulations)
    fit = contrast_fit(values, WEIGHTS)
    per_seed = np.einsum("mas,a->ms", values, WEIGHTS)
    pooled, paired = np.stack([fit.low, fit.high], axis=-1), paired_t(per_seed)
    flagged = pooling_p(values, WEIGHTS) <= POOLING_ALPHA
    found = [
        _covered(world, seeds, "pooled t", pooled),
        _covered(world, seeds, "paired t", paired),
        _covered(world, seeds, FOLLOWED, np.where(flagged[:, None], paired, pooled)),
    ]
    for method, interval, first in (("bootstrap-t", bootstrap_t, BOOTSTRAP_FROM), ("BCa", bca, BCA_FROM)):
        if seeds >= first and bootstrapped:
            parts = np.array_split(per_seed[:bootstrapped], -(-bootstrapped // _CHUNK))
            found.append(_covered(world, seeds, method, np.concatenate([interval(part) for part in parts])))
    return found


def _covered(world: World, seeds: int, method: str, limits: Floats) -> Coverage:
    holds = (limits[:, 0] <= world.truth) & (world.truth <= limits[:, 1])
    width = float(np.median(limits[:, 1] - limits[:, 0]))
    return Coverage(world.name, seeds, method, float(holds.mean()), width, len(limits))


METHODS = ("pooled t", FOLLOWED, "bootstrap-t", "BCa")


def table(simulations: int = SIMULATIONS, bootstrapped: int = BOOTSTRAPPED) -> str:
    """Coverage in percent by world (rows), method and number of seeds (columns), as Markdown."""
    shown = [(m, n) for m in METHODS for n in SEEDS if n >= {"bootstrap-t": BOOTSTRAP_FROM, "BCa": BCA_FROM}.get(m, 0)]
    rows = []
    for world in WORLDS:
        found = {(c.method, c.seeds): c for n in SEEDS for c in coverage(world, n, simulations, bootstrapped)}
        rows.append([world.name, *(f"{100 * found[key].covered:.1f}" if key in found else "-" for key in shown)])
    return markdown_table(["runs are", *(f"{m} n={n}" for m, n in shown)], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; with --write, put it into a page between its marks."""
    parser = argparse.ArgumentParser(prog="python -m ablate.stats.coverage", description=__doc__.splitlines()[0])
    parser.add_argument("--simulations", type=int, default=SIMULATIONS, help="sweeps per cell (default %(default)s)")
    parser.add_argument("--bootstrapped", type=int, default=BOOTSTRAPPED, help="of them also bootstrapped")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page")
    given = parser.parse_args(arguments)
    text = table(given.simulations, given.bootstrapped)
    print(text)
    try:
        rewrite(given.write, "coverage", text) if given.write else None
    except UsageError as mistake:
        print(f"ablate: {mistake}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
