"""The shared part of memory and shm: frames carry only block numbers, and the receiver reads the
blocks in the sender's arena.

The sender's blocks stay unchanged until the push is over.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from kv_transfer.blocks.arena import Arena, digests_of, settle
from kv_transfer.blocks.block_copy import HostBytes
from kv_transfer.blocks.plan import Copy, Places, byte_copies
from kv_transfer.transports import Source, layers_of
from kvrelay.errors import DataLoss, Unimplemented
from kvrelay.types.kv_layout import KvLayout
from kvrelay.wire.transfer import KvBlocks, KvOpen, SharedSegment


class NamedOutbound:
    """The sender's half: frames name blocks of the sender's arena."""

    frame_bytes = 16 * 2**20

    def __init__(self, arena: Arena, *, digests: bool) -> None:
        self._arena = arena
        self._digests = digests

    def announce(self, opening: KvOpen) -> KvOpen:
        """Adds the description of the arena's memory file."""
        assert self._arena.fd is not None, "only an arena on the host is chosen for this transport"
        segment = SharedSegment(
            os.getpid(), self._arena.fd, self._arena.buffer.numel(), self._arena.nonce
        )
        return replace(opening, segment=segment)

    def connect(self) -> None:
        """Does nothing: the transport has no connection of its own."""

    def pack(self, header: KvBlocks, blocks: Sequence[int]) -> KvBlocks:
        """Adds the block numbers, and the digests if enabled. Waits until the arena's GPUs have
        written the blocks.
        """
        digests = digests_of(self._arena, blocks, layers_of(header)) if self._digests else ()
        settle(self._arena)
        return replace(header, source_blocks=tuple(blocks), digests=digests)


class NamedInbound:
    """The receiver's half. `data` is the sender's whole arena in this layout."""

    def __init__(self, data: HostBytes, layout: KvLayout) -> None:
        self.data = data
        self._named = NamedBlocks(len(data), layout)

    def connect(self) -> None:
        """Does nothing: the transport has no connection of its own."""

    def source(self, frame: KvBlocks) -> Source:
        """The blocks in the sender's arena. Raises DataLoss for blocks outside of the arena."""
        return Source(self.data, *self._named.find(frame))


class NamedBlocks:
    """A sender's arena of `size` bytes in this layout, whose blocks frames name. Raises
    Unimplemented if the size does not fit the layout.
    """

    def __init__(self, size: int, layout: KvLayout) -> None:
        self._layout = layout
        self._num_blocks = size // layout.block_bytes
        if size != layout.arena_bytes(self._num_blocks):
            raise Unimplemented(
                f"the size of {size} bytes does not match the layout of the sender's arena"
            )

    def find(self, frame: KvBlocks) -> tuple[Places, Sequence[int]]:
        """The places of the arena and the frame's block numbers in it. Raises DataLoss for blocks
        outside of the arena.
        """
        blocks = frame.source_blocks
        if len(blocks) != frame.count or not all(0 <= block < self._num_blocks for block in blocks):
            raise DataLoss(
                f"frame {frame.sequence} names {len(blocks)} blocks, of which some are outside "
                "of the arena"
            )
        return Places.of_arena(self._layout, self._num_blocks, layers_of(frame)), blocks

    def copies(self, frame: KvBlocks) -> list[Copy]:
        """The copies from the arena that bring the frame's blocks into plan order."""
        places, blocks = self.find(frame)
        payload = Places.of_payload(self._layout, frame.count, layers_of(frame))
        return byte_copies(places, blocks, payload, range(frame.count))
