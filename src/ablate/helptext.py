"""`python -m ablate.run --help`: what to type, and every factor with its levels, one line each. Imports no torch."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

from ablate.compose import config_dir
from ablate.levels import FACTORS

_SETTINGS = ("task", "model", "rollout", "engine", "optim", "cluster", "preset", "sweep", "hydra/launcher")

_HEAD = """\
ablate: does this factor of GRPO post-training matter, by how much, and which checkpoint do we report?

  python -m ablate.run -m clip=sym,asym tis=on,off              four arms on this machine
  python -m ablate.run -m clip=sym,asym seed=0,1,2              three seeds per arm: effects get intervals
  python -m ablate.run +sweep=clip_x_tis                        a question from sweeps/
  python -m ablate.run -m clip=sym,asym launch.pilot=3          three steps of every arm, for planning
  ablate plan clip=sym,asym tis=on,off                          what would run, and what is wrong with it

The same command again skips what is done, continues what is not and retries what failed.
"""


def describe(path: Path) -> str:
    """The first comment line of a level's file that says something to people."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.lstrip("# ").strip() for line in lines if line.startswith("#")]
    return next((c for c in comments if not c.startswith("@package")), "")


def _levels(group: str) -> list[tuple[str, str]]:
    found = {p.stem: describe(p) for folder in _folders() for p in (folder / group).glob("*.yaml")}
    return sorted(found.items())


def _folders() -> list[Path]:
    """conf/, and the folder of own levels that the command line names."""
    words = sys.argv
    own = [b for a, b in pairwise(words) if a in ("--config-dir", "-cd")]
    return [config_dir(), *(Path(folder) for folder in own)]


def _group(group: str) -> str:
    lines = [f"    {name:<36} {text}".rstrip() for name, text in _levels(group)]
    return "\n".join([f"  {group}=", *lines])


def help_text() -> str:
    """The whole page."""
    factors = "\n".join(_group(g) for g in FACTORS)
    settings = "\n".join(_group(g) for g in _SETTINGS if _levels(g))
    tail = "Any key of `--cfg job` can be set or swept: optim.lr=1e-4,5e-4. Own levels: --config-dir FOLDER."
    return f"{_HEAD}\nFactors (any levels cross with any others):\n{factors}\n\nSettings:\n{settings}\n\n{tail}"
