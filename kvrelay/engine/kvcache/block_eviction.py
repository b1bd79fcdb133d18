"""Cached blocks: blocks that no request holds but whose KV may be reused, and the order of their
eviction.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator


class CachedBlocks:
    """Cached blocks by owner, least recently used first. All owners have equal shares.

    The next block to evict belongs to the owner with the most cached blocks, so no owner loses
    blocks while another owner has more. With one owner this is plain LRU.

    Adding and removing take constant time and only record that an owner's count has changed.
    Evicting a block takes the logarithm of the number of owners.
    """

    def __init__(self) -> None:
        # An OrderedDict finds its first key at once. A dict scans all keys that were deleted before
        # it.
        self._blocks: dict[str, OrderedDict[int, None]] = {}
        self._total = 0
        # Owners whose current count may be missing from the heap.
        self._changed: set[str] = set()
        # A heap of (-count, owner). Some entries are out of date.
        self._by_count: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[int]:
        for blocks in self._blocks.values():
            yield from blocks

    def of(self, owner: str) -> int:
        """Number of cached blocks of the owner."""
        return len(self._blocks.get(owner, ()))

    def has(self, block: int, owner: str) -> bool:
        """True if the block is cached for the owner."""
        return block in self._blocks.get(owner, ())

    def add(self, block: int, owner: str) -> None:
        """Adds the block as the owner's most recently used."""
        if owner not in self._blocks:
            self._blocks[owner] = OrderedDict()
        self._blocks[owner][block] = None
        self._total += 1
        self._changed.add(owner)

    def remove(self, block: int, owner: str) -> bool:
        """Removes the block. Returns False if it is not cached for the owner."""
        blocks = self._blocks.get(owner)
        if blocks is None or block not in blocks:
            return False
        del blocks[block]
        self._total -= 1
        self._changed.add(owner)
        return True

    def pop(self) -> int:
        """Removes and returns the next block to evict. At least one block must be cached."""
        self._note_changes()
        while -self._by_count[0][0] != self.of(self._by_count[0][1]):
            # This entry is out of date.
            heapq.heappop(self._by_count)
        count, owner = self._by_count[0]
        block, _ = self._blocks[owner].popitem(last=False)
        self._total -= 1
        if self._blocks[owner]:
            heapq.heapreplace(self._by_count, (count + 1, owner))
        else:
            heapq.heappop(self._by_count)
            del self._blocks[owner]
        return block

    def check_integrity(self) -> str:
        """Describes the inconsistency, or returns an empty string."""
        if self._total != (found := sum(map(len, self._blocks.values()))):
            return f"{found} blocks are cached, {self._total} counted"
        noted = {owner for count, owner in self._by_count if -count == self.of(owner)}
        missing = (
            {owner for owner, blocks in self._blocks.items() if blocks} - noted - self._changed
        )
        return f"cached blocks of {sorted(missing)} would never be given up" if missing else ""

    def _note_changes(self) -> None:
        for owner in self._changed:
            if self._blocks[owner]:
                heapq.heappush(self._by_count, (-len(self._blocks[owner]), owner))
            else:
                del self._blocks[owner]
        self._changed.clear()
        if len(self._by_count) > 2 * len(self._blocks) + 64:
            self._by_count = [(-len(blocks), owner) for owner, blocks in self._blocks.items()]
            heapq.heapify(self._by_count)
