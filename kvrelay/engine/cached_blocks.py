"""Blocks that nobody holds but whose KV may be of use again, and which of them is given up next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class CachedBlocks:
    """By owner, least recently used first. All owners have equal shares: the next block to go is of the owner who has
    most of them, so that nobody's blocks go as long as another has more. With one owner that is plain LRU.

    Every operation takes constant time: owners are kept by how many blocks they have, and that changes by one.
    """

    def __init__(self) -> None:
        # Owner -> its blocks, least recently used first. A dict's first key is found by passing over all deleted ones.
        self._blocks: dict[str, OrderedDict[int, None]] = {}
        self._owners: dict[int, dict[str, None]] = {}  # number of blocks -> owners who have so many
        self._most = 0
        self._total = 0

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
        blocks = self._blocks.get(owner)
        if blocks is None:
            blocks = self._blocks[owner] = OrderedDict()
        blocks[block] = None
        self._total += 1
        self._move(owner, len(blocks) - 1, len(blocks))

    def remove(self, block: int, owner: str) -> bool:
        """False if it is not here."""
        blocks = self._blocks.get(owner)
        if blocks is None or block not in blocks:
            return False
        del blocks[block]
        self._total -= 1
        self._move(owner, len(blocks) + 1, len(blocks))
        return True

    def pop(self) -> tuple[int, str]:
        """Takes out the block that is given up next, and says whose it was."""
        owner = next(iter(self._owners[self._most]))
        block = next(iter(self._blocks[owner]))
        self.remove(block, owner)
        return block, owner

    def check_integrity(self) -> str:
        """What is off, or nothing."""
        counts = {owner: len(blocks) for owner, blocks in self._blocks.items()}
        if {owner: count for count, owners in self._owners.items() for owner in owners} != counts:
            return "the owners of cached blocks are not kept by how many they have"
        if sum(counts.values()) != self._total or max(counts.values(), default=0) != self._most:
            return f"{self._total} cached blocks are counted, at most {self._most} of one owner: {counts}"
        return ""

    def _move(self, owner: str, before: int, after: int) -> None:
        if before:
            peers = self._owners[before]
            del peers[owner]
            if not peers:
                del self._owners[before]
                if before == self._most:
                    self._most = after  # one less, where this owner now is, or one more
        if after:
            self._owners.setdefault(after, {})[owner] = None
            self._most = max(self._most, after)
        else:
            del self._blocks[owner]
