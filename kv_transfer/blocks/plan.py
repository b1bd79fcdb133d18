"""Byte positions of blocks. Pure: numbers in, numbers out.

Plan order, the order of a payload's bytes, is region by region (see `KvLayout.regions`). Within a
region it is block by block, in the order in which the blocks were named.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from kvrelay.types.kv_layout import KvLayout


class Range(NamedTuple):
    """`length` bytes from `offset`."""

    offset: int
    length: int


class Copy(NamedTuple):
    """`length` bytes from `source` in one memory to `target` in another."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Layers:
    """`num` layers from `first` on."""

    first: int
    num: int


@dataclass(frozen=True, slots=True)
class Places:
    """Some regions of a memory with `num_blocks` blocks: the start of each region, and the bytes of
    a block in it.
    """

    num_blocks: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of_arena(cls, layout: KvLayout, num_blocks: int, layers: Layers | None = None) -> Places:
        """The regions of these layers, or of all, in an arena."""
        sizes = layout.region_block_bytes
        starts = [start * num_blocks for start in accumulate(sizes, initial=0)]
        regions = _regions(layout, layers)
        return cls(
            num_blocks,
            tuple(starts[region] for region in regions),
            tuple(sizes[region] for region in regions),
        )

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of_payload(cls, layout: KvLayout, num_blocks: int, layers: Layers | None = None) -> Places:
        """The regions of these layers, or of all, packed without gaps."""
        every = layout.region_block_bytes
        sizes = tuple(every[region] for region in _regions(layout, layers))
        starts = tuple(start * num_blocks for start in accumulate(sizes, initial=0))
        return cls(num_blocks, starts[:-1], sizes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return sum(self.sizes)


def _regions(layout: KvLayout, layers: Layers | None) -> list[int]:
    """The numbers of the regions of these layers, or of all."""
    wanted = Layers(0, len(layout.layers)) if layers is None else layers
    chosen = range(wanted.first, wanted.first + wanted.num)
    return [region for region, layer in enumerate(layout.region_layers) if layer in chosen]


def byte_ranges(places: Places, blocks: Sequence[int]) -> list[Range]:
    """The bytes of `blocks` in plan order. Adjacent blocks become one range."""
    return [Range(copy.source, copy.length) for copy in byte_copies(places, blocks, places, blocks)]


def byte_copies(
    source: Places, source_blocks: Sequence[int], target: Places, blocks: Sequence[int]
) -> list[Copy]:
    """The copies that write source_blocks[i] to blocks[i], in plan order. Both places have the same
    regions.
    """
    runs = list(_runs(source_blocks, blocks))
    return [
        Copy(source_start + first * size, target_start + target_first * size, count * size)
        for source_start, target_start, size in zip(
            source.starts, target.starts, source.sizes, strict=True
        )
        for first, target_first, count in runs
    ]


def _runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(source, target, count): the fewest runs over which both sides are adjacent."""
    first = 0
    for end in range(1, len(sources) + 1):
        adjacent = (
            end < len(sources)
            and sources[end] == sources[end - 1] + 1
            and targets[end] == targets[end - 1] + 1
        )
        if not adjacent:
            yield sources[first], targets[first], end - first
            first = end
