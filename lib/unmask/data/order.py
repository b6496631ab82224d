"""Random order without a list of it: the place of any row, in constant time and no memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROUNDS = 6
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ over the golden ratio


def permuted(indices: np.ndarray, size: int, seed: int | Sequence[int]) -> np.ndarray:
    """π(indices), where π is a pseudo-random permutation of 0 … size − 1 that `seed` names.

    A balanced Feistel network permutes the numbers of 2k bits, the fewest that hold `size`: each round is
    (left, right) → (right, left ⊕ f(right)) with a hash f of the round's own key. What lands at or above
    `size` is sent through it again until it lands below (cycle walking), fewer than four times on average.

    Args:
        indices: integers in [0, size), any shape.
        size: rows to permute, at least 1 and at most 2⁶².
    Returns: int64, of the shape of `indices`; two different indices never share a value.
    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
    """
    assert 1 <= size <= 2**62
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)
    values = np.array(indices, dtype=np.uint64).reshape(-1)
    assert not len(values) or values.max() < size
    walking = np.arange(len(values))
    while len(walking):
        values[walking] = _feistel(values[walking], half, keys)
        walking = walking[values[walking] >= size]
    return values.astype(np.int64).reshape(np.shape(indices))


def _feistel(values: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    low = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & low
    for key in keys:
        mixed = (right + key) * _ODD  # wraps around, as unsigned integers do
        mixed ^= mixed >> np.uint64(32)
        mixed *= _ODD
        mixed ^= mixed >> np.uint64(29)
        left, right = right, left ^ (mixed >> np.uint64(7) & low)
    return left << half | right
