"""What the router believes each worker's prefix cache holds.

It may be wrong. A wrong belief costs time and never a token: workers compare what they find.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Block hashes by worker, least recently assigned forgotten first."""

    def __init__(self) -> None:
        self._blocks: dict[str, OrderedDict[bytes, None]] = {}

    def add(self, worker_id: str, hashes: Sequence[bytes], capacity: int) -> None:
        """Notes that the worker, which has room for `capacity` blocks, holds the sequence of these
        hashes.
        """
        blocks = self._blocks.setdefault(worker_id, OrderedDict())
        # The tail goes in first, so that a prefix outlives what builds on it.
        for block in reversed(hashes):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > capacity:
            blocks.popitem(last=False)

    def match(self, worker_id: str, hashes: Sequence[bytes]) -> int:
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
