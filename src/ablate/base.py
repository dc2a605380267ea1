"""The frozen base policy that all arms and seeds of a sweep start from: built once, cached by digest.

The seed of the supervised warm-up moves a tiny policy's final reward more than any factor does, so a base per run seed
would drown every effect. Imports torch only when a base has to be built.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.errors import UsageError
from ablate.files import fsync_folder
from ablate.task.base import make_task, train_prompts

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ablate.config import Model as ModelConfig
    from ablate.config import Task as TaskConfig
    from ablate.task.base import Prompt, Task

_RECIPE = 3
"""Raised whenever the code below would build another model from the same configuration."""
_IGNORED = -100
_ROPE_THETA = 10.0
"""Rotary base: with ten positions a small one tells neighbours apart, where the usual 10,000 learns half as fast."""
_TINY_KEYS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
"""Keys of a tiny model in our configuration and in transformers'."""

log = logging.getLogger(__name__)


def base_digest(model: ModelConfig, task: TaskConfig) -> str:
    """Identity of a tiny base: its architecture, warm-up and train prompts; not what it is evaluated on."""
    content = {"recipe": _RECIPE, "model": model.model_dump(), "task": task.model_dump(exclude={"heldout_size"})}
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def base_folder(model: ModelConfig, task: TaskConfig, output: Path) -> Path:
    """Where the base policy lies, as `from_pretrained` reads it; a tiny one may not be built yet.

    Raises:
        UsageError: a pretrained path that is missing or holds no model, or a tiny model with a key missing.
    """
    if model.kind == "pretrained":
        return _pretrained_folder(model.path)
    missing = [key for key in _TINY_KEYS if getattr(model, key) is None]
    if missing:
        raise UsageError(f"model.kind=tiny needs {', '.join('model.' + key for key in missing)}")
    return output / ".bases" / base_digest(model, task)


def prepare_base(model: ModelConfig, task: TaskConfig, output: Path) -> Path:
    """`base_folder`, built if need be; whoever loses a race to build it keeps the winner's."""
    final = base_folder(model, task, output)
    if not final.is_dir():
        final.parent.mkdir(parents=True, exist_ok=True)
        _build(model, make_task(task), final)
    return final


def warmup_accuracy(folder: Path) -> float:
    """Held-out greedy accuracy the base was saved with, as recorded in its folder."""
    return float(json.loads((folder / "warmup.json").read_text())["heldout_accuracy"])


def _pretrained_folder(path: str | None) -> Path:
    if path is None:
        raise UsageError("model.kind=pretrained needs model.path, a folder that from_pretrained can read")
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise UsageError(f"model.path={path} is not a model folder: {folder / 'config.json'} does not exist")
    return folder


def _build(model: ModelConfig, task: Task, final: Path) -> None:
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        lm, report = _warm_up(model, task)
        lm.save_pretrained(work)
        task.tokenizer().save_pretrained(work)
        (work / "warmup.json").write_text(json.dumps(report, indent=1) + "\n")
        work.chmod(0o755)
        _flush(work)
        _claim(work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    log.info("base %s: held-out greedy accuracy %.3f after the warm-up", final, report["heldout_accuracy"])


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o644)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    fsync_folder(folder)


def _claim(work: Path, final: Path) -> None:
    try:
        os.rename(work, final)
        fsync_folder(final.parent)
    except OSError:
        if not final.is_dir():
            raise


def _warm_up(model: ModelConfig, task: Task) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train a fresh model on right answers, alone on one thread so that the result does not depend on the machine's."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(model.warmup_seed)
            lm = _tiny_lm(model, task)
        losses = _supervise(lm, model, task)
        accuracy = _greedy_accuracy(lm, task, [task.heldout_prompt(i) for i in range(task.heldout_size)])
    finally:
        torch.set_num_threads(threads)
    return lm.eval(), {"recipe": _RECIPE, "losses": losses, "heldout_accuracy": accuracy}


def _tiny_lm(model: ModelConfig, task: Task) -> PreTrainedModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=task.vocab_size,
            **{theirs: getattr(model, ours) for ours, theirs in _TINY_KEYS.items()},
            max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
            # untied: a backend that keeps a copy of the head would miss updates of a tied one
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=task.eos_id,
            pad_token_id=task.pad_id,
        )
    )


def _supervise(lm: PreTrainedModel, model: ModelConfig, task: Task) -> list[float]:
    import torch

    optimizer = torch.optim.AdamW(lm.parameters(), lr=model.warmup_lr, weight_decay=0.0)
    losses = []
    for step in range(1, model.warmup_steps + 1):
        prompts = train_prompts(task, model.warmup_seed, step, model.warmup_batch)
        input_ids, labels = _supervised_batch(task, prompts)
        logits = lm.model(input_ids=input_ids).last_hidden_state[:, :-1] @ lm.lm_head.weight.T
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _supervised_batch(task: Task, prompts: list[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and labels, both int64 [batch, longest]; prompts and padding bear no label."""
    import torch

    answers = [(*task.encode(prompt.answer), task.eos_id) for prompt in prompts]
    width = max(len(p.ids) + len(a) for p, a in zip(prompts, answers, strict=True))
    input_ids = torch.full((len(prompts), width), task.pad_id)
    labels = torch.full((len(prompts), width), _IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        start, end = len(prompt.ids), len(prompt.ids) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt.ids + answer)
        labels[row, start:end] = torch.tensor(answer)
    return input_ids, labels


def _greedy_accuracy(lm: PreTrainedModel, task: Task, prompts: list[Prompt]) -> float:
    """Share of prompts whose greedy response is right: exactly those whose every next token is the arg-max."""
    import torch

    input_ids, labels = _supervised_batch(task, prompts)
    with torch.no_grad():
        guess = (lm.model(input_ids=input_ids).last_hidden_state[:, :-1] @ lm.lm_head.weight.T).argmax(-1)
    right = (guess == labels[:, 1:]) | (labels[:, 1:] == _IGNORED)
    return float(right.all(dim=1).float().mean())
