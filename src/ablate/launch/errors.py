"""Hydra's and OmegaConf's errors in one line each."""

from __future__ import annotations

import re

import yaml
from hydra.core.override_parser.overrides_parser import OverrideParseException
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from ablate.errors import UsageError, nearest


def one_line(error: BaseException) -> str | None:
    """What a user did wrong, or None when the error is ours and deserves its traceback."""
    if isinstance(error, UsageError):
        return str(error)
    if isinstance(error, yaml.YAMLError):
        return f"not YAML: {' '.join(str(error).split())}"
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return None
    text = str(error)
    if missing := re.search(
        r"Could not find '([^']+)/([^']+)'.*?Available options in '[^']+':(.*?)(?:\n\w|\Z)", text, re.S
    ):
        group, name, options = missing.groups()
        return f"{group}={name}: no such level; {nearest(name, options.split())}"
    if re.search(r"Could not override 'sweep'", text):
        return "sweep: a section of keys; a sweep file is run by +sweep=NAME"
    if "add --multirun" in text:
        return "--cfg shows one run: give every key one value"
    if key := re.search(r"Could not override '([^']+)'", text):
        return f"{key[1]}: unknown key; {_nearest_key(key[1])}"
    if double := re.search(r"Multiple values for ([\w/]+)\. To override a value use 'override [^:]+: ([^']+)'", text):
        return f"{double[1]}: has a value already; replace it with {double[1]}={double[2]} (no +)"
    if group := re.search(r"Could not override '?([\w/@.]+)'?.*No match in the defaults list", text, re.S):
        return f"{group[1]}: unknown group or key; {_nearest_key(group[1])}"
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: not an override; write key=value or key=a,b (quote special characters: 'key=\"a b\"')"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines[:2])) + _quote_hint(text)


def _nearest_key(key: str) -> str:
    """Valid names beside a mistyped dotted key."""
    from ablate.config import SECTIONS
    from ablate.levels import FACTORS

    head, _, rest = key.partition(".")
    if rest and head in SECTIONS:
        return nearest(rest.split(".")[0], SECTIONS[head].model_fields)
    return nearest(head, ("seed", "output", *FACTORS, *SECTIONS))


def _quote_hint(text: str) -> str:
    boolean = re.search(r"Unsupported type in defaults list.*bool|value in defaults list.*(?:True|False)|bool", text)
    return '; quote on/off in a defaults list: tis: "on"' if boolean else ""
