"""A level's schema comes from the function itself; reading it needs no torch."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from ablate import levels
from ablate.compose import config_dir
from ablate.errors import UsageError

LEVELS = [p for group in levels.FACTORS for p in sorted((config_dir() / group).glob("*.yaml"))]


@pytest.mark.parametrize("group", levels.FACTORS)
def test_schema_matches_what_python_says_of_the_function(group: str) -> None:
    module = import_module(f"ablate.objective.{levels.FACTORS[group]}")
    for name in levels.mechanisms(group):
        signature = inspect.signature(getattr(module, name))
        expected = {p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
        schema = levels.level_schema(group, name)
        assert set(schema.model_fields) - {"name"} - set(levels._COMMON[group]) == expected


@pytest.mark.parametrize("path", LEVELS, ids=lambda p: f"{p.parent.name}={p.stem}")
def test_every_level_file_is_short_described_and_valid(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 12
    assert text.startswith("# ")
    tree = yaml.safe_load(text)
    level = levels.level_schema(path.parent.name, tree["name"]).model_validate(tree)
    # what the file says is what the level is: nothing is filled in behind it
    assert level.model_dump() == tree


def test_unknown_mechanism_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean cispo"):
        levels.level_schema("clip", "cisppo")


@pytest.mark.parametrize(
    "change", [{"clip_low": 1.0}, {"clip_low": -0.1}, {"clip_high": float("nan")}, {"clip_lo": 0.2}, {"clip_low": "x"}]
)
def test_out_of_range_values_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        levels.level_schema("clip", "clip").model_validate(
            {"name": "clip", "clip_low": 0.2, "clip_high": 0.2, **change}
        )
