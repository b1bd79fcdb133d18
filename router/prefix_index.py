"""What the router believes each worker's prefix cache holds. It may be wrong; the workers know."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Block names by worker, least recently assigned forgotten first."""

    def __init__(self) -> None:
        self._blocks: dict[str, OrderedDict[int, None]] = {}

    def add(self, worker_id: str, hashes: Sequence[int], capacity: int) -> None:
        """Notes that the worker, which has room for `capacity` blocks, holds the sequence with these block names."""
        blocks = self._blocks.setdefault(worker_id, OrderedDict())
        # The tail goes in first, so that a prefix outlives what builds on it.
        for block in reversed(hashes):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > capacity:
            blocks.popitem(last=False)

    def match(self, worker_id: str, hashes: Sequence[int]) -> int:
        """How many leading blocks of the sequence the worker probably holds."""
        blocks = self._blocks.get(worker_id)
        if not blocks:
            return 0
        for count, block in enumerate(hashes):
            if block not in blocks:
                return count
        return len(hashes)

    def drop(self, worker_id: str) -> None:
        self._blocks.pop(worker_id, None)
