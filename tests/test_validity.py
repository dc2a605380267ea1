"""Plan-time checks: each fires on a minimal case, stays silent on the demo, and names its remedy."""

from __future__ import annotations

import pytest

from ablate.compose import Composer
from ablate.errors import UsageError
from ablate.launch.sweeper import checked_plan
from ablate.plan import make_plan
from ablate.validity import check_plan, refusals


def found(composer: Composer, *arguments: str) -> dict[str, str]:
    return {f.id: f.severity for f in check_plan(make_plan(composer, list(arguments)))}


def test_the_demo_is_clean_but_for_its_single_seed(composer: Composer) -> None:
    assert found(composer, "clip=sym,asym", "tis=on,off") == {"single-seed": "warn", "inert-clip": "note"}
    assert found(composer, "clip=sym,asym", "tis=on,off", "seed=0,1,2") == {"inert-clip": "note"}


@pytest.mark.parametrize(
    ("arguments", "id_"),
    [
        (["clip=sym,asym", "train.passes=1"], "inert-clip"),
        (["clip.clip_high=0.2,0.28", "train.passes=1"], "inert-clip"),
        (["tis=on,off", "rollout.precision=fp32"], "inert-tis"),
        (["tis=on,off", "objective.old_logprobs=rollout"], "inert-tis"),
        (["kl=k2,k3", "kl.kl_coef=0"], "inert-kl"),
        (["advantage=rloo_n,rloo", "train.group_size=3"], "group-too-small"),
        (["clip=sym,asym", "train.group_size=1"], "group-too-small"),
        (["objective.max_response_len=999999"], "sentinel-length"),
        (["train.max_steps=80,100"], "unequal-caps"),
        (["objective.loss_scale=0.125"], "loss-scale"),
    ],
)
def test_a_plan_that_cannot_answer_is_refused_unless_allowed(
    composer: Composer, arguments: list[str], id_: str
) -> None:
    assert found(composer, *arguments)[id_] == "refuse"
    with pytest.raises(UsageError, match=id_) as caught:
        checked_plan(composer, arguments)
    assert f"validity.allow=[{id_}]" in str(caught.value)
    plan = checked_plan(composer, [*arguments, f"validity.allow=[{id_}]"])
    assert next(f.allowed for f in check_plan(plan) if f.id == id_)


def test_the_seeds_own_comparison_is_refused(composer: Composer) -> None:
    plan = make_plan(composer, ["preset=symclip", "clip=sym,asym_low"])
    assert [f.id for f in refusals(check_plan(plan))] == ["inert-clip"]


def test_several_updates_say_in_how_many_clip_can_act(composer: Composer) -> None:
    plan = make_plan(composer, ["clip=sym,asym", "train.passes=2", "train.mini_batches=2"])
    assert any("3 of the 4 updates" in f.message for f in check_plan(plan))


def test_only_pairs_that_differ_in_one_factor_are_compared(composer: Composer) -> None:
    # sym/on against asym/off differs in two factors: no statement about either
    assert sum(f.id == "inert-clip" for f in check_plan(make_plan(composer, ["clip=sym,asym", "tis=on,off"]))) == 2
