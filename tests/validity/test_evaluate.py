"""Arms compared by the coefficients of their loss: what is equal is found, what differs by little is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ablate.compose import Composer
from ablate.plan import make_plan
from ablate.validity import check_plan, load_design
from ablate.validity.evaluate import evaluate_plan
from fake_sweep import grid, write_sweep


def found(composer: Composer, *arguments: str) -> set[tuple[str, str]]:
    return {(f.id, f.severity) for f in evaluate_plan(make_plan(composer, list(arguments)))}


@pytest.mark.parametrize(
    "arguments",
    [
        ["advantage=rloo,rloo_n"],  # no rollout of this task can fail, so no group is too small
        ["train.prompts_per_step=1", "reduction=token_mean,prompt_mean"],  # one group is the whole batch
        ["tis=product_mask", "tis.low=1e-9,1e-10", "tis.high=1e9"],  # log-ratios are held in [-20, 20]
    ],
)
def test_equal_arms_that_no_rule_names_are_refused(composer: Composer, arguments: list[str]) -> None:
    assert {f.id for f in check_plan(make_plan(composer, arguments))}.isdisjoint({"aliased-arms"})
    assert ("aliased-arms", "refuse") in found(composer, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["clip.clip_high=0.2,0.2001"],
        ["clip.clip_low=0.2,0.2001"],
        ["clip=gspo", "clip.clip_low=3e-4,3.01e-4"],
        ["clip=dual", "clip.dual_clip=3.0,3.001"],
        ["clip=sym,asym,asym_low,dual,none,gspo,cispo,sapo"],
        ["tis=on,off,sequence,icepop,geometric_mask,product_mask,outlier_mask"],
        ["tis.cap=2.0,2.001"],
        ["tis=sequence", "tis.cap=5.0,5.001"],
        ["tis=geometric_mask", "tis.low=0.99,0.9901"],
        ["tis=outlier_mask", "tis.high=100,100.1"],
        ["reduction=token_mean,sequence_mean,prompt_mean"],
        ["kl=none,k2,k3,k1_in_reward"],
        ["advantage=grpo,rloo,maxrl"],
        ["objective.old_logprobs=trainer,rollout"],
        ["objective.entropy_coef=0.0,0.001"],
        ["advantage=rloo,rloo_n", "task=pymethods2test", "rollout=vllm"],  # a verifier that can fail
        ["reduction=token_mean,token_mean_micro_batch", "engine.micro_batch_size=3"],
    ],
)
def test_levels_that_differ_are_told_apart_however_close(composer: Composer, arguments: list[str]) -> None:
    assert found(composer, *arguments) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["advantage=grpo,rloo", "train.group_size=2"],  # two rollouts: the spread is one number
        ["reduction=token_mean_micro_batch,seq_mean_token_sum_norm_micro_batch", "task.min_digits=2"],
        ["tis=icepop", "tis.renormalize=true,false", "reduction=token_mean"],
    ],
)
def test_levels_that_differ_by_a_scalar_are_warned_of(composer: Composer, arguments: list[str]) -> None:
    by_rule = {f.id for f in check_plan(make_plan(composer, arguments))}
    assert "scalar-only-contrast" in by_rule | {i for i, _ in found(composer, *arguments)}


@pytest.mark.parametrize(
    "arguments",
    [
        ["clip=sym,asym,gspo", "train.passes=1"],
        ["tis=on,off,sequence", "rollout.precision=fp32"],
        ["tis=on,off", "objective.old_logprobs=rollout"],
        ["kl=k2,k3", "kl.kl_coef=0"],
        ["tis.renormalize=true,false"],
        ["reduction=token_mean,sequence_mean,prompt_mean", "task.min_digits=3", "task.max_digits=3"],
        ["reduction=token_mean_micro_batch,sequence_mean_micro_batch", "engine.micro_batch_size=1"],
        ["reduction=token_mean,seq_mean_token_sum_norm,seq_mean_token_sum_norm_global"],
        ["advantage=rloo,grpo_no_std"],
    ],
)
def test_the_rules_of_the_plan_are_right_and_not_said_twice(composer: Composer, arguments: list[str]) -> None:
    # the rules speak without torch; here the same pairs come out as equal or parallel, and are left out
    plan = make_plan(composer, arguments)
    named = {f.where for f in check_plan(plan) if f.severity in ("refuse", "warn")}
    assert named
    assert evaluate_plan(plan) == []
    if arguments[0].startswith(("clip", "tis=on,off", "tis.renormalize")) and "sequence" not in arguments[0]:
        _assert_equal_without_the_rules(plan)


def _assert_equal_without_the_rules(plan: object) -> None:
    from ablate.validity.evaluate import _similar

    arms = list(plan.arms.values())  # type: ignore[attr-defined]
    pairs = [aliased for _, _, aliased in _similar(arms)]
    assert pairs == [True] * (len(arms) * (len(arms) - 1) // 2)


def test_arms_that_differ_outside_the_objective_are_not_compared(composer: Composer) -> None:
    assert found(composer, "optim.lr=1e-4,2e-4") == set()
    # within each learning rate the same two arms alias
    both = evaluate_plan(make_plan(composer, ["advantage=rloo,rloo_n", "optim.lr=1e-4,2e-4"]))
    assert [f.id for f in both] == ["aliased-arms", "aliased-arms"]


def test_an_allowed_finding_is_marked(composer: Composer) -> None:
    plan = make_plan(composer, ["advantage=rloo,rloo_n", "validity.allow=[aliased-arms]"])
    assert [f.allowed for f in evaluate_plan(plan)] == [True]


def test_a_frozen_sweep_can_be_evaluated_from_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    write_sweep(folder, grid(advantage=["rloo", "rloo_n"]), [0, 1], lambda a, s, step: 0.5, steps=5)
    assert [f.id for f in evaluate_plan(load_design(folder))] == ["aliased-arms"]
