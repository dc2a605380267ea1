"""What stops a run before any process is started: settings that cannot be trained, a checkpoint that does not fit.

Imports no torch: the launcher asks before it takes resources, the run asks again.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

from ablate import files
from ablate.base import base_folder
from ablate.config import Config
from ablate.errors import UsageError
from ablate.task.base import make_task


def refuse_untrainable(c: Config) -> None:
    """What can be planned but not trained by this version, or not on this machine.

    Raises:
        UsageError: with the setting to change.
    """
    if c.rollout.backend != "native":
        raise UsageError(f"rollout={c.rollout.backend} can be planned but not trained yet; use rollout=native")
    if c.rollout.staleness:
        raise UsageError(f"rollout.staleness={c.rollout.staleness} can be planned but not trained yet; use 0")
    r = c.rollout
    if r.max_turn_len is not None:
        raise UsageError(f"rollout.max_turn_len={r.max_turn_len}: several turns cannot be trained yet; use null")
    if c.task.reward != "binary":
        raise UsageError(f"task.reward={c.task.reward} can be planned but not trained here; use task.reward=binary")
    if c.task.name != "reverse":
        raise UsageError(f"task={c.task.name} can be planned but not trained here; use task=reverse")
    if c.cluster.nodes != 1:
        raise UsageError(f"cluster.nodes={c.cluster.nodes}: this launcher has one machine; use cluster=local")
    longest = make_task(c.task).max_prompt_len + r.max_response_len
    if r.max_context_len is not None and longest > r.max_context_len:
        raise UsageError(
            f"rollout.max_context_len={r.max_context_len}: prompt and response may take {longest} tokens; "
            f"raise it or lower rollout.max_response_len"
        )
    base_folder(c.model, c.task, Path(c.output))


def newest_checkpoint(run: Path) -> Path | None:
    """The newest whole checkpoint: the one whose marker, written last, is there."""
    found = (p.parent for p in (run / "checkpoints").glob("step_*/complete"))
    return max(found, key=lambda p: int(p.name.removeprefix("step_")), default=None)


def refuse_misfit(run: Path, c: Config) -> None:
    """A checkpoint saved by other ranks, in another precision or of another model than `c` asks for.

    Raises:
        UsageError: naming the checkpoint, what differs, and the way out.
    """
    newest = newest_checkpoint(run)
    if newest is None:
        return
    saved = files.read_json(newest / "engine.json")
    ranks = c.cluster.nodes * c.cluster.ranks_per_node
    anew = f"or start the run anew: rm -r '{run}'"
    if saved["world_size"] != ranks:
        raise UsageError(
            f"{newest}: saved by {saved['world_size']} ranks, this command has {ranks}; "
            f"set cluster.ranks_per_node={saved['world_size']}, {anew}"
        )
    base = base_folder(c.model, c.task, Path(c.output))
    shapes = _shapes(base)
    for name, shape in saved["parameters"].items():
        if shapes and shapes.get(name) != shape:
            raise UsageError(
                f"{newest}: does not fit the model in {base}: {name} has shape {shape} in the checkpoint and "
                f"{shapes.get(name)} in the model; restore that model, {anew}"
            )


def _shapes(base: Path) -> dict[str, list[int]]:
    """Shapes of a model's weights from the headers of its files; empty where there are none yet."""
    found: dict[str, list[int]] = {}
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as weights:
            found |= {name: list(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118 (no dict)
    return found
