"""Overrides and sweep files become runs: right arms, right identities, safe names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.cli import composer as open_composer
from ablate.compose import Composer, config_dir
from ablate.errors import UsageError
from ablate.plan import make_plan, pilot_plan, safe_name


def test_the_demo_is_four_arms(composer: Composer) -> None:
    plan = make_plan(composer, ["clip=sym,asym", "tis=on,off"])
    assert [r.folder for r in plan.runs] == [
        "clip=sym,tis=on/seed=0", "clip=sym,tis=off/seed=0", "clip=asym,tis=on/seed=0", "clip=asym,tis=off/seed=0",
    ]  # fmt: skip
    assert plan.name.startswith("clip_x_tis-")
    assert [(r.config.clip.clip_high, r.config.tis.name) for r in plan.runs] == [
        (0.2, "token"), (0.2, "off"), (0.28, "token"), (0.28, "off"),
    ]  # fmt: skip


def test_a_run_of_the_grid_is_the_run_hydra_composes_alone(composer: Composer) -> None:
    for run in make_plan(composer, ["clip=sym,cispo", "tis=on,icepop", "optim.lr=1e-4,5e-4"]).runs:
        alone = [f"clip={run.levels['clip']}", f"tis={run.levels['tis']}", f"optim.lr={run.levels['optim.lr']}"]
        assert make_plan(composer, alone).runs[0].digest == run.digest


def test_a_fixed_value_inside_a_factor_holds_for_its_levels(composer: Composer) -> None:
    plan = make_plan(composer, ["clip=sym,asym", "clip.clip_low=0.1"])
    assert [(r.config.clip.clip_low, r.config.clip.clip_high) for r in plan.runs] == [(0.1, 0.2), (0.1, 0.28)]


def test_order_and_spelling_do_not_change_identity(composer: Composer) -> None:
    a = make_plan(composer, ["clip=sym,asym", "tis=on,off", "optim.lr=0.001"])
    b = make_plan(composer, ["optim.lr=1e-3", "tis=off,on", "clip=asym,sym"])
    assert a.name == b.name
    assert {r.digest for r in a.runs} == {r.digest for r in b.runs}


def test_seeds_and_levels_extend_a_sweep_and_another_lr_is_another_one(composer: Composer) -> None:
    one = make_plan(composer, ["clip=sym,asym"])
    assert make_plan(composer, ["clip=sym,asym,gspo", "seed=0,1"]).name == one.name
    assert make_plan(composer, ["clip=sym,asym", "optim.lr=1e-3"]).name != one.name
    assert make_plan(composer, ["clip=sym,asym", "tis=off"]).name != one.name


def test_the_same_arm_twice_is_one_arm_said_once(composer: Composer) -> None:
    plan = make_plan(composer, ["tis=on,on"])
    assert len(plan.runs) == 1
    assert plan.merged == ("tis=on was asked for twice: one arm",)
    plan = make_plan(composer, ["optim.lr=1e-4,0.0001"])
    assert len(plan.runs) == 1
    plan = make_plan(composer, ["clip=sym", "clip.clip_high=0.2,0.28", "seed=0,0,1"])
    assert [r.folder for r in plan.runs] == [f"clip_high={h}/seed={s}" for h in (0.2, 0.28) for s in (0, 1)]


def test_two_names_for_one_arm_are_said(composer: Composer) -> None:
    plan = make_plan(composer, ["clip=sym,asym", "clip.clip_high=0.2"])
    assert len(plan.runs) == 1
    assert plan.merged == ("clip=asym trains exactly what clip=sym trains: one arm",)


@pytest.fixture
def own_sweep(tmp_path: Path) -> Path:
    (tmp_path / "sweep").mkdir()
    return tmp_path


def test_unquoted_on_and_off_work_in_a_sweep_file(own_sweep: Path) -> None:
    (own_sweep / "sweep" / "mine.yaml").write_text("factors: {tis: [on, off], optim.lr: [1e-4, 5e-4]}\nseeds: [3, 4]\n")
    with open_composer(str(own_sweep)) as source:
        plan = make_plan(source, ["+sweep=mine"])
    assert [r.levels["tis"] for r in plan.runs][::2] == ["on", "on", "off", "off"]
    assert {r.levels["optim.lr"] for r in plan.runs} == {1e-4, 5e-4}
    assert plan.seeds == (3, 4)


def test_the_command_line_overrides_a_sweep_file(composer: Composer) -> None:
    plan = make_plan(composer, ["+sweep=clip_x_tis", "seed=7,8", "clip=sym", "optim.lr=1e-4"])
    assert plan.seeds == (7, 8)
    assert all(r.config.optim.lr == 1e-4 for r in plan.runs)
    assert make_plan(composer, ["+sweep=clip_x_tis", "seed=9"]).seeds == (9,)


def test_own_levels_from_a_folder(own_sweep: Path) -> None:
    (own_sweep / "clip").mkdir()
    (own_sweep / "clip" / "wide.yaml").write_text("name: clip\nclip_low: 0.4\nclip_high: 0.4\n")
    with open_composer(str(own_sweep)) as source:
        plan = make_plan(source, ["clip=sym,wide"])
    assert [r.config.clip.clip_high for r in plan.runs] == [0.2, 0.4]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["clip=sym,symm"], "clip=symm: no such level; did you mean sym?"),
        (["optim.lrr=1,2"], "optim.lrr: unknown key; did you mean lr?"),
        (["optim.lr=0,1e-4"], "optim.lr=0: must be greater than 0"),
        (["seed=0,-1"], "seed=-1: must be a whole number"),
        (["seed=0,a"], "seed=a: must be a whole number"),
        (["optim.lr=interval(0,1)"], "an interval has no levels"),
    ],
)
def test_mistakes_in_a_swept_key_are_one_line(composer: Composer, arguments: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(composer, arguments)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", sorted((config_dir() / "sweep").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_sweep_file_plans(composer: Composer, path: Path) -> None:
    plan = make_plan(composer, [f"+sweep={path.stem}"])
    assert plan.question
    assert len({r.folder for r in plan.runs}) == len(plan.runs)


@pytest.mark.parametrize(
    "group",
    ["clip", "reduction", "tis", "advantage", "kl", "task", "model", "rollout", "engine", "optim", "cluster", "preset"],
)
def test_every_file_of_conf_composes(composer: Composer, group: str) -> None:
    for name in composer.options(group):
        assert make_plan(composer, [f"{group}={name}"]).runs[0].config


def test_the_seed_run_as_meant_has_every_published_figure(composer: Composer) -> None:
    c = make_plan(composer, ["preset=symclip"]).runs[0].config
    assert (c.clip.name, c.clip.clip_low, c.clip.clip_high) == ("clip", 0.2, 0.2)
    assert (c.reduction.name, c.reduction.scope) == ("seq_mean_token_sum_norm_global", "global")
    assert (c.tis.name, c.tis.cap) == ("token", 2.0)
    assert (c.advantage.name, c.advantage.min_group_size) == ("rloo_n", 4)
    assert (c.kl.name, c.kl.kl_coef, c.objective.entropy_coef) == ("none", 0, 0)
    assert (c.rollout.temperature, c.rollout.top_p, c.rollout.top_k, c.rollout.min_p) == (1.0, 1.0, 0, 0.0)
    assert (c.optim.lr, c.optim.beta1, c.optim.beta2, c.optim.weight_decay) == (8e-6, 0.9, 0.999, 0.0)
    assert (c.optim.grad_clip, c.optim.warmup_updates) == (0.9, 0)
    assert (c.train.prompts_per_step, c.train.group_size, c.updates_per_step) == (64, 8, 1)
    assert (c.train.max_steps, c.checkpoint.interval, c.export.interval, c.seed) == (80, 2, 5, 42)
    assert (c.rollout.max_context_len, c.rollout.max_turn_len, c.rollout.staleness) == (32768, 4096, 16)
    assert (c.engine.micro_batch_size, c.max_response_len, c.objective.loss_scale) == (1, 32768, 1.0)
    assert c.cluster.nodes * c.cluster.ranks_per_node == 56
    assert c.task.train_size // c.train.prompts_per_step == 78
    literal = make_plan(composer, ["preset=symclip_literal"]).runs[0].config
    assert (literal.max_response_len, literal.objective.loss_scale) == (1_004_095, 0.125)


def test_a_pilot_shortens_every_arm_at_one_seed(composer: Composer) -> None:
    plan = make_plan(composer, ["clip=sym,asym", "seed=0,1,2", "select.cap=100"])
    pilot = pilot_plan(plan, 3)
    assert pilot.name == f"{plan.name}/pilot"
    assert [(r.arm, r.seed, r.config.train.max_steps) for r in pilot.runs] == [("clip=sym", 0, 3), ("clip=asym", 0, 3)]
    assert not {r.digest for r in pilot.runs} & {r.digest for r in plan.runs}


@given(st.text(max_size=300))
def test_folder_names_need_no_quoting(text: str) -> None:
    name = safe_name(text)
    assert re.fullmatch(r"[A-Za-z0-9._+=,-]{1,80}", name)
    assert not name.startswith((".", "-"))


@given(st.text(max_size=120), st.text(max_size=120))
def test_different_values_get_different_folders(a: str, b: str) -> None:
    assert (safe_name(a) == safe_name(b)) == (a == b)


@pytest.mark.parametrize("value", ["a=b", "a/b", "../x", "a b", "*", "é", "'q'", "@", "#", "%", "x" * 300])
def test_hostile_values_stay_inside_the_sweep(composer: Composer, value: str) -> None:
    quoted = value.replace("'", "\\'")
    plan = make_plan(composer, ["model=qwen3_8b", f"model.path='{quoted}',other"])
    assert len(plan.runs) == 2
    for run in plan.runs:
        assert Path(run.folder).parts == (run.arm, "seed=0")
        assert len(run.arm) <= 80
    assert plan.runs[0].config.model.path == value
