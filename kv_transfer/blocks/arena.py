"""The memory that holds KV blocks, as bytes for a transport. Slow calls, for worker threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from kv_transfer.blocks.block_copy import Digests, HostBytes, copy_blocks, digest_blocks
from kv_transfer.blocks.digest import MULTILINEAR, XXH3, multilinear_digests
from kv_transfer.blocks.plan import Layers, Places, byte_ranges
from kvrelay.types.kv_layout import KvLayout


class Arena(Protocol):
    """`buffer` is 1-D uint8 in the order of `layout`. On a CPU it is a memory file named
    `kvrelay-NONCE`.

    `shares` holds only `buffer`, or the arena of each rank if ranks are on several GPUs; `buffer`
    is the first of them.
    """

    buffer: torch.Tensor
    shares: tuple[torch.Tensor, ...]
    # Descriptor of the memory file; None on another device.
    fd: int | None
    nonce: int
    layout: KvLayout
    num_blocks: int


def places_in(arena: Arena, layers: Layers | None = None) -> Places:
    """The places of these layers, or of all, in the arena."""
    return Places.of_arena(arena.layout, arena.num_blocks, layers)


def device_of(arena: Arena) -> str:
    """cpu, cuda, or "N GPUs" if several GPUs share the arena."""
    return arena.buffer.device.type if len(arena.shares) == 1 else f"{len(arena.shares)} GPUs"


def by_rank(arena: Arena, layers: Layers) -> list[tuple[torch.Tensor, Places]]:
    """Each memory of the arena with its places: a single memory, or a GPU for each rank."""
    if len(arena.shares) == 1:
        return [(arena.buffer, places_in(arena, layers))]
    places = Places.of_arena(arena.layout.share, arena.num_blocks, layers)
    return [(share, places) for share in arena.shares]


def on_host(arena: Arena) -> bool:
    """True if the whole arena is in host memory."""
    return len(arena.shares) == 1 and arena.buffer.is_cpu


def pieces(arena: Arena, blocks: Sequence[int], layers: Layers) -> tuple[memoryview, ...]:
    """The bytes of these blocks in plan order: views of an arena on the host, or a host copy of an
    arena on GPUs.
    """
    if on_host(arena):
        data = arena.buffer.numpy().data
        return tuple(
            data[offset : offset + length]
            for offset, length in byte_ranges(places_in(arena, layers), blocks)
        )
    return (read_blocks(arena, blocks, layers).cpu().numpy().data,)


def read_blocks(arena: Arena, blocks: Sequence[int], layers: Layers) -> torch.Tensor:
    """The bytes of these blocks in plan order: a new 1-D uint8 tensor on the device of the arena's
    buffer.
    """
    if len(arena.shares) > 1:
        # Once rank 0's GPU is done, the other ranks have stored their KV: it sums up results that
        # they sent afterwards.
        settle(arena)
    parts = [
        gathered(data, places, blocks).to(arena.buffer.device)
        for data, places in by_rank(arena, layers)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def gathered(data: torch.Tensor, places: Places, blocks: Sequence[int]) -> torch.Tensor:
    """The bytes of these blocks in plan order: a new 1-D uint8 tensor on the device of `data`."""
    return torch.cat(
        [data[offset : offset + length] for offset, length in byte_ranges(places, blocks)]
    )


def settle(arena: Arena) -> None:
    """Returns when the arena's GPUs have completed all earlier work. Returns at once for an arena
    on the host.
    """
    for share in arena.shares:
        finish(share.device)


def finish(device: torch.device) -> None:
    """Returns when a GPU has completed all earlier work; at once for the host."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def digest_kind(arena: Arena) -> str:
    """The kind of digest that this arena's blocks get in place."""
    return XXH3 if arena.buffer.is_cpu else MULTILINEAR


def digests_of(arena: Arena, blocks: Sequence[int], layers: Layers) -> Digests:
    """Digests of the blocks in place, of the kind that `digest_kind` returns."""
    if arena.buffer.is_cpu:
        return digest_blocks(arena.buffer.numpy(), places_in(arena, layers), blocks)
    return multilinear_digests(arena.buffer, places_in(arena, layers), blocks)


def write_blocks(
    arena: Arena,
    blocks: Sequence[int],
    layers: Layers,
    source: HostBytes | torch.Tensor,
    source_places: Places,
    source_blocks: Sequence[int],
    *,
    digests: bool,
) -> Digests:
    """Copies source_blocks[i] to blocks[i] of the arena. Returns the XXH3 digests of the source if
    `digests` is set, else ().

    A source on the arena's GPU is a tensor; the caller checks its digests before this call.
    """
    places = places_in(arena, layers)
    found: Digests = ()
    if isinstance(source, torch.Tensor):
        assert not digests, "a GPU has no XXH3"
        data = gathered(source, source_places, source_blocks)
    elif on_host(arena):
        return copy_blocks(
            source,
            source_places,
            source_blocks,
            arena.buffer.numpy(),
            places,
            blocks,
            digests=digests,
        )
    else:
        found = digest_blocks(source, source_places, source_blocks) if digests else ()
        payload = np.concatenate(
            [
                source[offset : offset + size]
                for offset, size in byte_ranges(source_places, source_blocks)
            ]
        )
        data = torch.from_numpy(payload).to(arena.buffer.device)
    start = 0
    for share, share_places in by_rank(arena, layers):
        for offset, size in byte_ranges(share_places, blocks):
            share[offset : offset + size] = data[start : start + size]
            start += size
    if len(arena.shares) > 1:
        # Other processes read the arena.
        settle(arena)
    return found
