"""TRL's GRPOTrainer as a contender: one rollout step = one generation and the two updates that follow.

Runs in the environment of requirements-trl.txt, with `--zero3` under DeepSpeed ZeRO-3 or without DeepSpeed.
TRL counts optimiser steps and generates once per `num_iterations * steps_per_generation` of them, here 2:
a cycle runs from one "step" command to the end of the second update, data loading and callbacks included.
Logging, saving and progress bars are off, and so is gradient checkpointing (TRL's default), which would only
slow TRL down here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from protocol import Channel, PhaseClock, Settings

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
ZERO3: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,  # torch.optim.AdamW: DeepSpeed's own compiles for a minute
    "zero_optimization": {"stage": 3, "overlap_comm": False},
    "steps_per_print": 10**9,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=Path, required=True, help="folder with model/ and prompts.jsonl")
    parser.add_argument("--scratch", type=Path, required=True, help="folder for what the trainer may write")
    parser.add_argument("--zero3", action="store_true", help="train under DeepSpeed ZeRO-3")
    parser.add_argument("--port", type=int, default=29511, help="rendezvous port of the one-rank group")
    return parser.parse_args()


def prepare_deepspeed(port: int) -> None:
    """One rank on the CPU; without the shared-memory op, which DeepSpeed would compile for a minute."""
    os.environ.update(ONE_RANK, MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def trainer_config(options: argparse.Namespace) -> Any:
    """GRPOConfig of the default: same batch, passes, optimiser, surrogate and reduction as ours."""
    from trl import GRPOConfig

    want = Settings()
    return GRPOConfig(
        output_dir=str(options.scratch),
        per_device_train_batch_size=want.sequences,
        gradient_accumulation_steps=1,
        num_generations=want.samples,
        num_iterations=want.updates,
        shuffle_dataset=False,  # prompts.jsonl is in the order in which our side draws: same prompts in every round
        max_completion_length=want.max_response_len,
        temperature=want.temperature,
        top_p=1.0,
        top_k=0,
        learning_rate=want.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        optim="adamw_torch",
        max_grad_norm=want.grad_clip,
        epsilon=want.clip,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        max_steps=10**7,
        seed=want.seed,
        bf16=False,
        fp16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        deepspeed=ZERO3 if options.zero3 else None,
    )


def exact_reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for a completion that equals the answer, else 0 (special tokens are skipped in decoding)."""
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def build_trainer(options: argparse.Namespace) -> Any:
    """A GRPOTrainer in fp32 on the model and the prompts that the ablate side wrote."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    torch.set_num_threads(1)
    config = trainer_config(options)  # before the model: under ZeRO-3 it makes from_pretrained shard
    folder = options.inputs / "model"
    rows = [json.loads(line) for line in (options.inputs / "prompts.jsonl").read_text().splitlines()]
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=exact_reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )


def make_callback(trainer: Any, channel: Channel, clock: PhaseClock) -> Any:
    """Serves one command per rollout step, between the last update of one and the first of the next."""
    from transformers import TrainerCallback

    class Conductor(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.watch(kwargs["optimizer"], "step", "training")
            libraries = ("trl", "torch", "transformers", "deepspeed")
            engine = type(trainer.model_wrapped).__name__  # shows whether --zero3 took effect
            channel.say(event="ready", engine=engine, versions={name: version(name) for name in libraries})
            self._next(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % args.num_iterations:
                return
            seconds = clock.stop()
            metrics = trainer_metrics(trainer)
            channel.say(event="step", seconds=seconds, **metrics)
            self._next(control)

        def _next(self, control: Any) -> None:
            control.should_training_stop = not channel.step_wanted()
            clock.start()

    return Conductor()


def trainer_metrics(trainer: Any) -> dict[str, float]:
    """Reward and response length of the last generation, so that the driver can see both sides work alike."""
    kept = trainer._metrics["train"]
    return {"reward": kept["reward"][-1], "length": kept["completions/mean_length"][-1]}


def main() -> int:
    options = parse()
    channel, clock = Channel(), PhaseClock()
    if options.zero3:
        prepare_deepspeed(options.port)
    trainer = build_trainer(options)
    clock.watch(trainer, "_generate_and_score_completions", "scoring")
    clock.watch(trainer, "_generate_single_turn", "sync")  # minus generate: gathering and hooks
    clock.watch(trainer.model, "generate", "generation")
    clock.watch(trainer, "training_step", "training")
    clock.watch(trainer.accelerator, "clip_grad_norm_", "training")
    trainer.add_callback(make_callback(trainer, channel, clock))
    trainer.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
