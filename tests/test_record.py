"""Append-only records: torn lines, restarts and values that JSON does not have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate import record


def test_a_torn_last_line_is_dropped_counted_and_spoils_no_new_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    record.append_line(path, {"step": 1})
    with path.open("ab") as stream:
        stream.write(b'{"step": 2, "rew')
    assert record.read_lines(path) == record.Lines([{"step": 1}], 1)
    record.append_line(path, {"step": 2})
    assert record.read_lines(path) == record.Lines([{"step": 1}, {"step": 2}], 1)


@given(st.integers(0, 60))
def test_any_truncation_keeps_all_whole_rows(cut: int) -> None:
    lines = [json.dumps({"step": k, "attempt": 1, "x": k / 7}).encode() + b"\n" for k in range(3)]
    data = b"".join(lines)[: cut * 2]
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        path.write_bytes(data)
        whole = [line for line in lines if data.startswith(b"".join(lines[: lines.index(line) + 1])[:-1])]
        assert [r["step"] for r in record.read_lines(path).rows] == list(range(len(whole)))


def test_the_last_attempt_wins_and_steps_come_in_order() -> None:
    rows = [{"step": s, "attempt": 1, "v": "old"} for s in (1, 2, 3)]
    rows += [{"step": s, "attempt": 2, "v": "new"} for s in (3, 4)]
    # written by the earlier attempt after the later one had begun, as a dying node does
    rows += [{"step": 4, "attempt": 1, "v": "zombie"}]
    assert [(r["step"], r["v"]) for r in record.lineage(rows)] == [(1, "old"), (2, "old"), (3, "new"), (4, "new")]


def test_nan_and_infinity_become_null_and_are_named() -> None:
    row = record.finite({"a": float("nan"), "b": 1.0, "updates": [{"c": float("inf")}, {"c": 2.0}], "d": None})
    assert row == {
        "a": None, "b": 1.0, "updates": [{"c": None}, {"c": 2.0}], "d": None, "nonfinite": ["a", "updates.0/c"],
    }  # fmt: skip
    json.dumps(row, allow_nan=False)


def test_attempts_join_start_and_end(tmp_path: Path) -> None:
    assert record.next_attempt(tmp_path) == 1
    first = record.start_attempt(tmp_path, None)
    second = record.start_attempt(tmp_path, "77")
    record.end_attempt(tmp_path, second, "done", 9)
    found = record.attempts(tmp_path)
    assert [(a["attempt"], a.get("outcome"), a["job"]) for a in found] == [(first, None, None), (2, "done", "77")]


def test_rollouts_read_back_as_written(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    row = {
        "step": 3, "prompt_id": 5, "sample": 1, "prompt_ids": [4, 5], "response_ids": [7, 1], "logprobs": [-0.5, -0.25],
        "prompt": "3=", "response": "3", "reward": None, "advantage": 0.5, "finish_reason": "stop", "policy_version": 2,
    }  # fmt: skip
    record.write_rollouts(tmp_path, 1, 10, [row, {**row, "sample": 2, "reward": 1.0}])
    read = pq.read_table(tmp_path / "rollouts" / "000001-000010.parquet").to_pylist()
    assert read == [row, {**row, "sample": 2, "reward": 1.0}]
