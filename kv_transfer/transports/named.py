"""Nothing travels but names: the receiver reads the sender's blocks where they lie.

What memory and shm share. The sender's blocks stay as they are until the push is over.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from kv_transfer.arena import Arena, HostBytes, check_digest, copy_blocks, digest_blocks
from kvrelay.errors import DataLoss, Unimplemented
from kvrelay.wire.transfer import KvBlocks, KvOpen, SharedSegment


class NamedOutbound:
    def __init__(self, arena: Arena, *, digests: bool) -> None:
        self._arena = arena
        self._digests = digests

    def announce(self, opening: KvOpen) -> KvOpen:
        assert self._arena.fd is not None, "only an arena on the host is chosen for this transport"
        segment = SharedSegment(os.getpid(), self._arena.fd, self._arena.buffer.numel(), self._arena.nonce)
        return replace(opening, segment=segment)

    def connect(self) -> None:
        pass

    def pack(self, header: KvBlocks, blocks: Sequence[int]) -> KvBlocks:
        digest = digest_blocks(self._arena, blocks) if self._digests else 0
        return replace(header, source_blocks=tuple(blocks), digest=digest)


class NamedInbound:
    """`source` is the sender's whole arena, of the same layout as `arena`."""

    def __init__(self, source: HostBytes, arena: Arena, *, digests: bool) -> None:
        self.source = source
        self._source_num_blocks = len(source) // arena.layout.block_bytes
        if not arena.buffer.is_cpu or len(source) != arena.layout.arena_bytes(self._source_num_blocks):
            raise Unimplemented(f"a segment of {len(source)} bytes is not an arena like mine, on the host")
        self._arena = arena
        self._digests = digests

    def connect(self) -> None:
        pass

    def unpack(self, frame: KvBlocks, blocks: Sequence[int]) -> None:
        sources = frame.source_blocks
        if len(sources) != frame.count or not all(0 <= block < self._source_num_blocks for block in sources):
            raise DataLoss(f"frame {frame.sequence} names {len(sources)} blocks, some perhaps outside of the arena")
        copy_blocks(self.source, self._source_num_blocks, sources, self._arena, blocks)
        if self._digests:  # of what arrived, so that a source that changed under the copy shows
            check_digest(frame.digest, digest_blocks(self._arena, blocks))
