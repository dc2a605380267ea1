"""Shapes and types of every function of `ablate.objective` are checked while these tests run.

`--jaxtyping-packages=ablate.objective,beartype.beartype` does the same for a whole session; without that
flag the hook is installed here, before these tests import the package.
"""

from __future__ import annotations

import sys

import pytest
from jaxtyping import install_import_hook


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("jaxtyping_packages", None) and "ablate.objective.tensors" not in sys.modules:
        install_import_hook("ablate.objective", "beartype.beartype")
