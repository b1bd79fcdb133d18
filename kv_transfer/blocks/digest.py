"""Digests that check a block's bytes: XXH3 in `block_copy`, and a digest that a GPU computes
without moving the KV.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from kv_transfer.blocks.plan import Places

Digests = tuple[int, ...]

XXH3 = "xxh3"  # XXH3-64
MULTILINEAR = "multilinear"

_WORD = 4  # bytes


def multilinear_digests(data: torch.Tensor, places: Places, blocks: Sequence[int]) -> Digests:
    """Digests of blocks in `data`, 1-D uint8 on any device: the sum of a block's 32-bit words, each
    times an odd 64-bit number, modulo 2**64.

    The words are those of the block's bytes, region after region, little endian. A region's last
    word is padded with zeros. If the numbers were drawn anew for each comparison, two different
    blocks would agree with a probability of at most 2**-32, and never if they differ in one word
    only. The numbers are fixed, so the digest detects accidents, not forgeries. (Lemire and Kaser,
    "Strongly Universal String Hashing is Fast", 2014.)
    """
    numbers = torch.tensor(blocks, device=data.device)
    # End of each region, in words.
    ends = list(accumulate(math.ceil(size / _WORD) for size in places.sizes))
    factors = _factors(ends[-1], data.device)
    # Wraps around, like the digest.
    total = torch.zeros(len(blocks), dtype=torch.int64, device=data.device)
    for start, size, end in zip(places.starts, places.sizes, ends, strict=True):
        region = data[start : start + places.num_blocks * size].view(places.num_blocks, size)
        words = torch.nn.functional.pad(region[numbers], (0, -size % _WORD)).view(torch.int32)
        total += (words * factors[end - words.shape[1] : end]).sum(dim=1)
    return tuple(one % 2**64 for one in total.tolist())


@functools.lru_cache(maxsize=8)
def _factors(count: int, device: torch.device) -> torch.Tensor:
    """The first `count` outputs of SplitMix64 (Steele, Lea and Flood, 2014) from seed 0, made odd;
    int64.
    """
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return torch.from_numpy((state | np.uint64(1)).view(np.int64)).to(device)
