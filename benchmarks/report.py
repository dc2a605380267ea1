"""Time `ablate report` on invented sweeps of 50, 100 and 200 runs of 1,000 rows: python benchmarks/report.py

The sweeps are written by tests/fake_sweep.py through the real writers, 10 arms at 5, 10 and 20 seeds. Each is reported
by a process of its own with one thread; its wall time and peak memory are the operating system's. The aims: 200 runs in
under 20 s and 1 GB, and linear, which is to say that a run more costs as much at 200 as at 50.

    python benchmarks/report.py --keep /tmp/sweeps   # write the sweeps once, and time the same ones again next time
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fake_sweep import grid, write_sweep  # noqa: E402

ARMS = grid(clip=["sym", "asym", "asym_low", "dual", "cispo"], tis=["on", "off"])
SEEDS = (5, 10, 20)
AIM_SECONDS, AIM_MIB = 20.0, 1024.0
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Timing:
    """One report: wall seconds and peak resident memory of its process."""

    runs: int
    seconds: float
    mib: float


def reward(arm: str, seed: int, step: int) -> float:
    """A curve that rises and levels, a little apart for each arm, with the noise of 128 rollouts."""
    level = 0.6 + 0.01 * (sum(arm.encode()) % 7)
    noise = np.random.default_rng((sum(arm.encode()), seed, step)).normal(0, 0.04)
    return float(np.clip(level - 0.4 * np.exp(-step / 150) + noise, 0, 1))


def generate(folder: Path, seeds: int, steps: int) -> None:
    """Write a sweep unless it lies there already."""
    if not (folder / "plan.json").is_file():
        begin = time.perf_counter()
        write_sweep(folder, ARMS, range(seeds), reward, steps=steps, interval=50, sweep={"smallest_effect": 0.02})
        print(f"wrote {folder} in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)


def time_report(folder: Path, runs: int, formats: str) -> Timing:
    """Run the report in a process of its own; its output goes beside the sweep.

    Raises:
        SystemExit: the report failed; its last words are printed.
    """
    program = "import sys; from ablate.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "report", str(folder), "--format", formats]
    with (folder.parent / f"{folder.name}.log").open("w+") as log:
        begin = time.perf_counter()
        child = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **ONE_THREAD})
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            log.seek(0)
            raise SystemExit(f"{' '.join(command[3:])} ended with {child.returncode}: {log.read()[-2000:]}")
    return Timing(runs, seconds, usage.ru_maxrss / 1024)


def show(found: Sequence[Timing]) -> bool:
    """Print the table and whether the aims are met."""
    print(f"{'runs':>6} {'seconds':>8} {'per run':>8} {'peak MiB':>9}")
    for t in found:
        print(f"{t.runs:>6} {t.seconds:>8.2f} {t.seconds / t.runs:>8.4f} {t.mib:>9.0f}")
    last = found[-1]
    print(f"aim: {last.runs} runs in under {AIM_SECONDS:.0f} s and {AIM_MIB:.0f} MiB")
    if len(found) > 2:
        first, middle = found[0], found[1]
        early = (middle.seconds - first.seconds) / (middle.runs - first.runs)
        late = (last.seconds - middle.seconds) / (last.runs - middle.runs)
        ratio = f"{late / early:.2f}x"
        print(f"a run more costs {1000 * early:.0f} ms up to {middle.runs}, {1000 * late:.0f} ms beyond: {ratio}")
    return last.seconds < AIM_SECONDS and last.mib < AIM_MIB


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate, time, print; 0 if the largest sweep meets its aims."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS, help="of 10 arms (default 5 10 20)")
    parser.add_argument("--steps", type=int, default=1000, help="rows of each run (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="the fastest of them counts (default %(default)s)")
    parser.add_argument("--format", default="md,csv", help="of the report (default %(default)s)")
    parser.add_argument("--keep", type=Path, help="a folder for the sweeps, reused if they lie there")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        home = given.keep or Path(scratch)
        found = []
        for seeds in given.seeds:
            folder = home / f"runs-{seeds * len(ARMS)}x{given.steps}"
            generate(folder, seeds, given.steps)
            rounds = [time_report(folder, seeds * len(ARMS), given.format) for _ in range(given.rounds)]
            found.append(min(rounds, key=lambda t: t.seconds))
        return 0 if show(found) else 1


if __name__ == "__main__":
    sys.exit(main())
