from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.sampling.philox import uniform

KEYS_AND_COUNTERS = st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40))


@given(st.lists(KEYS_AND_COUNTERS, max_size=20))
def test_it_is_the_generator_of_numpy(pairs: list[tuple[int, int]]) -> None:
    expected = [
        float(np.random.Philox(key=seed % 2**64, counter=counter).random_raw() >> 11) * 2.0**-53
        for seed, counter in pairs
    ]
    assert (
        uniform([seed for seed, _ in pairs], [counter for _, counter in pairs]).tolist() == expected
    )
    assert all(0 <= number < 1 for number in expected)
