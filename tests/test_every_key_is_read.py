"""A key that is accepted, stored and then ignored is a lie: every key of every section is read by some code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ablate
from ablate.config import SECTIONS

SOURCES = [p for p in Path(ablate.__file__).parent.rglob("*.py") if p.name != "config.py"]


def _attributes() -> set[str]:
    """Names read as attributes anywhere outside config.py, and strings (getattr and tables of keys)."""
    found: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


READ = _attributes() | {"cap"}  # through Config.selection_cap


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_read_outside_the_schema(section: str) -> None:
    assert [key for key in SECTIONS[section].model_fields if key not in READ] == []
