"""The index of a tier: which blocks it holds, and which it gives up first. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from kvrelay.engine.kvcache.block_eviction import CachedBlocks
from kvrelay.types.kv_block import BlockKey


class TierIndex:
    """Blocks by identity, within a number of blocks.

    The order of eviction is that of the pool's cached blocks: the least recently used block of the
    tenant with the most blocks. So no tenant loses blocks while another tenant has more.
    """

    def __init__(self, capacity: int) -> None:
        """capacity: blocks, 0 or more."""
        self.capacity = capacity
        # Identity -> (number in the order, key).
        self._entries: dict[bytes, tuple[int, BlockKey]] = {}
        self._keys: dict[int, BlockKey] = {}
        self._order = CachedBlocks()
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._keys.values())

    def __contains__(self, key: BlockKey) -> bool:
        return key.identity in self._entries

    def blocks_of(self, tenant: str) -> int:
        """Number of the tenant's blocks."""
        return self._order.of(tenant)

    def touch(self, key: BlockKey) -> bool:
        """Makes the block its tenant's most recently used. Returns False if it is not here."""
        entry = self._entries.get(key.identity)
        if entry is None:
            return False
        number, own = entry
        self._order.remove(number, own.tenant)
        self._order.add(number, own.tenant)
        return True

    def make_room(self, blocks: int = 1) -> list[BlockKey]:
        """Removes and returns the blocks that have to go so that `blocks` more fit."""
        gone = []
        while self._entries and len(self._entries) + blocks > self.capacity:
            key = self._keys.pop(self._order.pop())
            del self._entries[key.identity]
            gone.append(key)
        return gone

    def add(self, key: BlockKey) -> None:
        """Adds a block as its tenant's most recently used. `make_room` has made room for it."""
        if self.touch(key):
            return
        assert len(self._entries) < self.capacity, "there is no room for the block"
        number = next(self._numbers)
        self._entries[key.identity] = number, key
        self._keys[number] = key
        self._order.add(number, key.tenant)

    def remove(self, key: BlockKey) -> BlockKey | None:
        """Removes a block. Returns the key under which it was added, or None if it is not here."""
        entry = self._entries.pop(key.identity, None)
        if entry is None:
            return None
        number, own = entry
        del self._keys[number]
        self._order.remove(number, own.tenant)
        return own

    def check_integrity(self) -> str:
        """Describes the inconsistency, or returns an empty string."""
        if len(self._entries) > max(self.capacity, 0):
            return f"{len(self._entries)} blocks are in a tier for {self.capacity}"
        if {number for number, _ in self._entries.values()} != set(self._order):
            return "the index and the order of eviction differ"
        if len(self._keys) != len(self._entries):
            return f"{len(self._keys)} keys for {len(self._entries)} blocks"
        return self._order.check_integrity()
