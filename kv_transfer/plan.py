"""Where the bytes of some blocks lie in an arena. Pure: numbers in, numbers out.

Plan order, the order of a frame's bytes, is region by region (see `KvLayout.regions`) and within a region
block after block, in the order in which the blocks were named. Blocks that are adjacent
in the arena become one range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from kvrelay.types import KvLayout


class Range(NamedTuple):
    """`length` bytes from `offset`."""

    offset: int
    length: int


class Copy(NamedTuple):
    """`length` bytes from `source` in one arena to `target` in another."""

    source: int
    target: int
    length: int


def byte_ranges(layout: KvLayout, num_blocks: int, blocks: Sequence[int]) -> list[Range]:
    """The bytes of `blocks` in an arena of `num_blocks`, in plan order."""
    return [Range(copy.source, copy.length) for copy in byte_copies(layout, num_blocks, blocks, num_blocks, blocks)]


def byte_copies(
    layout: KvLayout, source_num_blocks: int, sources: Sequence[int], target_num_blocks: int, targets: Sequence[int]
) -> list[Copy]:
    """What to copy so that block targets[i] of one arena becomes block sources[i] of another, in plan order."""
    runs = list(_runs(sources, targets))
    sizes = layout.region_block_bytes
    starts = [0, *accumulate(sizes)]
    return [
        Copy(
            start * source_num_blocks + source * size,
            start * target_num_blocks + target * size,
            count * size,
        )
        for start, size in zip(starts, sizes, strict=False)
        for source, target, count in runs
    ]


def _runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(source, target, count): the fewest stretches over which both sides are adjacent."""
    first = 0
    for end in range(1, len(sources) + 1):
        adjacent = end < len(sources) and sources[end] == sources[end - 1] + 1 and targets[end] == targets[end - 1] + 1
        if not adjacent:
            yield sources[first], targets[first], end - first
            first = end
