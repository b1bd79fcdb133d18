"""Single KV blocks as bytes in host memory, each with its digest, out of an arena and back. Slow
calls, for worker threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kv_transfer.blocks.arena import Arena, on_host, places_in, read_blocks, write_blocks
from kv_transfer.blocks.block_copy import HostBytes, copy_blocks
from kv_transfer.blocks.plan import Layers, Places

# The block copy kernel needs this alignment.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """A block's bytes, 1-D uint8, region after region, and their XXH3-64."""

    data: HostBytes
    digest: int


def copies_of(arena: Arena, blocks: Sequence[int]) -> list[BlockCopy]:
    """Copies blocks out of the arena. A block that changes meanwhile gives a copy without
    meaning.
    """
    layout = arena.layout
    source, places, numbers = _source(arena, blocks)
    target = Places.of_payload(layout, 1)
    copies = []
    for number in numbers:
        data = _aligned(layout.block_bytes)
        (digest,) = copy_blocks(source, places, [number], data, target, [0], digests=True)
        copies.append(BlockCopy(data, digest))
    return copies


def write_copies(arena: Arena, blocks: Sequence[int], copies: Sequence[BlockCopy]) -> int:
    """Writes copies[i] to blocks[i]. Returns the number of leading copies whose bytes have their
    digest. What the other blocks then hold has no meaning.
    """
    layout = arena.layout
    layers, single = Layers(0, len(layout.layers)), Places.of_payload(layout, 1)
    if on_host(arena):
        for count, (block, copy) in enumerate(zip(blocks, copies, strict=True)):
            (found,) = write_blocks(arena, [block], layers, copy.data, single, [0], digests=True)
            if found != copy.digest:
                return count
        return len(copies)
    # A GPU is written to once, since each write to it costs a call for each region.
    together, payload = (
        Places.of_payload(layout, len(copies)),
        _aligned(len(copies) * layout.block_bytes),
    )
    good = 0
    for copy in copies:
        (found,) = copy_blocks(copy.data, single, [0], payload, together, [good], digests=True)
        if found != copy.digest:
            break
        good += 1
    if good:
        write_blocks(arena, blocks[:good], layers, payload, together, range(good), digests=False)
    return good


def _source(arena: Arena, blocks: Sequence[int]) -> tuple[HostBytes, Places, Sequence[int]]:
    """Bytes in host memory that hold the blocks, their places, and the blocks' numbers there."""
    if on_host(arena):
        return arena.buffer.numpy(), places_in(arena), blocks
    layers = Layers(0, len(arena.layout.layers))
    payload: HostBytes = read_blocks(arena, blocks, layers).cpu().numpy()
    return payload, Places.of_payload(arena.layout, len(blocks)), range(len(blocks))


def _aligned(size: int) -> HostBytes:
    """Uninitialised bytes."""
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size]
