"""A tier in host memory, for workers whose pool is in the memory of GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvrelay.types.kv_block import BlockKey
from kvrelay.types.workers import TierKind
from kvrelay.worker.tiers.tier import StoredBlock, TierCounts
from kvrelay.worker.tiers.tier_errors import note_error
from kvrelay.worker.tiers.tier_index import TierIndex


class HostTier:
    """Blocks in the memory of this process. Their order of eviction is that of `TierIndex`."""

    kind: TierKind = "host"

    def __init__(self, size_bytes: int, block_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.counts = TierCounts()
        self._block_bytes = block_bytes
        self._index = TierIndex(size_bytes // block_bytes)
        self._blocks: dict[bytes, StoredBlock] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks."""
        return len(self._blocks) * self._block_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks that the tier holds."""
        return len(self._blocks)

    @property
    def has_room(self) -> bool:
        """Memory is never behind."""
        return self._index.capacity > 0

    @property
    def works(self) -> bool:
        """Memory does not fail."""
        return True

    @property
    def is_drained(self) -> bool:
        """What is offered is stored at once."""
        return True

    async def wait_for_room(self) -> None:
        """See `Tier.wait_for_room`. Memory without room for a block never has any."""
        if not self.has_room:
            await asyncio.Event().wait()

    def unsaved(self) -> tuple[StoredBlock, ...]:
        """All blocks."""
        return tuple(self._blocks.values())

    def holds(self, key: BlockKey) -> bool:
        """True if the tier returns the block."""
        return key in self._index

    def touch(self, key: BlockKey) -> bool:
        """See `Tier.touch`."""
        return self._index.touch(key)

    def offer(self, block: StoredBlock) -> list[StoredBlock]:
        """Takes a block. Returns the blocks that had to go."""
        if not self._index.capacity or self._index.touch(block.key):
            return []
        gone = [self._blocks.pop(key.identity) for key in self._index.make_room()]
        self.counts.evicted += len(gone)
        self._index.add(block.key)
        self._blocks[block.key.identity] = block
        self.counts.stored += 1
        return gone

    async def probe(self, keys: Sequence[BlockKey]) -> int:
        """See `Tier.probe`."""
        return next((n for n, key in enumerate(keys) if key not in self._index), len(keys))

    async def read(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        """The leading blocks that are here."""
        found = []
        for key in keys:
            if not self._index.touch(key):
                break
            found.append(self._blocks[key.identity])
        return found

    def forget(self, key: BlockKey) -> None:
        """See `Tier.forget`."""
        if self._index.remove(key) is not None:
            del self._blocks[key.identity]

    def reject(self, key: BlockKey, reason: str) -> None:
        """See `Tier.reject`."""
        note_error(self.counts, self.kind, "read", reason)
        self.forget(key)

    async def run(self) -> None:
        """See `Tier.run`. There is nothing to do."""

    async def close(self) -> None:
        """See `Tier.close`."""
