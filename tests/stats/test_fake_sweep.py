"""The invented sweeps of the tests look like what training leaves behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from ablate.record import attempts, read_metrics
from ablate.runs import load_config, state
from ablate.select import select_run
from fake_sweep import grid, write_sweep


def test_a_row_has_the_keys_of_a_trained_one(tmp_path: Path) -> None:
    from ablate.task.base import make_task
    from ablate.train import _row_keys

    plan = write_sweep(tmp_path / "sw", grid(clip=["sym"]), [0], lambda arm, seed, step: 0.5, steps=10)
    config = plan.runs[0].config
    run = SimpleNamespace(config=config, step=0, updater=SimpleNamespace(global_step=0), task=make_task(config.task))
    about = {"attempt", "job", "time", "nonfinite"}
    for row in read_metrics(tmp_path / "sw" / plan.runs[0].folder):
        assert set(row) - about == set(_row_keys(run))  # type: ignore[arg-type]


def test_what_was_asked_for_is_what_is_read(tmp_path: Path) -> None:
    arms = {"control": {"clip": "sym"}, "wide": {"clip": "asym", "optim.lr": 1e-3}}
    write_sweep(
        tmp_path / "sw", arms, [0, 3], lambda arm, seed, step: step / 100 + seed / 10, steps=20,
        heldout=lambda arm, seed, step: 0.9 if arm == "wide" else 0.1,
        stops={("wide", 3): 7, ("control", 3): 0}, **{"length/truncated_share": lambda arm, seed, step: step / 50},
    )  # fmt: skip
    words = {
        name: state(tmp_path / "sw" / name, 20).word for name in ("control/seed=0", "wide/seed=3", "control/seed=3")
    }
    assert words == {"control/seed=0": "done", "wide/seed=3": "stopped", "control/seed=3": "new"}
    run = tmp_path / "sw" / "wide" / "seed=0"
    rows = read_metrics(run)
    assert [r["reward/mean"] for r in rows[1:]] == [s / 100 for s in range(1, 21)]
    assert rows[0]["reward/mean"] is None and rows[0]["heldout/greedy"] == 0.9
    assert rows[5]["length/truncated_share"] == 0.1 and rows[3]["heldout/greedy"] is None
    assert attempts(run)[0]["outcome"] == "done"
    chosen = select_run(run, load_config(run)).reported
    assert chosen is not None and (chosen.step, chosen.heldout) == (20, 0.9)
    assert load_config(run).optim.lr == 1e-3
