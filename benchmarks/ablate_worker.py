"""Our side of the comparison: the real rollout step of `ablate.train`, its row of metrics.jsonl included.

`--prepare FOLDER` writes what every contender loads (see rollout_step.py) and exits.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

from protocol import Channel, PhaseClock, Settings

from ablate import train
from ablate.base import prepare_base
from ablate.cli import composer
from ablate.config import Config
from ablate.plan import make_plan
from ablate.task.base import make_task, train_prompts

PROMPT_STEPS = 64


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prepare", type=Path, help="write model/ and prompts.jsonl there, and exit")
    parser.add_argument("--inputs", type=Path, help="folder with model/ and prompts.jsonl")
    parser.add_argument("--scratch", type=Path, help="folder for the run")
    parser.add_argument("--port", type=int, help="unused: one rank needs no rendezvous")
    return parser.parse_args()


def config(*overrides: str) -> Config:
    """The default at the settings that TRL can be given too, without evaluation, export or checkpoint in between."""
    want = Settings()
    settings = [
        f"train.prompts_per_step={want.prompts}",
        f"train.group_size={want.samples}",
        f"train.passes={want.updates}",
        f"rollout.max_response_len={want.max_response_len}",
        f"rollout.temperature={want.temperature}",
        f"optim.lr={want.learning_rate}",
        f"optim.grad_clip={want.grad_clip}",
        f"clip.clip_low={want.clip}",
        f"clip.clip_high={want.clip}",
        f"seed={want.seed}",
        *("advantage=grpo", "reduction=token_mean", "tis=off", "rollout.precision=fp32"),
        *("train.max_steps=1000000", "eval.interval=1000000", "export.interval=1000000", "checkpoint.interval=1000000"),
    ]
    with composer() as source:
        return make_plan(source, [*settings, *overrides]).runs[0].config


def prepare(folder: Path) -> None:
    """The supervised base and a few epochs' worth of prompts."""
    default = config()
    task = make_task(default.task)
    shutil.copytree(prepare_base(default.model, default.task, folder / "outputs"), folder / "model")
    steps = range(1, PROMPT_STEPS + 1)
    prompts = [p for step in steps for p in train_prompts(task, Settings().seed, step, Settings().prompts)]
    rows = [json.dumps({"prompt": p.text, "answer": p.answer}) for p in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")


def main() -> int:
    options = parse()
    logging.getLogger().setLevel(logging.ERROR)
    if options.prepare:
        prepare(options.prepare)
        return 0
    channel, clock = Channel(), PhaseClock()
    options.scratch.mkdir(parents=True, exist_ok=True)
    run = train._set_up(config("model=pretrained", f"model.path={options.inputs / 'model'}"), options.scratch, 1)
    clock.watch(train, "_draw", "generation")
    for name in ("_score", "make_batch", "_rollout_metrics"):
        clock.watch(train, name, "scoring")
    clock.watch(run.updater, "train", "training")
    clock.watch(run.sampler, "load", "sync")
    libraries = ("torch", "transformers", "deepspeed")
    channel.say(event="ready", engine="DeepSpeedEngine", versions={name: version(name) for name in libraries})
    while channel.step_wanted():
        run.step += 1
        clock.start()
        train._rollout_step(run)
        seconds = clock.stop()
        run.pending.clear()
        row = train.record.read_lines(options.scratch / "metrics.jsonl").rows[-1]
        channel.say(event="step", seconds=seconds, reward=row["reward/mean"], length=row["length/mean"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
