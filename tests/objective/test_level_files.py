"""Every level file binds to a function, and holds the values that the documentation promises."""

from __future__ import annotations

import inspect
import operator
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from objective_support import CONF, GROUPS, level, level_names

from ablate.objective import advantage, bounds, kl, reduction, surrogate, tis
from ablate.objective.loss import bind_advantage, bind_objective, bind_reduction

MODULES = {"clip": surrogate, "reduction": reduction, "tis": tis, "advantage": advantage, "kl": kl}
COMMON = {"reduction": {"scope"}, "tis": {"renormalize"}, "kl": {"kl_coef", "place"}}
ALL = [(group, name) for group in GROUPS for name in level_names(group)]
OFF = {"name": "off", "renormalize": False}
NO_KL = {"name": "none", "kl_coef": 0.0, "place": "loss"}

EXPECTED: dict[str, dict[str, dict[str, Any]]] = {
    "clip": {
        "sym": {"name": "clip", "clip_low": 0.2, "clip_high": 0.2},
        "asym": {"name": "clip", "clip_low": 0.2, "clip_high": 0.28},
        "asym_low": {"name": "clip", "clip_low": 0.2, "clip_high": 0.05},
        "dual": {"name": "dual_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
        "none": {"name": "none"},
        "gspo": {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        "cispo": {"name": "cispo", "clip_low": 1.0, "clip_high": 5.0},
        "sapo": {"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.05},
    },
    "reduction": {
        **{
            name: {"name": name, "scope": "global"}
            for name in (
                "token_mean",
                "sequence_mean",
                "seq_mean_token_sum_norm",
                "seq_mean_token_sum_norm_global",
                "prompt_mean",
            )
        },
        **{
            f"{name}_micro_batch": {"name": name, "scope": "micro_batch"}
            for name in ("token_mean", "sequence_mean", "seq_mean_token_sum_norm")
        },
    },
    "tis": {
        "off": {"name": "off", "renormalize": False},
        "on": {"name": "token", "cap": 2.0, "renormalize": False},
        "sequence": {"name": "sequence", "cap": 5.0, "renormalize": False},
        "icepop": {"name": "icepop", "low": 0.5, "high": 5.0, "renormalize": False},
        "geometric_mask": {"name": "geometric_mask", "low": 0.99, "high": 1.01, "renormalize": False},
        "product_mask": {"name": "product_mask", "low": 0.5, "high": 2.0, "renormalize": False},
        "outlier_mask": {"name": "outlier_mask", "low": 1e-4, "high": 100.0, "renormalize": False},
    },
    "advantage": {
        "grpo": {"name": "grpo"},
        "grpo_no_std": {"name": "grpo_no_std"},
        "rloo": {"name": "rloo"},
        "rloo_n": {"name": "rloo_n", "min_group_size": 4},
        "maxrl": {"name": "maxrl"},
    },
    "kl": {
        "none": NO_KL,
        "k2": {"name": "k2", "kl_coef": 0.001, "place": "loss"},
        "k3": {"name": "k3", "kl_coef": 0.001, "place": "loss"},
        "k1_in_reward": {"name": "k1", "kl_coef": 0.001, "place": "reward"},
    },
}


@pytest.mark.parametrize("group", GROUPS)
def test_the_level_files_are_the_documented_ones(group: str) -> None:
    assert {name: level(group, name) for name in level_names(group)} == EXPECTED[group]


@pytest.mark.parametrize(("group", "name"), ALL)
def test_a_level_file_starts_with_one_line_of_help_and_stays_short(group: str, name: str) -> None:
    lines = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ") and not lines[1].startswith("#")
    assert len(lines) <= 12


@pytest.mark.parametrize(("group", "name"), ALL)
def test_a_level_binds(group: str, name: str) -> None:
    chosen = level(group, name)
    if group == "reduction":
        bind_reduction(chosen)
    elif group == "advantage":
        bind_advantage(chosen)
    else:
        sections = {"clip": {"name": "none"}, "tis": OFF, "kl": NO_KL} | {group: chosen}
        bind_objective(**sections, entropy_coef=0.0)


@pytest.mark.parametrize(("group", "name"), ALL)
def test_the_values_of_a_level_are_in_the_range_of_their_parameter(group: str, name: str) -> None:
    chosen = level(group, name)
    function = getattr(MODULES[group], chosen.pop("name"))
    for key in COMMON.get(group, set()):
        chosen.pop(key)
    parameters = inspect.signature(function).parameters
    assert set(chosen) == {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    for key, value in chosen.items():
        kind, *limits = get_args(getattr(bounds, parameters[key].annotation))
        assert type(value) is kind
        assert all(within(limit, value) for limit in limits), key


def within(limit: Any, value: float) -> bool:
    """Whether the value keeps an `annotated_types` limit."""
    tests = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
    ((side, compare),) = [(s, c) for s, c in tests.items() if hasattr(limit, s)]
    return compare(value, getattr(limit, side))


def test_every_mechanism_has_a_level() -> None:
    for group, module in MODULES.items():
        public = {
            name
            for name, f in inspect.getmembers(module, inspect.isfunction)
            if not name.startswith("_") and f.__module__ == module.__name__
        }
        missing = public - {level(group, name)["name"] for name in level_names(group)}
        assert not missing, group


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"clip": {"name": "clipp"}}, "valid: cispo, clip, dual_clip"),
        ({"clip": {"name": "bounded_exp"}}, "no mechanism"),
        ({"clip": {"name": "_clipped"}}, "no mechanism"),
        ({"clip": {"name": "clip", "clip_low": 0.2}}, "clip_high"),
        ({"clip": {"name": "none", "clip_low": 0.2}}, "clip_low"),
        ({"kl": {"name": "k1", "kl_coef": 0.1, "place": "loss"}}, "free of the reference"),
        ({"kl": {"name": "none", "kl_coef": 0.1, "place": "loss"}}, "does nothing"),
        ({"kl": {"name": "k3", "kl_coef": 0.1, "place": "advantage"}}, "loss, reward"),
    ],
)
def test_a_wrong_level_is_refused_in_one_line(sections: dict[str, Any], message: str) -> None:
    given = {"clip": {"name": "none"}, "tis": OFF, "kl": NO_KL} | sections
    with pytest.raises(ValueError, match=message) as caught:
        bind_objective(**given, entropy_coef=0.0)
    assert "\n" not in str(caught.value)


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(ValueError, match="global, micro_batch"):
        bind_reduction({"name": "token_mean", "scope": "rank"})


def test_reading_bounds_imports_no_torch() -> None:
    source = str(Path(bounds.__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {source!r}); import ablate.objective.bounds; "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
