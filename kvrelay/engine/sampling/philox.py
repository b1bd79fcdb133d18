"""Counter-based random numbers. Each number depends only on its key and counter, so there is no
state to keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)
# Multipliers and key increments of Philox4x64, for words 0 and 2 of the counter.
_MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_MULTIPLIERS_LOW, _MULTIPLIERS_HIGH = _MULTIPLIERS & _LOW, _MULTIPLIERS >> _HALF
_INCREMENTS = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)


def uniform(seeds: Sequence[int], counters: Sequence[int]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), [N] float64: Philox4x64-10 (Salmon et al., 2011) with key `seed`
    modulo 2^64.

    Each is the upper 53 bits of the first number of `numpy.random.Philox(key=seed % 2**64,
    counter=counter)`.
    """
    keys = np.zeros((2, len(seeds)), dtype=np.uint64)
    keys[0] = [seed % 2**64 for seed in seeds]
    # Words 0 and 2 of the counter, and at the end those of the result.
    even = np.zeros_like(keys)
    # numpy increments the counter before each number.
    even[0] = [counter + 1 for counter in counters]
    odd = np.zeros_like(keys)
    for _ in range(_ROUNDS):
        high, low = _multiplied(even)
        even, odd = high[::-1] ^ odd ^ keys, low[::-1]
        keys += _INCREMENTS
    numbers: NDArray[np.float64] = (even[0] >> np.uint64(11)) * 2.0**-53
    return numbers


def _multiplied(words: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Upper and lower 64 bits of the 128-bit products of [2, N] words with the multipliers."""
    low, high = words & _LOW, words >> _HALF
    middle = high * _MULTIPLIERS_LOW + (low * _MULTIPLIERS_LOW >> _HALF)
    other = low * _MULTIPLIERS_HIGH + (middle & _LOW)
    return high * _MULTIPLIERS_HIGH + (middle >> _HALF) + (other >> _HALF), words * _MULTIPLIERS
