"""Blocks that nobody holds but whose KV may be of use again, and which of them is given up next."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator


class CachedBlocks:
    """By owner, least recently used first. All owners have equal shares: the next block to go is of
    the owner who has most of them, so that nobody's blocks go as long as another has more. With one
    owner that is plain LRU.

    Adding and removing take constant time and only note that an owner's count has changed; giving
    up a block takes the logarithm of the number of owners.
    """

    def __init__(self) -> None:
        # Not a dict, whose first key is found by passing over all that were deleted before it.
        self._blocks: dict[str, OrderedDict[int, None]] = {}
        self._total = 0
        self._changed: set[str] = set()  # owners who may have no entry with their count in
        # A heap of (-count, owner), some of them out of date
        self._by_count: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[int]:
        for blocks in self._blocks.values():
            yield from blocks

    def of(self, owner: str) -> int:
        """How many the owner has."""
        return len(self._blocks.get(owner, ()))

    def has(self, block: int, owner: str) -> bool:
        return block in self._blocks.get(owner, ())

    def add(self, block: int, owner: str) -> None:
        if owner not in self._blocks:
            self._blocks[owner] = OrderedDict()
        self._blocks[owner][block] = None
        self._total += 1
        self._changed.add(owner)

    def remove(self, block: int, owner: str) -> bool:
        """False if it is not here."""
        blocks = self._blocks.get(owner)
        if blocks is None or block not in blocks:
            return False
        del blocks[block]
        self._total -= 1
        self._changed.add(owner)
        return True

    def pop(self) -> int:
        """Takes out the block that is given up next."""
        self._note_changes()
        while -self._by_count[0][0] != self.of(self._by_count[0][1]):
            heapq.heappop(self._by_count)  # out of date
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
        """What is off, or nothing."""
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
