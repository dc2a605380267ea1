"""The noise is uniform, independent across keys, and a function of the key alone."""

from __future__ import annotations

import hashlib

import numpy as np
from scipy import stats

from ablate.rollout.noise import uniforms


def test_rows_equal_numpys_philox_under_the_documented_key() -> None:
    digest = hashlib.blake2b(b"0,1,12,17,3", digest_size=16).digest()
    philox = np.random.Philox(key=int.from_bytes(digest, "little"), counter=0)
    assert uniforms([(0, 1, 12, 17, 3)], 9)[0].tolist() == np.random.Generator(philox).random(9).tolist()


def test_rows_do_not_depend_on_their_company_or_length() -> None:
    keys = [(0, 1, 2, i) for i in range(5)]
    together = uniforms(keys, 8)
    assert np.array_equal(uniforms(keys[::-1], 8)[::-1], together)
    assert np.array_equal(uniforms(keys[2:3], 3)[0], together[2, :3])
    assert uniforms([(1, 23)], 1) != uniforms([(12, 3)], 1)


def test_uniform_at_each_position_and_uncorrelated_between_neighbouring_keys() -> None:
    u = uniforms([(0, 1, step, prompt, sample) for step in range(20) for prompt in range(25) for sample in range(8)], 6)
    for t in range(6):
        assert stats.kstest(u[:, t], "uniform").pvalue > 1e-3
    normal = stats.norm.ppf(u)
    correlation = np.corrcoef(np.concatenate([normal[:-1], normal[1:]], axis=1).T)
    assert np.abs(correlation - np.eye(12)).max() < 4.5 / np.sqrt(len(u))


def test_large_and_negative_integers_are_keys_too() -> None:
    rows = uniforms([(1 << 70,), (-1,), (1,)], 2)
    assert len(np.unique(rows)) == 6
