"""From Hydra's configuration tree to plain data, one level at a time. Imports no torch.

Hydra composes a whole configuration in about 0.1 s, so a grid is not composed run by run: the base is composed once
per combination of setting groups (model, task, preset, ...), each factor level is read once, and a run is the base with
its sections exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import OmegaConf

from ablate.errors import UsageError, nearest
from ablate.levels import FACTORS

Tree = dict[str, Any]


def config_dir() -> Path:
    """Where conf/ lies, absolute: inside an installed package, or beside src/ in a checkout."""
    here = Path(__file__).resolve().parent
    installed = here / "conf"
    return installed if installed.is_dir() else here.parents[1] / "conf"


@dataclass(frozen=True)
class Overrides:
    """A command line split by what it does.

    Example: `clip=sym,asym seed=0,1 optim.lr=1e-4` gives fixed `("optim.lr=1e-4",)` and swept
    `{"clip": ("sym", "asym"), "seed": (0, 1)}`.
    """

    fixed: tuple[str, ...]
    swept: dict[str, tuple[Any, ...]]


class Composer:
    """Reads configurations and levels through one Hydra config loader."""

    def __init__(self, loader: ConfigLoader, config_name: str = "config") -> None:
        self._loader = loader
        self._config_name = config_name
        self._trees: dict[tuple[str, ...], tuple[Tree, dict[str, str]]] = {}
        self._levels: dict[tuple[str, str], Tree] = {}
        self._options: dict[str, list[str]] = {}
        self._values: dict[tuple[str, ...], list[tuple[str, Any]]] = {}

    def parse(self, arguments: Iterable[str]) -> Overrides:
        """Split a command line into fixed overrides and sweeps; `hydra.*` settings are not a run's and are left out."""
        arguments = list(arguments)
        fixed: list[str] = []
        swept: dict[str, tuple[Any, ...]] = {}
        for override in self._parser().parse_overrides(arguments):
            if override.is_hydra_override():
                continue
            if override.is_sweep_override():
                swept[override.get_key_element()] = self._choices(override)
            else:
                self._refuse_list(override)
                fixed.append(str(override.input_line))
        return Overrides(tuple(fixed), swept)

    def _refuse_list(self, override: Override) -> None:
        key, value = override.get_key_element(), override.value()
        if isinstance(value, list) and self.options(key):
            levels = ",".join(map(str, value))
            raise UsageError(f"{override.input_line}: a run has one level; for one run each write {key}={levels}")

    def _parser(self) -> OverridesParser:
        return OverridesParser.create(config_loader=self._loader)

    def _choices(self, override: Override) -> tuple[Any, ...]:
        if not override.is_discrete_sweep():
            raise UsageError(f"{override.input_line}: an interval has no levels; give values: key=1,2,3 or range(1,4)")
        key = override.get_key_element()
        texts = [f"{key}={text}" for text in override.sweep_string_iterator()]
        return tuple(o.value() for o in self._parser().parse_overrides(texts))

    def values(self, fixed: Sequence[str]) -> list[tuple[str, Any]]:
        """The keys and values of fixed overrides, in their order."""
        key = tuple(fixed)
        if key not in self._values:
            parsed = self._parser().parse_overrides(list(fixed))
            self._values[key] = [(o.get_key_element().lstrip("+~"), o.value()) for o in parsed]
        return self._values[key]

    def options(self, group: str) -> list[str]:
        """The names that `group=` takes; empty when `group` is a value key and not a group."""
        if group not in self._options:
            self._options[group] = self._loader.get_group_options(group)
        return self._options[group]

    def tree(self, overrides: Sequence[str]) -> Tree:
        """The resolved configuration under `overrides`, without Hydra's own section. Treat it as read-only."""
        return self._composed(tuple(overrides))[0]

    def choices(self, overrides: Sequence[str]) -> dict[str, str]:
        """The level chosen in every configuration group under `overrides`."""
        return self._composed(tuple(overrides))[1]

    def _composed(self, overrides: tuple[str, ...]) -> tuple[Tree, dict[str, str]]:
        if overrides not in self._trees:
            config = self._loader.load_configuration(self._config_name, list(overrides), run_mode=RunMode.RUN)
            choices = {str(k): str(v) for k, v in config.hydra.runtime.choices.items()}
            # hydra.* holds values that only exist inside a job
            own = OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"])
            self._trees[overrides] = (OmegaConf.to_container(own, resolve=True), choices)  # type: ignore[assignment]
        return self._trees[overrides]

    def level(self, group: str, name: str) -> Tree:
        """One factor level as its file says it."""
        key = (group, name)
        if key not in self._levels:
            if name not in self.options(group):
                raise UsageError(f"{group}={name}: no such level; {nearest(name, self.options(group))}")
            loaded = self._loader.repository.load_config(f"{group}/{name}")  # type: ignore[attr-defined]
            self._levels[key] = OmegaConf.to_container(loaded.config, resolve=True)  # type: ignore[assignment]
        return self._levels[key]

    def level_name(self, group: str, value: Any) -> str:
        """The level that `value` names: YAML reads an unquoted on/off or yes/no as a boolean."""
        if isinstance(value, bool):
            spoken = ("on", "yes", "true") if value else ("off", "no", "false")
            return next((s for s in spoken if s in self.options(group)), spoken[0])
        name = "none" if value is None else str(value)
        if name not in self.options(group):
            raise UsageError(f"{group}={name}: no such level; {nearest(name, self.options(group))}")
        return name


def replace_value(tree: Tree, key: str, value: Any) -> Tree:
    """`tree` with the value at a dotted key exchanged; only the touched levels are copied.

    Raises:
        UsageError: the key does not exist; a new key is never made.
    """
    head, _, rest = key.partition(".")
    if not isinstance(tree, Mapping) or head not in tree:
        valid = tree.keys() if isinstance(tree, Mapping) else ()
        raise UsageError(f"{key}: unknown key; {nearest(head, valid)}")
    if rest:
        try:
            value = replace_value(tree[head], rest, value)
        except UsageError as error:
            raise UsageError(f"{head}.{error}") from None
    return {**tree, head: value}


def build(composer: Composer, fixed: Sequence[str], changes: Mapping[str, Any]) -> Tree:
    """The tree of one arm: the base under `fixed`, then `changes` (groups by level name, keys by value).

    A value given in `fixed` for a key inside a factor section holds for every level of that factor, as it would had
    Hydra composed the run alone.
    """
    groups = {k: composer.level_name(k, v) for k, v in changes.items() if composer.options(k)}
    settings = tuple(f"{k}={v}" for k, v in groups.items() if k not in FACTORS)
    tree = dict(composer.tree((*fixed, *settings)))
    for group in groups.keys() & FACTORS.keys():
        tree[group] = composer.level(group, groups[group])
        for key, value in composer.values(fixed):
            if key.startswith(group + "."):
                tree = replace_value(tree, key, value)
    for key, value in changes.items():
        if key not in groups:
            tree = replace_value(tree, key, value)
    return tree
