"""Rows as columns: a run's metrics in a fifth of the memory of its dicts, read back as dicts. Imports no torch.

A report holds 200 runs of 1,000 rows at once; as dicts those are gigabytes, as columns of doubles 200 MB.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, overload

import numpy as np

from ablate.record import Row

_NAN = float("nan")
_Back = type | None


class Table(Sequence[Row]):
    """An immutable sequence of rows. A key that a row has not reads as None, and so does NaN.

    Lists of dicts under `updates` are a table of their own: `updates.numbers(key)` is one metric over all of them.

    Example: Table([{"step": 1, "updates": [{"lr": 0.1}, {"lr": 0.2}]}]).numbers("step") -> array([1.])
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        self._size = len(rows)
        nested = [[u for u in found if isinstance(u, dict)] if isinstance(found, list) else None for found in
                  (r.get("updates") for r in rows)]  # fmt: skip
        self._has_updates = any("updates" in r for r in rows)
        self._none = [found is None for found in nested]
        self._ends = array("q", accumulate(len(found or ()) for found in nested))
        self._updates = Table(chain.from_iterable(found or () for found in nested)) if any(nested) else None
        self._columns: dict[str, tuple[array[float] | list[Any], _Back]] = {
            key: _packed(values) for key, values in _transposed(rows) if key != "updates"
        }

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(self._size)[index]]
        return self._row(range(self._size)[index])

    def __iter__(self) -> Iterator[Row]:
        return (self._row(i) for i in range(self._size))

    def _row(self, index: int) -> Row:
        row = {key: _unpacked(values[index], back) for key, (values, back) in self._columns.items()}
        if self._has_updates:
            row["updates"] = None if self._none[index] else self._updates_of(index)
        return row

    def _updates_of(self, index: int) -> list[Row]:
        begin = self._ends[index - 1] if index else 0
        return self._updates[begin : self._ends[index]] if self._updates is not None else []

    @property
    def updates(self) -> Table:
        """All updates of all rows, in order."""
        return self._updates if self._updates is not None else Table(())

    def first_updates(self, key: str) -> np.ndarray:
        """A metric of each row's first update, NaN where there is none."""
        found, ends = self.updates.numbers(key), np.array(self._ends, dtype=int)
        begins = np.concatenate([[0], ends[:-1]])[: len(ends)]
        out = np.full(self._size, np.nan)
        some = begins < ends
        out[some] = found[begins[some]]
        return out

    def update_means(self, key: str) -> np.ndarray:
        """Mean of a metric over each row's updates that have a value, NaN where none has."""
        found = self.updates.numbers(key)
        row = np.repeat(np.arange(self._size), np.diff(np.array(self._ends, dtype=int), prepend=0))
        known = ~np.isnan(found)
        count = np.bincount(row[known], minlength=self._size)
        total = np.bincount(row[known], weights=found[known], minlength=self._size)
        return np.divide(total, count, out=np.full(self._size, np.nan), where=count > 0)

    def keys(self) -> list[str]:
        """The columns, `updates` left out."""
        return list(self._columns)

    def column(self, key: str) -> list[Any]:
        """A key over all rows, None where a row has not."""
        values, back = self._columns.get(key, ([None] * self._size, None))
        return [_unpacked(v, back) for v in values]

    def array(self, key: str) -> np.ndarray:
        """A key over all rows: whole numbers or flags where every row has one, else doubles with NaN, else objects."""
        values, back = self._columns.get(key, ([None] * self._size, None))
        if back is None:
            return np.fromiter(values, dtype=object, count=self._size)
        found = np.array(values, dtype=float)
        return found if np.isnan(found).any() else found.astype(back)

    def numbers(self, key: str) -> np.ndarray:
        """A metric over all rows, NaN where it has no finite number."""
        values, back = self._columns.get(key, ([], None))
        if back is None:
            found = np.array([_number(v) for v in values] or [_NAN] * self._size, dtype=float)
        else:
            found = np.array(values, dtype=float)
        return np.where(np.isfinite(found), found, np.nan)


def _transposed(rows: list[Row]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Each key with its values over all rows, None where a row has not."""
    keys = list(rows[0]) if rows else []
    if len(keys) > 1 and all(row.keys() == rows[0].keys() for row in rows):
        yield from zip(keys, zip(*map(itemgetter(*keys), rows), strict=True), strict=True)
        return
    for key in dict.fromkeys(key for row in rows for key in row):
        yield key, [row.get(key) for row in rows]


def _packed(values: Sequence[Any]) -> tuple[array[float] | list[Any], _Back]:
    """Doubles with NaN for None and the type to give back, or the values as they are and None."""
    kinds = set(map(type, values))
    if type(None) in kinds:
        kinds.remove(type(None))
        doubles = [_NAN if v is None else v for v in values]
    else:
        doubles = values  # type: ignore[assignment]
    if len(kinds) == 1 and kinds <= {float, int, bool}:
        return array("d", doubles), kinds.pop()
    if kinds == {float, int} or not kinds:
        return array("d", doubles), float
    return list(values), None


def _unpacked(value: Any, back: _Back) -> Any:
    if back is None:
        return value
    return None if value != value else back(value)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else _NAN
