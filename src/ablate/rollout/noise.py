"""Uniform numbers that are a function of a key, never of a stream's position. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def uniforms(keys: Sequence[tuple[int, ...]], n: int) -> np.ndarray:
    """`n` uniforms in [0, 1) per key, float64 [len(keys), n]; a longer row begins with the shorter one.

    Row: numpy's Philox4x64-10 from counter 0, under the 128-bit BLAKE2b digest of the key's integers in decimal, joined
    by commas. So a row depends on its own key alone.
    """
    philox = np.random.Philox(key=0)
    generator = np.random.Generator(philox)
    fresh = philox.state
    rows = np.empty((len(keys), n))
    for row, key in zip(rows, keys, strict=True):
        fresh["state"]["key"] = _philox_key(key)
        philox.state = fresh  # five times cheaper than a new generator for each key
        generator.random(out=row)
    return rows


def _philox_key(key: tuple[int, ...]) -> np.ndarray:
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=16).digest()
    return np.frombuffer(digest, dtype="<u8")
