"""The router's estimate of the prefix caches of older workers, which do not tell what they hold.

The estimate may be wrong. An error costs time but never changes tokens: workers verify the blocks
that they find.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixEstimate:
    """Block hashes by worker. The least recently assigned hashes are evicted first."""

    def __init__(self) -> None:
        self._blocks: dict[str, OrderedDict[bytes, None]] = {}

    def add(self, worker_id: str, hashes: Sequence[bytes], capacity: int) -> None:
        """Records that the worker, with room for `capacity` blocks, holds the sequence of these
        hashes.
        """
        blocks = self._blocks.setdefault(worker_id, OrderedDict())
        # The tail goes in first, so that a prefix stays longer than the blocks that follow it.
        for block in reversed(hashes):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > capacity:
            blocks.popitem(last=False)

    def match(self, worker_id: str, hashes: Sequence[bytes]) -> int:
        """Returns the number of leading blocks that the worker probably holds."""
        blocks = self._blocks.get(worker_id)
        if not blocks:
            return 0
        for count, block in enumerate(hashes):
            if block not in blocks:
                return count
        return len(hashes)

    def drop(self, worker_id: str) -> None:
        """Forgets the worker's blocks."""
        self._blocks.pop(worker_id, None)
