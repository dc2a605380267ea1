"""Time one rollout step of the default beside TRL's GRPOTrainer: `make bench`.

Contenders, each a long-lived process with one thread, all on the same core; only one of them works at a time:

    ablate      ablate_worker.py, DeepSpeed ZeRO-3 with one rank        (this environment)
    trl_zero3   trl_worker.py --zero3                                   (benchmarks/.venv-trl)
    trl         trl_worker.py, no DeepSpeed                             (benchmarks/.venv-trl)

A step is everything from prompts to updated weights: 16 prompts x 8 samples generated, scored, and two
updates over all 128 sequences (protocol.Settings). Rounds go A B C A B C ..., so that whatever else the
machine does falls on all; a ratio is taken within a round, and its median, minimum and maximum over the
rounds are printed. The first `--warmup` rounds are not counted. Only ratios carry over to another machine.

Protocol: a worker is started with `--inputs FOLDER --scratch FOLDER --port N`, and speaks JSON lines.

    FOLDER/model/          the supervised base: config, safetensors and tokenizer (loads with from_pretrained)
    FOLDER/prompts.jsonl   rows {"prompt": "1234=", "answer": "4321"}, a multiple of 16
      Both are written by `ablate_worker.py --prepare FOLDER`, which then exits; `--inputs` here skips that.

    worker -> driver   {"event": "ready", "engine": "DeepSpeedEngine", "versions": {"torch": "2.13.0", ...}}
                       once loaded; no step is running.
    driver -> worker   step
    worker -> driver   {"event": "step", "seconds": {...}, "reward": 0.21, "length": 4.4}
                       seconds: generation, scoring (rewards, advantages, old log-probabilities), training
                       (forward, backward, clipping, optimiser), sync (weights to the sampler) and overhead
                       (the rest), which add up to `total`; and `cpu`, the processor time (PhaseClock).
                       reward: mean of the 128; length: mean response length in tokens, end token included.
    driver -> worker   stop, or the pipe closes: the worker exits.

A worker may print anything to stderr (kept beside the results); protocol.Channel moves stdout there too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from protocol import PHASES, Settings

HERE = Path(__file__).resolve().parent
TRL_PYTHON = str(HERE / ".venv-trl" / "bin" / "python")
COMMANDS: dict[str, list[str]] = {
    "ablate": [sys.executable, str(HERE / "ablate_worker.py")],
    "trl_zero3": [TRL_PYTHON, str(HERE / "trl_worker.py"), "--zero3"],
    "trl": [TRL_PYTHON, str(HERE / "trl_worker.py")],
}
AIMS = (("ablate", "trl_zero3", 0.6), ("ablate", "trl", 1.0), ("trl_zero3", "trl", None))
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
QUIET = 0.9  # below this share of processor time in wall time, others were using the core
Step = dict[str, Any]


@dataclass
class Contender:
    """A worker process, seen from the driver."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    ready: dict[str, Any]

    @classmethod
    def start(cls, name: str, port: int, folders: tuple[Path, Path], core: int, log: Path) -> Contender:
        """Start the worker on `core` and wait until it has loaded; folders are (inputs, scratch)."""
        arguments = ["--inputs", str(folders[0]), "--scratch", str(folders[1] / name), "--port", str(port)]
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [*COMMANDS[name], *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | ONE_THREAD | OFFLINE,
            )
        os.sched_setaffinity(process.pid, {core})
        contender = cls(name, process, log, {})
        contender.ready = contender.hear("ready")
        return contender

    def step(self) -> Step:
        """Have it do one rollout step."""
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self.hear("step")

    def hear(self, event: str) -> Step:
        """The next message, which must be `event`; anything else ends the benchmark with the log's end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        message: Step = json.loads(line) if line.startswith("{") else {}
        if message.get("event") != event:
            tail = "\n".join(self.log.read_text().splitlines()[-15:])
            raise SystemExit(f"{self.name}: expected {event!r}, got {line!r}. The end of {self.log}:\n{tail}")
        return message

    def stop(self) -> None:
        """Ask it to leave, and insist after a while."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count")
    parser.add_argument("--warmup", type=int, default=5, help="rounds before them")
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--inputs", type=Path, help="folder with model/ and prompts.jsonl to use")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the core to use")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    return parser.parse_args(arguments)


def prepare_inputs(folder: Path) -> Path:
    """Have the ablate side write the base and the prompts that every contender loads."""
    command = [*COMMANDS["ablate"], "--prepare", str(folder)]
    subprocess.run(command, check=True, env=os.environ | ONE_THREAD | OFFLINE)
    return folder


def run_rounds(contenders: list[Contender], rounds: int, warmup: int) -> dict[str, list[Step]]:
    """Interleaved rounds: per contender the steps that count, in order."""
    steps: dict[str, list[Step]] = {contender.name: [] for contender in contenders}
    for number in range(warmup + rounds):
        for contender in contenders:
            step = contender.step()
            if number >= warmup:
                steps[contender.name].append(step)
    return steps


def seconds(steps: list[Step], key: str) -> list[float]:
    return [step["seconds"][key] for step in steps]


def ratio(steps: dict[str, list[Step]], above: str, below: str, key: str) -> dict[str, float]:
    """Per-round ratios of two contenders' seconds: median, min and max."""
    pairs = zip(seconds(steps[above], key), seconds(steps[below], key), strict=True)
    values = [first / second for first, second in pairs]
    return {"median": median(values), "min": min(values), "max": max(values)}


def summarise(steps: dict[str, list[Step]]) -> dict[str, Any]:
    """Medians per contender, and the ratios with their aims."""
    keys = ("total", "cpu", *PHASES, "overhead")
    medians = {name: {key: median(seconds(rows, key)) for key in keys} for name, rows in steps.items()}
    for name, rows in steps.items():
        medians[name] |= {key: sum(row[key] for row in rows) / len(rows) for key in ("reward", "length")}
    ratios = [
        {"of": f"{above} / {below}", "aim": aim, "wall": ratio(steps, above, below, "total")}
        | {"cpu": ratio(steps, above, below, "cpu")}
        for above, below, aim in AIMS
        if above in steps and below in steps
    ]
    return {"medians": medians, "ratios": ratios}


def show(summary: dict[str, Any], rounds: int) -> None:
    """Print the summary for a person."""
    want = Settings()
    print(f"\none rollout step: {want.sequences} sequences, {want.updates} updates; median of {rounds}, ms")
    keys = ("total", "cpu", *PHASES, "overhead")
    print(f"{'':10}" + "".join(f"{key:>12}" for key in keys) + f"{'reward':>9}{'length':>8}")
    for name, row in summary["medians"].items():
        figures = "".join(f"{1e3 * row[key]:12.1f}" for key in keys)
        print(f"{name:10}{figures}{row['reward']:9.2f}{row['length']:8.2f}")
    for entry in summary["ratios"]:
        print(f"\n{entry['of']}" + verdict(entry))
        for clock in ("wall", "cpu"):
            print("  {:5} {median:.2f}  ({min:.2f} to {max:.2f})".format(clock, **entry[clock]))
    for name, row in summary["medians"].items():
        if row["cpu"] < QUIET * row["total"]:
            share = row["cpu"] / row["total"]
            print(f"\nnot quiet: {name} had the core for {share:.0%} of its time; read the cpu rows")


def verdict(entry: dict[str, Any]) -> str:
    if entry["aim"] is None:
        return ""
    return f", aim {entry['aim']}: " + ("met" if entry["wall"]["median"] <= entry["aim"] else "missed")


def write_results(folder: Path, record: dict[str, Any]) -> Path:
    """Keep everything that was measured, as one JSON file named after the time."""
    path = folder / f"rollout_step-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def main() -> int:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ablate-bench-")))
        inputs = options.inputs or prepare_inputs(scratch / "inputs")
        contenders = []
        for index, name in enumerate(options.only):
            print(f"starting {name}", flush=True)
            log = options.out / f"{name}.log"
            contender = Contender.start(name, 29511 + index, (inputs, scratch), options.core, log)
            stack.callback(contender.stop)
            contenders.append(contender)
        print(f"{options.warmup} + {options.rounds} rounds on core {options.core}", flush=True)
        steps = run_rounds(contenders, options.rounds, options.warmup)
        ready = {contender.name: contender.ready for contender in contenders}
    summary = summarise(steps)
    show(summary, options.rounds)
    machine = {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
    record = {"settings": asdict(Settings()), "machine": machine, "workers": ready, **summary, "steps": steps}
    print(f"\nwritten to {write_results(options.out, record)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
