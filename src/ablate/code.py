"""Which code produced a run: commit, uncommitted changes and versions. Imports no torch."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "deepspeed", "transformers", "vllm", "hydra-core", "omegaconf", "numpy", "pydantic")


def _git(*arguments: str) -> str | None:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def code_version() -> dict[str, Any]:
    """Commit and the hash of the diff against it (null outside a checkout), and the versions that matter.

    Only this project's own checkout counts: installed into a virtual environment that lies inside some other
    repository, that repository's commit would say nothing.
    """
    inside = _git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    commit = _git("rev-parse", "HEAD") if inside else None
    diff = _git("diff", "HEAD", "--", ".") if commit else None
    return {
        "ablate": _version("ablate-grpo"),
        "commit": commit.strip() if commit else None,
        "dirty": hashlib.sha256(diff.encode()).hexdigest()[:16] if diff else None,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def name_clash() -> str | None:
    """A line to print when the public distribution `ablate`, which has our import name, is installed too, else None."""
    other = _version("ablate")
    if other is None:
        return None
    return f"the distribution ablate {other} has the same import name as ablate-grpo: pip uninstall one of the two"
