"""Checkpoints and exports: written beside, marked complete last, renamed; the newest whole one is used.

checkpoints/step_N/   engine state, trainer.json, and `complete`, which is written last
export/step_N/        safetensors, config and tokenizer: loads with AutoModelForCausalLM.from_pretrained
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ablate import files
from ablate.engine.deepspeed import Engine
from ablate.resume import newest_checkpoint

_MARKER = "complete"


def save(engine: Engine, run: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Checkpoint the weights after rollout step `step`; older ones beyond `keep` go, after this one is whole.

    Called on every rank; `state` is what resumes the loop, and holds no RNG because draws are keyed, not streamed.
    """
    folder = run / "checkpoints"
    beside = folder / f".step_{step}.tmp"
    if engine.rank == 0:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    engine.barrier()
    engine.save(beside)
    engine.barrier()
    if engine.rank == 0:
        files.write_json(beside / "trainer.json", {"step": step, "world_size": engine.world_size, **state})
        files.write_text(beside / _MARKER, files.now() + "\n")
        _replace(beside, folder / f"step_{step}")
        for old in whole(run)[:-keep]:
            shutil.rmtree(folder / f"step_{old}")
    engine.barrier()


def _replace(beside: Path, final: Path) -> None:
    shutil.rmtree(final, ignore_errors=True)
    beside.rename(final)
    files.fsync_folder(final.parent)


def whole(run: Path) -> list[int]:
    """Steps of complete checkpoints, ascending."""
    found = (run / "checkpoints").glob(f"step_*/{_MARKER}")
    return sorted(int(p.parent.name.removeprefix("step_")) for p in found)


def newest(run: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and the loop's state in it."""
    folder = newest_checkpoint(run)
    return None if folder is None else (folder, files.read_json(folder / "trainer.json"))


def export(engine: Engine, run: Path, step: int, base: Path, dtype: torch.dtype) -> str | None:
    """Write the policy of rollout step `step` in the form that transformers loads; returns a hash of its weights.

    Called on every rank; rank 0 writes and gets the hash, the others None. Architecture and tokenizer are those of the
    model in `base`; `dtype` is what the trainer computes in, so that the exported weights score as it did.
    """
    weights = {name: tensor.to(dtype).cpu() for name, tensor in engine.named_full_tensors() if engine.rank == 0}
    digest = None
    if engine.rank == 0:
        folder = run / "export"
        beside = folder / f".step_{step}.tmp"
        shutil.rmtree(beside, ignore_errors=True)
        with torch.device("meta"):
            shell = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=dtype)
        shell.save_pretrained(beside, state_dict=weights)
        AutoTokenizer.from_pretrained(base).save_pretrained(beside)
        digest = _hash_weights(beside)
        _replace(beside, folder / f"step_{step}")
    engine.barrier()
    return digest


def _hash_weights(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as stream:
            while block := stream.read(1 << 24):
                total.update(block)
    return total.hexdigest()[:16]
