"""The typed config: one clear line for every mistake, identity that ignores what does not train."""

from __future__ import annotations

from typing import Any

import pytest

from ablate.compose import Composer, replace_value
from ablate.config import SECTIONS, parse
from ablate.errors import UsageError


@pytest.fixture
def tree(composer: Composer) -> dict[str, Any]:
    return composer.tree(())


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("optim.lr", -1, "optim.lr=-1: must be greater than 0"),
        ("optim.lr", "fast", "optim.lr=fast: must be a valid number"),
        ("optim.lr", float("nan"), "optim.lr=nan: must be a finite number"),
        ("train.max_steps", 0, "train.max_steps=0: must be greater than or equal to 1"),
        ("train.max_steps", 1.5, "train.max_steps=1.5: must be a valid integer"),
        ("rollout.precision", "fp8", "rollout.precision=fp8: must be bf16 or fp32"),
        ("rollout.top_p", 1.2, "rollout.top_p=1.2: must be less than or equal to 1"),
        ("seed", -3, "seed=-3: must be a whole number"),
        ("seed", True, "seed=True: must be a whole number"),
        ("train.mini_batches", 17, "at most train.prompts_per_step=16"),
        ("train.prompts_per_step", 10**6, "task.train_size"),
        ("eval.prompts", 10**6, "task.heldout_size"),
        ("select.cap", 151, "beyond train.max_steps=150"),
        ("optim", 3, "must be a section"),
        ("clip.name", "klip", "did you mean clip"),
    ],
)
def test_one_line_says_what_and_what_is_valid(tree: dict[str, Any], key: str, value: object, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(replace_value(tree, key, value))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_keys_name_the_nearest(tree: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"optim\.lrr: unknown key; did you mean lr\?"):
        parse({**tree, "optim": {**tree["optim"], "lrr": 1}})
    with pytest.raises(UsageError, match="optimm: unknown key; did you mean optim"):
        parse({**tree, "optimm": {}})
    with pytest.raises(UsageError, match="train: missing"):
        parse({k: v for k, v in tree.items() if k != "train"})


def test_numbers_written_as_text_become_numbers(tree: dict[str, Any]) -> None:
    # YAML 1.1 reads 1e-5 as text
    assert parse(replace_value(tree, "optim.lr", "1e-5")).optim.lr == 1e-5
    same = parse(replace_value(tree, "optim.lr", 0.00001))
    assert parse(replace_value(tree, "optim.lr", "1e-5")).digest() == same.digest()


@pytest.mark.parametrize(
    ("key", "value"),
    [("output", "/elsewhere"), ("launch.pilot", 3), ("cluster.ranks_per_node", 2), ("select.cap", 20),
     ("checkpoint.keep", 9), ("validity.allow", ["inert-clip"]), ("sweep.name", "other")],
)  # fmt: skip
def test_identity_ignores_what_does_not_train(tree: dict[str, Any], key: str, value: object) -> None:
    assert parse(replace_value(tree, key, value)).digest() == parse(tree).digest()


def test_identity_sees_everything_else(tree: dict[str, Any]) -> None:
    changes: dict[str, Any] = {
        "seed": 1, "clip.clip_high": 0.28, "reduction.scope": "micro_batch", "tis.cap": 3.0, "advantage.name": "rloo",
        "objective.entropy_coef": 0.1, "task.train_size": 4999, "model.layers": 3, "rollout.precision": "fp32",
        "engine.micro_batch_size": 4, "optim.lr": 1e-3, "train.passes": 1, "eval.interval": 5, "export.interval": 5,
    }  # fmt: skip
    configs = []
    for key, value in changes.items():
        changed = replace_value(tree, key, value)
        if key == "advantage.name":
            changed["advantage"] = {"name": "rloo"}
        configs.append(parse(changed))
    digests = {c.digest() for c in configs} | {parse(tree).digest()}
    assert len(digests) == len(changes) + 1


def test_leaving_out_a_key_makes_only_that_key_irrelevant(tree: dict[str, Any]) -> None:
    a, b = parse(tree), parse(replace_value(tree, "optim.lr", 1e-3))
    assert a.digest(without=("optim.lr",)) == b.digest(without=("optim.lr",))
    c = parse(replace_value(tree, "optim.eps", 1e-6))
    assert a.digest(without=("optim.lr",)) != c.digest(without=("optim.lr",))


def test_a_tree_survives_a_round_trip(tree: dict[str, Any]) -> None:
    config = parse(tree)
    assert parse(config.tree()).digest() == config.digest()
    assert set(config.tree()) == {"seed", "output", *SECTIONS, "clip", "reduction", "tis", "advantage", "kl"}
