"""Record checks: each fires on a minimal case and is silent on a healthy sweep, and on records without its metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from invented import every_update, invent

from ablate.compose import Composer
from ablate.errors import UsageError
from ablate.select import ema
from ablate.validity import RunRecord, alternatives, check_comparison, check_records, load_design, load_records
from ablate.validity.curves import flat_drop, rho_z, step_tags
from fake_sweep import grid, write_sweep

SWEEP = ("clip=sym,asym", "seed=0,1,2")


def loud(findings: list[Any]) -> list[str]:
    return [f.id for f in findings if f.severity != "note"]


def test_a_healthy_sweep_is_clean(composer: Composer) -> None:
    assert loud(check_records(invent(composer, *SWEEP))) == []


def test_a_solved_task_with_little_entropy_is_clean(composer: Composer) -> None:
    def solved(run: Any, step: int) -> float:
        return min(0.99, rising_fast(step) + 0.005 * np.random.default_rng((run.seed, step)).normal())

    def rising_fast(step: int) -> float:
        return 0.3 + 0.67 * (1 - np.exp(-step / 8))

    runs = invent(composer, *SWEEP, reward=solved, changes={"reward/groups_effective": lambda r, s: 0.8 * 0.95**s})
    cold = [_with_entropy(run) for run in runs]
    assert loud(check_records(cold)) == []
    assert "low-entropy" in step_tags(cold[0])[60]


def _with_entropy(run: RunRecord) -> RunRecord:
    """Entropy falls by a factor of 40 over 60 steps."""
    rows = [
        {**row, "updates": [{**u, "entropy/mean": 0.7 * 0.94 ** row["step"]} for u in row.get("updates") or ()]}
        for row in run.rows
    ]
    return replace(run, rows=rows, all_rows=rows)


def test_records_of_two_metrics_alone_pass_every_check(composer: Composer) -> None:
    bare = [_bare(run) for run in invent(composer, *SWEEP)]
    assert loud(check_records(bare)) == []
    assert check_records([]) == []
    assert loud(check_records([replace(bare[0], rows=[], all_rows=[])])) == []


def _bare(run: RunRecord) -> RunRecord:
    rows = [{"step": r["step"], "attempt": 1, "reward/mean": r["reward/mean"]} for r in run.rows]
    return replace(run, rows=rows, all_rows=rows, code={})


def of(sym: float, asym: float) -> Callable[[Any, int], float]:
    """One value for the runs of each arm."""
    return lambda run, step: asym if run.arm == "clip=asym" else sym


ROW_CASES: list[tuple[str, str, Any, Any]] = [
    # id, key, a fault in it, a near case that is fine
    ("rho-mass", "mismatch/rho_mean", 0.987, 1.0003),
    ("no-group-variance", "reward/groups_effective", 0.4, 0.55),
    ("infra-failures", "reward/excluded_share", 0.06, 0.04),
    ("truncated-responses", "length/truncated_share", 0.11, 0.09),
    ("mismatch-growth", "mismatch/ess", 0.45, 0.55),
    ("mismatch-growth", "mismatch/k3", lambda r, s: 1e-5 * 1.1**s, lambda r, s: 1e-5 * 1.02**s),
    ("prompts-diverged", "prompts_hash", lambda r, s: f"{r.arm}{s}", lambda r, s: f"{r.seed}{s}"),
    ("identical-trajectories", "weights_hash", lambda r, s: f"{r.seed} {s}", lambda r, s: f"{r} {s}"),
    ("failure-imbalance", "reward/excluded_share", of(0.0, 0.04), of(0.0, 0.02)),
    ("failure-imbalance", "length/truncated_share", of(0.02, 0.06), of(0.09, 0.09)),
    ("no-group-variance", "reward/groups_effective", of(0.6, 0.95), of(0.6, 0.8)),
    ("token-budget", "tokens/trained", of(1000, 1400), of(1000, 1200)),
]


@pytest.mark.parametrize(("id_", "key", "fault", "fine"), ROW_CASES)
def test_a_fault_in_the_rows_is_found_and_a_near_case_is_not(
    composer: Composer, id_: str, key: str, fault: Any, fine: Any
) -> None:
    assert id_ in loud(check_records(invent(composer, *SWEEP, changes={key: fault})))
    assert id_ not in loud(check_records(invent(composer, *SWEEP, changes={key: fine})))


UPDATE_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("eps-floor", {"optim/sqrt_v_share_under_10_eps": 0.6}, {"optim/sqrt_v_share_under_10_eps": 0.4}),
    ("clip-norm-always", {"optim/grad_norm": 1.2}, {"optim/grad_norm": 0.9}),
    ("low-precision-updates", {"optim/updates_under_half_ulp_share": 0.6}, {"optim/updates_under_half_ulp_share": 0.3}),
]  # fmt: skip


@pytest.mark.parametrize(("id_", "fault", "fine"), UPDATE_CASES)
def test_a_fault_in_the_updates_is_found(
    composer: Composer, id_: str, fault: dict[str, Any], fine: dict[str, Any]
) -> None:
    runs = invent(composer, *SWEEP)
    assert id_ in loud(check_records([every_update(r, **fault) for r in runs]))
    assert id_ not in loud(check_records([every_update(r, **fine) for r in runs]))


def test_a_gradient_clip_that_never_binds_is_a_note(composer: Composer) -> None:
    runs = [every_update(r, **{"optim/grad_norm": 3.6e-5}) for r in invent(composer, *SWEEP)]
    assert {f.severity for f in check_records(runs) if f.id == "clip-norm-idle"} == {"note"}
    free = invent(composer, *SWEEP, "optim.grad_clip=0")
    assert "clip-norm-idle" not in [f.id for f in check_records(free)]


def test_arms_whose_step_size_differs_are_named(composer: Composer) -> None:
    runs = invent(composer, *SWEEP)

    def sizes(clipped: bool, v: float) -> dict[str, Any]:
        return {"optim/clipped": clipped, "optim/sqrt_v_median": v}

    one_clipped = [every_update(r, **sizes(r.arm == "clip=asym", 1e-3)) for r in runs]
    one_at_eps = [every_update(r, **sizes(False, 5e-7 if r.arm == "clip=asym" else 1e-3)) for r in runs]
    neither = [every_update(r, **sizes(False, 1e-3)) for r in runs]
    assert "scale-confound-observed" in loud(check_records(one_clipped))
    assert "scale-confound-observed" in loud(check_records(one_at_eps))
    assert "scale-confound-observed" not in loud(check_records(neither))


@pytest.mark.parametrize(("share", "word"), [(0.0, "warn"), (5e-7, "warn"), (1e-3, "note"), (0.02, None)])
def test_the_observed_dose_tells_inert_from_negligible(composer: Composer, share: float, word: str | None) -> None:
    runs = invent(composer, *SWEEP)
    dosed = [
        every_update(r, **{f"dose/{k}": 0.0 if k == r.arm else share for k in ("clip=sym", "clip=asym")}) for r in runs
    ]
    found = [f for f in check_records(dosed) if f.id == "inert-observed"]
    assert [f.severity for f in found] == ([word] if word else [])


def test_a_level_that_acts_in_one_arm_only_is_not_called_inert(composer: Composer) -> None:
    runs = invent(composer, "clip=sym,asym", "tis=on,off")
    dosed = [every_update(r, **{"dose/tis=off": 0.05 if r.levels["clip"] == "asym" else 0.0}) for r in runs]
    assert "inert-observed" not in [f.id for f in check_records(dosed)]


def test_the_published_collapse_is_found(composer: Composer) -> None:
    raw = {1: 0.080, 4: 0.041, 8: 0.023}

    def reward(run: Any, step: int) -> float:
        return raw.get(step, 0.06 if step < 4 else 0.03 if step < 8 else 0.0)

    assert "collapsed" in loud(check_records(invent(composer, "clip=sym", reward=reward, steps=17)))


def test_a_decline_beyond_noise_is_past_its_peak(composer: Composer) -> None:
    def peaked(run: Any, step: int) -> float:
        return 0.7 - abs(step - 30) * 0.012

    found = loud(check_records(invent(composer, "clip=sym", reward=peaked, steps=78)))
    assert "past-peak" in found
    assert "collapsed" in found


def test_flat_runs_are_past_their_peak_in_one_of_twenty() -> None:
    # an independent simulation: pandas' recursion by ablate.select.ema, numpy's default generator
    noise = np.random.default_rng(5).normal(size=(1500, 80))
    drops = [max(a[5:]) - a[-1] for a in (ema(list(row), 5) for row in noise)]
    assert np.mean(np.array(drops) > flat_drop(80, 5)) == pytest.approx(0.05, abs=0.02)
    assert flat_drop(80, 5) == flat_drop.__wrapped__(80, 5)


def test_no_improvement_needs_an_interval_above_zero(composer: Composer) -> None:
    def flat(run: Any, step: int) -> float:
        return 0.5 + 0.02 * float(np.random.default_rng((run.seed, step)).normal())

    assert "no-improvement" in loud(check_records(invent(composer, *SWEEP, reward=flat)))
    assert "no-improvement" in loud(check_records(invent(composer, "clip=sym", reward=flat)))
    assert "no-improvement" not in loud(check_records(invent(composer, "clip=sym")))


def test_rho_is_judged_over_the_whole_run_not_by_one_step(composer: Composer) -> None:
    odd = invent(composer, "clip=sym", changes={"mismatch/rho_mean": lambda r, s: 1.002 if s == 7 else 1.0})
    assert "rho-mass" not in loud(check_records(odd))
    off, error = rho_z(odd[0]) or (0.0, 0.0)
    assert off == pytest.approx(0.002 / 60)
    # one step of 60 is off by .002: the spread between steps, not that within them, is the error
    assert error == pytest.approx(0.002 / 60, rel=0.02)


def _lineage(run: RunRecord, rows: list[dict[str, Any]], all_rows: list[dict[str, Any]]) -> list[RunRecord]:
    return [replace(run, rows=rows, all_rows=all_rows)]


def test_lineage_problems_are_named(composer: Composer) -> None:
    run = invent(composer, "clip=sym")[0]
    rows = list(run.rows)
    rerun = [{**r, "attempt": 2} for r in rows[41:]]
    resumed = _lineage(run, rows[:41] + rerun, rows[:46] + rerun)
    found = {f.id: f for f in check_records(resumed)}
    assert "41, 42, 43, 44, 45" in found["duplicated-steps"].message
    assert "41" in found["post-resume"].message
    assert loud(check_records(resumed)) == []
    gap = check_records(_lineage(run, rows[:20] + rows[22:], rows[:20] + rows[22:]))
    assert any(f.id == "gaps" and "20, 21" in f.message for f in gap)
    beyond = [*rows, {**rows[-1], "step": 61}]
    assert "past-cap" in loud(check_records(_lineage(run, beyond, beyond)))


def test_epoch_boundaries_are_tagged_and_the_choice_says_whether_it_used_them(composer: Composer) -> None:
    near = invent(composer, "clip=sym", changes={"epoch": lambda r, s: int(s >= 59)})
    far = invent(composer, "clip=sym", changes={"epoch": lambda r, s: int(s >= 20)})
    said = [next(f.message for f in check_records(x) if f.id == "epoch-boundary") for x in (near, far)]
    assert "used it" in said[0]
    assert "leans on none" in said[1]


def test_mixed_code_and_ranks_are_named(composer: Composer) -> None:
    one, two = invent(composer, "clip=sym,asym")
    other = replace(two, code={**two.code, "versions": {"torch": "2.14"}})
    assert any(f.id == "mixed-code" and "torch" in f.message for f in check_records([one, other]))
    spread = replace(
        two, config=replace(two.config, cluster=two.config.cluster.model_copy(update={"ranks_per_node": 2}))
    )
    assert any(f.id == "mixed-code" and "ranks" in f.message for f in check_records([one, spread]))
    assert "mixed-code" not in [f.id for f in check_records([one, two])]


def test_unpaired_seeds_are_named(composer: Composer) -> None:
    runs = invent(composer, *SWEEP)
    found = [f for f in check_records(runs[:-1]) if f.id == "unpaired-seeds"]
    assert [f.where for f in found] == ["clip=asym"]


def test_an_allowed_finding_stays_visible(composer: Composer) -> None:
    runs = invent(composer, "clip=sym", "validity.allow=[infra-failures]", changes={"reward/excluded_share": 0.2})
    assert [f.allowed for f in check_records(runs) if f.id == "infra-failures"] == [True]


def test_a_comparison_says_what_else_differs(composer: Composer) -> None:
    ours, theirs = invent(composer, "clip=sym"), invent(composer, "clip=asym", "optim.lr=1e-4")
    assert check_comparison({"a": ours, "b": ours}) == []
    found = check_comparison({"a": ours, "b": theirs}, factors=["clip"])
    assert [(f.id, f.severity) for f in found] == [("confounded-arms", "warn")]
    assert "optim.lr" in found[0].message
    assert "clip" not in found[0].message
    warm = invent(composer, "clip=sym", "rollout.temperature=0.7")
    assert "incomparable-metric" in [f.id for f in check_comparison({"a": ours, "b": warm})]


def test_records_come_back_from_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    write_sweep(
        folder, grid(clip=["sym", "asym"], tis=["on", "off"]), range(2), lambda a, s, step: 0.3 + 0.01 * step, steps=30
    )
    runs = load_records(folder)
    assert [(r.arm, r.seed) for r in runs[:3]] == [
        ("clip=sym,tis=on", 0),
        ("clip=sym,tis=on", 1),
        ("clip=sym,tis=off", 0),
    ]
    assert runs[0].exported == (5, 10, 15, 20, 25, 30)
    assert loud(check_records(runs)) == []
    assert [r.seed for r in load_records(folder / runs[1].folder)] == [1]
    assert list(load_design(folder).arms) == list(dict.fromkeys(r.arm for r in runs))


def test_a_folder_that_is_no_sweep_is_said_clearly(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a sweep"):
        load_records(tmp_path)
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(UsageError, match="is not a plan"):
        load_records(tmp_path)


def test_the_alternatives_of_a_run_are_the_other_levels_of_its_sweep(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    write_sweep(folder, grid(clip=["sym", "asym"], tis=["on", "off"]), [0], lambda a, s, step: 0.5, steps=10)
    found = alternatives(folder / "clip=sym,tis=on" / "seed=0")
    assert list(found) == ["clip=asym", "clip=sym", "tis=off", "tis=on"]
    assert found["clip=sym"] is None
    assert found["tis=on"] is None
    changed = found["clip=asym"] or {}
    assert (changed["clip"]["clip_high"], changed["tis"]["name"]) == (0.28, "token")
    assert alternatives(tmp_path / "elsewhere" / "seed=0") == {}
