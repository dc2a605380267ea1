"""Prompts and verifiers. Imports no torch and no transformers: a plan reads a task's declarations in milliseconds."""

from ablate.task.base import Prompt, Task, epoch_of, make_task, steps_per_epoch, train_prompts

__all__ = ["Prompt", "Task", "epoch_of", "make_task", "steps_per_epoch", "train_prompts"]
