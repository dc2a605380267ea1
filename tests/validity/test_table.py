"""Rows as columns read back as the rows they were, and the checks say the same about either."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from invented import every_update, invent

from ablate.compose import Composer
from ablate.validity import RunRecord, check_records
from ablate.validity.curves import step_tags
from ablate.validity.table import Table
from fake_sweep import update

scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=3)
flat = st.dictionaries(st.sampled_from("abcd"), scalars)
rows_with_updates = st.lists(st.tuples(flat, st.none() | st.lists(flat, max_size=3)), max_size=6)


@given(rows_with_updates)
def test_rows_come_back(drawn: list[tuple[dict[str, Any], list[dict[str, Any]] | None]]) -> None:
    rows = [{**row, "updates": updates} for row, updates in drawn]
    table = Table(rows)
    assert len(table) == len(rows)
    for got, row in zip(table, rows, strict=True):
        _same(got, row)
        assert len(got["updates"] or []) == len(row["updates"] or [])
        for one, other in zip(got["updates"] or [], row["updates"] or [], strict=True):
            _same(one, other)
    everything = [u for r in rows for u in r["updates"] or []]
    assert len(table.updates) == len(everything)


def _same(got: dict[str, Any], row: dict[str, Any]) -> None:
    for key, value in row.items():
        if key != "updates":
            assert got[key] == value
    assert all(v is None for k, v in got.items() if k not in row)


def test_types_slices_and_numbers() -> None:
    table = Table(
        [
            {"step": 0, "loss": None, "done": False, "name": "a", "updates": None},
            {"step": 1, "loss": 0.5, "done": True, "name": None, "updates": [{"x": 1.0}, {"x": None}]},
            {"step": 2, "loss": 2, "late": 7, "updates": [{"x": 3.0}]},
        ]
    )
    assert isinstance(table[1]["step"], int)
    assert table[1]["done"] is True
    assert table[-1]["late"] == 7
    assert [r["step"] for r in table[1:]] == [1, 2]
    assert np.array_equal(table.numbers("loss"), [math.nan, 0.5, 2.0], equal_nan=True)
    assert np.array_equal(table.numbers("absent"), [math.nan] * 3, equal_nan=True)
    assert np.array_equal(table.numbers("name"), [math.nan] * 3, equal_nan=True)
    assert np.array_equal(table.updates.numbers("x"), [1.0, math.nan, 3.0], equal_nan=True)
    assert np.array_equal(table.first_updates("x"), [math.nan, 1.0, 3.0], equal_nan=True)
    with pytest.raises(IndexError):
        table[3]
    assert list(Table([])) == []


def test_the_checks_say_the_same_about_columns(composer: Composer) -> None:
    runs = invent(composer, "clip=sym,asym", "seed=0,1,2", changes={"epoch": lambda r, s: s // 40})
    ill = [every_update(r, **{"optim/grad_norm": 1.5, "dose/clip=sym": 1e-9, "dose/clip=asym": 1e-9}) for r in runs]
    for kind in (runs, ill, [_resumed(r) for r in runs]):
        columns = [replace(r, rows=Table(r.rows), all_rows=Table(r.all_rows)) for r in kind]
        assert check_records(columns) == check_records(kind)
        assert [step_tags(r) for r in columns] == [step_tags(r) for r in kind]


def _resumed(run: RunRecord) -> RunRecord:
    rerun = [{**r, "attempt": 2, "updates": [update(**{"entropy/mean": 0.01})]} for r in run.rows[31:]]
    rows = [*run.rows[:20], *run.rows[22:31], *rerun]
    return replace(run, rows=rows, all_rows=[*run.rows[:36], *rerun])
