"""Transport in the frames themselves. Works wherever gRPC works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kv_transfer.blocks.arena import Arena, digests_of, on_host, pieces
from kv_transfer.blocks.block_copy import digest_blocks
from kv_transfer.blocks.plan import Places
from kv_transfer.transports import Source, layers_of
from kvrelay.errors import DataLoss
from kvrelay.types.kv_layout import KvLayout
from kvrelay.wire.transfer import KvBlocks, KvOpen

FRAME_BYTES = 2 * 2**20


class GrpcOutbound:
    """The sender's half: each frame carries the bytes of its blocks."""

    frame_bytes = FRAME_BYTES

    def __init__(self, arena: Arena, *, digests: bool) -> None:
        self._arena = arena
        self._digests = digests

    def announce(self, opening: KvOpen) -> KvOpen:
        """Returns the opening unchanged."""
        return opening

    def connect(self) -> None:
        """Does nothing: the transport has no connection of its own."""

    def pack(self, header: KvBlocks, blocks: Sequence[int]) -> KvBlocks:
        """Adds the blocks' bytes, and their XXH3 digests if enabled."""
        layers = layers_of(header)
        payload = pieces(self._arena, blocks, layers)
        digests: tuple[int, ...] = ()
        if self._digests and on_host(self._arena):
            digests = digests_of(self._arena, blocks, layers)
        elif self._digests:
            places = Places.of_payload(self._arena.layout, len(blocks), layers)
            digests = digest_blocks(
                np.frombuffer(payload[0], dtype=np.uint8), places, range(len(blocks))
            )
        return replace(header, payload=payload, digests=digests)


class GrpcInbound:
    """The receiver's half. `layout` is the sender's."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout

    def connect(self) -> None:
        """Does nothing: the transport has no connection of its own."""

    def source(self, frame: KvBlocks) -> Source:
        """The payload of the frame. Raises DataLoss if its size differs from `num_bytes`."""
        data = np.frombuffer(
            b"".join(frame.payload) if len(frame.payload) != 1 else frame.payload[0], dtype=np.uint8
        )
        if len(data) != frame.num_bytes:
            raise DataLoss(
                f"frame {frame.sequence} contains {len(data)} bytes and declares {frame.num_bytes}"
            )
        places = Places.of_payload(self._layout, frame.count, layers_of(frame))
        return Source(data, places, range(frame.count))
