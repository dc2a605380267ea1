"""Factor levels: the schema of a level is read from the signature of its pure function. Imports no torch.

A factor group maps to one module of `ablate.objective`; every public function there is a mechanism, and a file in
`conf/<group>/` names one and fills in its keyword-only arguments. The source is parsed, not imported, because the
functions need torch and a login node that only plans must not pay for it.

    >>> level_schema("clip", "dual_clip").model_fields.keys()
    dict_keys(['name', 'clip_low', 'clip_high', 'dual_clip'])
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model

from ablate.errors import UsageError, nearest
from ablate.objective import bounds

FACTORS: dict[str, str] = {
    "clip": "surrogate", "reduction": "reduction", "tis": "tis", "advantage": "advantage", "kl": "kl",
}  # fmt: skip

# Keys that belong to a group and not to one of its functions: where the composition applies the level, and how much.
_COMMON: dict[str, dict[str, Any]] = {
    "clip": {},
    "reduction": {"scope": (Literal["global", "micro_batch"], ...)},
    "tis": {"renormalize": (bool, ...)},
    "advantage": {},
    "kl": {"kl_coef": (bounds.NonNegative, ...), "place": (Literal["loss", "reward"], ...)},
}

# No torch types appear in a level, so the objective's own directory is all that has to be read.
_OBJECTIVE = Path(bounds.__file__).parent


@cache
def mechanisms(group: str) -> dict[str, ast.FunctionDef]:
    """The public functions of a factor group's module, by name, as parsed source."""
    tree = ast.parse((_OBJECTIVE / f"{FACTORS[group]}.py").read_text(encoding="utf-8"))
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
    return {f.name: f for f in functions}


def _field(arg: ast.arg, default: ast.expr | None) -> tuple[Any, Any]:
    assert isinstance(arg.annotation, ast.Name), f"{arg.arg}: annotate with a name from objective/bounds.py"
    bound = getattr(bounds, arg.annotation.id)
    return (bound, ... if default is None else ast.literal_eval(default))


@cache
def level_schema(group: str, name: str) -> type[BaseModel]:
    """A pydantic model of one level: `name`, the function's keyword-only arguments and the group's common keys.

    Raises:
        UsageError: no public function of that name exists in the group's module.
    """
    functions = mechanisms(group)
    if name not in functions:
        raise UsageError(f"{group}.name={name}: no such mechanism; {nearest(name, functions)}")
    spec = functions[name].args
    own = {a.arg: _field(a, d) for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)}
    config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    fields: dict[str, Any] = {"name": (Literal[name], ...), **own, **_COMMON[group]}
    return create_model(f"{group}_{name}", __config__=config, **fields)


def keywords(group: str, level: BaseModel) -> dict[str, Any]:
    """The arguments of a level's function: everything but the name and the group's common keys."""
    return {k: v for k, v in level.model_dump().items() if k != "name" and k not in _COMMON[group]}
