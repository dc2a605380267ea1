"""Plan-time checks: each fires on a minimal case, stays silent on the demo, and names its remedy."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ablate import validity
from ablate.compose import Composer
from ablate.errors import UsageError
from ablate.launch.sweeper import checked_plan
from ablate.plan import make_plan
from ablate.validity import Pilot, check_plan, refusals
from ablate.validity.finding import IDS
from ablate.validity.plan_checks import kl_k1_loss
from fake_sweep import make_fake_plan


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
        (["reduction=token_mean,sequence_mean", "task.min_digits=4", "task.max_digits=4"], "inert-reduction"),
        (["tis=on,off", "rollout.top_p=0.95"], "truncated-support"),
        (["tis.cap=2.0,3.0", "rollout.temperature=0"], "truncated-support"),
        (
            ["reduction=token_mean_micro_batch,sequence_mean_micro_batch", "engine.micro_batch_size=1"],
            "aliased-reductions",
        ),
        (["reduction=token_mean_micro_batch,token_mean"], "aliased-reductions"),
        (["tis.renormalize=true,false"], "aliased-arms"),
        (["reduction=token_mean", "objective.max_response_len=6,12"], "aliased-arms"),
        (["engine.micro_batch_size=1,2"], "aliased-arms"),
        (["kl=none,k2", "kl.kl_coef=0"], "inert-kl"),
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


@pytest.mark.parametrize(
    ("arguments", "id_"),
    [
        (["clip=sym,gspo", "engine.precision=bf16", "rollout.precision=fp32"], "inert-clip"),
        (["clip=sym,asym", "rollout.min_p=0.05"], "truncated-support"),
        (["rollout.temperature=1.0,0.7"], "incomparable-metric"),
        (["preset=symclip", "task.reward=binary,share_of_tests"], "incomparable-metric"),
        (["reduction=token_mean,seq_mean_token_sum_norm"], "scalar-only-contrast"),
        (["reduction=seq_mean_token_sum_norm,seq_mean_token_sum_norm_global"], "scalar-only-contrast"),
        (["advantage=rloo,grpo_no_std"], "scalar-only-contrast"),
        (["reduction=token_mean,seq_mean_token_sum_norm", "rollout.max_response_len=64"], "scale-confound"),
        (["preset=symclip_literal", "reduction=token_mean,seq_mean_token_sum_norm"], "scale-confound"),
        (["rollout=native,vllm"], "hidden-length-confound"),
        (["reduction=token_mean_micro_batch", "engine.micro_batch_size=1"], "aliased-reductions"),
        (["clip=sym,asym"], "single-seed"),
    ],
)
def test_a_plan_that_may_mislead_is_warned_of(composer: Composer, arguments: list[str], id_: str) -> None:
    assert (id_, "warn") in {(f.id, f.severity) for f in check_plan(make_plan(composer, arguments))}


@pytest.mark.parametrize(
    ("arguments", "id_"),
    [
        (["tis=icepop", "tis.renormalize=true,false"], "aliased-arms"),  # a level that does drop tokens
        (["objective.max_response_len=6,12"], "aliased-arms"),  # a norm that divides by it
        (["clip=cispo,sapo"], "aliased-arms"),
        (["engine.micro_batch_size=1,2", "reduction=token_mean_micro_batch"], "aliased-arms"),
        (["tis.cap=0.5,0.7", "objective.old_logprobs=rollout"], "aliased-arms"),  # caps that act at rho 1
        (["reduction=token_mean_micro_batch,sequence_mean_micro_batch", "engine.micro_batch_size=2"],
         "aliased-reductions"),
        (["reduction=token_mean,seq_mean_token_sum_norm"], "scale-confound"),
        (["reduction=token_mean,seq_mean_token_sum_norm", "rollout.max_response_len=64", "optim.grad_clip=0"],
         "scale-confound"),
        (["reduction=token_mean,sequence_mean"], "scalar-only-contrast"),
        (["advantage=rloo,grpo"], "scalar-only-contrast"),
        (["advantage=rloo,grpo_no_std", "objective.entropy_coef=0.01"], "scalar-only-contrast"),
        (["rollout.max_response_len=6,12"], "hidden-length-confound"),
        (["clip=sym,gspo"], "aliased-arms"),
        (["optim.lr=1e-4,2e-4"], "incomparable-metric"),
        (["reduction=token_mean,sequence_mean", "rollout=vllm", "task=pymethods2test"], "inert-reduction"),
    ],
)  # fmt: skip
def test_a_near_case_is_left_alone(composer: Composer, arguments: list[str], id_: str) -> None:
    assert id_ not in {f.id for f in check_plan(make_plan(composer, arguments))}


def test_a_fault_with_a_name_is_not_named_twice(composer: Composer) -> None:
    def ids(*arguments: str) -> set[str]:
        return {f.id for f in refusals(check_plan(make_plan(composer, list(arguments))))}

    assert ids("clip=sym,asym", "train.passes=1") == {"inert-clip"}
    assert ids("clip=sym,asym", "tis=on,off", "train.passes=1", "rollout.precision=fp32") == {"inert-clip", "inert-tis"}


def test_arms_that_alias_over_two_factors_are_found(composer: Composer, tmp_path: Path) -> None:
    # neither pair differs in one factor only, so neither inert check can speak
    arms = {"a": {"clip": "sym", "tis": "on"}, "b": {"clip": "asym", "tis": "off"}}
    fixed = ("train.passes=1", "rollout.precision=fp32")
    found = check_plan(make_fake_plan(tmp_path / "sweep", arms, [0, 1, 2], overrides=fixed))
    assert {f.id for f in refusals(found)} == {"aliased-arms", "confounded-arms"}


def test_a_list_of_arms_needs_the_arms_between(composer: Composer, tmp_path: Path) -> None:
    arms = {"base": {}, "wide": {"clip": "asym"}, "both": {"clip": "asym", "tis": "off"}}

    def confounded(arms: dict[str, dict[str, str]]) -> list[str]:
        found = check_plan(make_fake_plan(tmp_path / "sweep", arms, [0, 1, 2]))
        return [f.where for f in found if f.id == "confounded-arms"]

    assert confounded(arms) == ["base vs both"]
    assert confounded({**arms, "off": {"tis": "off"}}) == []


def test_arms_at_other_seeds_do_not_pair(composer: Composer) -> None:
    plan = make_plan(composer, ["clip=sym,asym", "seed=0,1,2"])
    lame = replace(plan, runs=plan.runs[:-1])
    assert [(f.id, f.where) for f in refusals(check_plan(lame))] == [("unpaired-seeds", "clip=asym")]


def test_k1_as_a_loss_is_refused_even_where_the_schema_did_not(composer: Composer) -> None:
    plan = make_plan(composer, ["kl=k1_in_reward"])
    config = plan.runs[0].config
    inside = replace(config, kl=config.kl.model_copy(update={"place": "loss"}))
    assert [f.id for f in kl_k1_loss(replace(plan, runs=(replace(plan.runs[0], config=inside),)))] == ["kl-k1-loss"]
    assert list(kl_k1_loss(plan)) == []


def test_a_pilots_spread_says_how_many_seeds_are_needed(composer: Composer) -> None:
    plan = make_plan(composer, ["clip=sym,asym", "seed=0,1,2", "sweep.smallest_effect=0.02"])
    found = [f for f in check_plan(plan, Pilot(sd=0.03)) if f.id == "underpowered"]
    # a paired t test with sd .03 needs n for 80% power at .02: scipy's noncentral t, worked apart
    assert "take 20 seeds" in found[0].message
    assert "underpowered" not in {f.id for f in check_plan(plan, Pilot(sd=0.003))}
    assert "underpowered" not in {f.id for f in check_plan(plan)}


def test_a_pilots_lengths_can_refuse_a_reduction(composer: Composer) -> None:
    plan = make_plan(composer, ["reduction=token_mean,sequence_mean", "rollout=vllm", "task=pymethods2test"])
    assert "inert-reduction" in {f.id for f in check_plan(plan, Pilot(length_cv=0.01))}
    assert "inert-reduction" not in {f.id for f in check_plan(plan, Pilot(length_cv=0.3))}


def test_the_published_series_gets_the_findings_it_deserves(composer: Composer) -> None:
    found = check_plan(make_plan(composer, ["+sweep=symclip_series"]))
    where: dict[str, list[str]] = {}
    for f in found:
        where.setdefault(f.id, []).append(f.where)
    assert where["inert-clip"] == ["untrunc vs symclip"]
    assert "control vs seqmean-tis" in where["aliased-reductions"]
    assert {"control", "minp"} <= {*where["truncated-support"]}
    assert not {"untrunc", "symclip", "lrboost"} & {*where["truncated-support"]}
    assert {"control vs shaped", "control vs minp", "control vs unitsyn"} <= {*where["incomparable-metric"]}
    # all but the arm that changes the reduction alone, and the one with other data
    confounded = {w.removeprefix("control vs ") for w in where["confounded-arms"]}
    assert confounded == {
        "seqmean-tis", "seqnorm-tis", "shaped", "minp", "untrunc", "symclip", "lrboost", "stageC-pbs",
        "stageD-thinkbudget",
    }  # fmt: skip
    assert {"unequal-caps", "single-seed"} <= where.keys()


LEVELS = {
    "clip": ["sym", "asym", "asym_low", "dual", "none", "gspo", "cispo", "sapo"],
    "reduction": ["token_mean", "sequence_mean", "prompt_mean"],
    "tis": ["on", "off", "sequence", "icepop", "geometric_mask", "product_mask", "outlier_mask"],
    "advantage": ["grpo", "rloo"],
    "kl": ["none", "k2", "k3", "k1_in_reward"],
    "optim.lr": ["1e-4", "2e-4", "3e-4"],
}
SETTINGS = {
    "train.passes": ["2", "3"],
    "train.mini_batches": ["1", "2", "4"],
    "train.group_size": ["4", "8", "16"],
    "train.prompts_per_step": ["8", "16", "32"],
    "task.max_digits": ["4", "5"],
    "optim.grad_clip": ["0", "1"],
}


def clean_arguments(number: int) -> list[str]:
    """A sensible sweep: one to three factors of two or three levels, three to six seeds."""
    draw = random.Random(number)
    factors = draw.sample(sorted(LEVELS), draw.randint(1, 3))
    swept = [f"{k}={','.join(draw.sample(LEVELS[k], draw.randint(2, min(3, len(LEVELS[k])))))}" for k in factors]
    fixed = [f"{k}={draw.choice(v)}" for k, v in SETTINGS.items() if draw.random() < 0.5]
    base = draw.choice([*LEVELS["reduction"], "seq_mean_token_sum_norm_global"])
    return [
        *swept,
        *fixed,
        *([] if "reduction" in factors else [f"reduction={base}"]),
        f"seed=range({draw.randint(3, 6)})",
    ]


@pytest.mark.parametrize("start", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (25, 50, 75))])
def test_clean_plans_raise_nothing(composer: Composer, start: int) -> None:
    for number in range(start, start + 25):
        arguments = clean_arguments(number)
        found = [f for f in check_plan(make_plan(composer, arguments)) if f.severity != "note"]
        assert found == [], arguments


PLANTED = {
    "inert-clip": ["clip=sym,asym", "train.passes=1", "train.mini_batches=1"],
    "inert-tis": ["tis=on,off", "rollout.precision=fp32"],
    "inert-reduction": ["reduction=token_mean,sequence_mean", "task.min_digits=5", "task.max_digits=5"],
    "aliased-arms": ["tis=sequence", "tis.renormalize=true,false"],
    "truncated-support": ["rollout.top_k=20"],
    "sentinel-length": ["objective.max_response_len=4096"],
    "group-too-small": ["advantage=rloo_n", "train.group_size=3"],
    "loss-scale": ["objective.loss_scale=0.5"],
    "incomparable-metric": ["rollout.temperature=1.0,1.2"],
    "unequal-caps": ["export.interval=5,10"],
}


@pytest.mark.parametrize("id_", PLANTED)
@pytest.mark.parametrize("number", range(5))
def test_a_fault_planted_in_a_clean_plan_is_found(composer: Composer, id_: str, number: int) -> None:
    planted = PLANTED[id_]
    keys = {a.split("=")[0] for a in planted} | {a.split("=")[0].split(".")[0] for a in planted if "tis." in a}
    clean = [a for a in clean_arguments(number) if a.split("=")[0] not in keys]
    assert id_ in {f.id for f in check_plan(make_plan(composer, [*clean, *planted]))}


def test_the_seeds_own_comparison_is_refused(composer: Composer) -> None:
    plan = make_plan(composer, ["preset=symclip", "clip=sym,asym_low"])
    assert [f.id for f in refusals(check_plan(plan))] == ["inert-clip"]


def test_several_updates_say_in_how_many_clip_can_act(composer: Composer) -> None:
    plan = make_plan(composer, ["clip=sym,asym", "train.passes=2", "train.mini_batches=2"])
    assert any("3 of the 4 updates" in f.message for f in check_plan(plan))


def test_only_pairs_that_differ_in_one_factor_are_compared(composer: Composer) -> None:
    # sym/on against asym/off differs in two factors: no statement about either
    assert sum(f.id == "inert-clip" for f in check_plan(make_plan(composer, ["clip=sym,asym", "tis=on,off"]))) == 2


def test_every_id_is_known_and_an_unknown_one_is_refused(composer: Composer) -> None:
    sources = "".join(p.read_text() for p in Path(validity.__file__).parent.glob("*.py"))
    given = re.findall(r'Finding\(\s*"([a-z0-9-]+)"', sources)
    # the tags of steps are findings whose id is a variable
    assert {*given, "cold-start", "post-resume", "epoch-boundary"} == IDS
    with pytest.raises(UsageError, match=r"validity\.allow=inert-clap: no such check; did you mean inert-clip"):
        check_plan(make_plan(composer, ["validity.allow=[inert-clap]"]))
