"""Ranges of the mechanisms' keyword arguments. Imports no torch: a planner validates levels with them.

A keyword-only parameter of a mechanism is annotated with one of these names and nothing else, so that its
range can be read from the source.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

Fraction = Annotated[float, Ge(0), Lt(1)]
"""In [0, 1): a distance below ratio 1 that leaves the lower bound positive."""

Share = Annotated[float, Ge(0), Le(1)]
"""In [0, 1]: as above, but the lower bound may be 0, which is no bound at all."""

AtMostOne = Annotated[float, Gt(0), Le(1)]
"""In (0, 1]: a lower threshold of a ratio; it keeps ratio 1."""

AtLeastOne = Annotated[float, Ge(1)]
"""In [1, inf): an upper threshold of a ratio; it keeps ratio 1."""

AboveOne = Annotated[float, Gt(1)]
"""In (1, inf)."""

Positive = Annotated[float, Gt(0)]
"""In (0, inf)."""

NonNegative = Annotated[float, Ge(0)]
"""In [0, inf)."""

Count = Annotated[int, Ge(1)]
"""A whole number from 1 on."""
