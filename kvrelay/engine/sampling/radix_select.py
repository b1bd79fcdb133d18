"""Selection of the likeliest tokens in time linear in the vocabulary, without a sort."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DIGIT_BITS = 11
NUM_DIGITS = 1 << DIGIT_BITS


def last_kept(
    keys: NDArray[np.int64], values: NDArray[np.floating], targets: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Keys [S] of the last elements kept, if of each row the elements with the largest keys are
    kept until their values add up to the row's target.

    Takes keys [S, N], not negative and unique in their row; finite values [S, N], not negative and
    with a positive sum in each row; positive targets [S]. A row whose values add up to less than
    its target keeps all elements with a positive value.

    A radix selection: a histogram of the highest digits tells which digit the last key has, and
    only the keys with this digit go on to the next digit.
    """
    num_rows, width = keys.shape
    every = np.arange(num_rows)
    first_bucket = np.repeat(every * NUM_DIGITS, width)
    # Nearly equal weights have equal highest digits, which are left out.
    least = np.min(keys, axis=1)
    num_bits = int(np.max(keys - least[:, None])).bit_length()
    keys, values, remaining = (keys - least[:, None]).ravel(), values.ravel(), targets
    for shift in range(num_bits - DIGIT_BITS, -DIGIT_BITS, -DIGIT_BITS):
        buckets = first_bucket + ((keys >> max(shift, 0)) & (NUM_DIGITS - 1))
        sums = np.bincount(buckets, values, num_rows * NUM_DIGITS).reshape(num_rows, NUM_DIGITS)
        # Of each digit, what it and the larger digits add up to
        reached = sums[:, ::-1].cumsum(1)[:, ::-1]
        enough = reached >= remaining[:, None]
        largest_enough = NUM_DIGITS - 1 - enough[:, ::-1].argmax(1)
        digits = np.where(enough.any(1), largest_enough, (sums > 0).argmax(1))
        remaining = remaining - np.pad(reached, ((0, 0), (0, 1)))[every, digits + 1]
        is_last = np.zeros(num_rows * NUM_DIGITS, bool)
        is_last[every * NUM_DIGITS + digits] = True
        left = np.flatnonzero(is_last[buckets])
        if len(left) < len(keys):
            keys, values, first_bucket = keys[left], values[left], first_bucket[left]
        if len(keys) == num_rows:
            break
    last: NDArray[np.int64] = keys + least
    return last
