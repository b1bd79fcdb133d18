"""Block hashes that all holders of a sequence share, because hashing is most of the cost of a long
prompt.
"""

from __future__ import annotations

from kvrelay.engine.kvcache.block_hashes import BlockHasher


class SharedHashes:
    """Hashers by request and block size. Router and workers hash the same sequence."""

    def __init__(self) -> None:
        self._hashers: dict[str, dict[int, BlockHasher]] = {}

    def get(self, request_id: str, block_size: int) -> BlockHasher:
        """Returns the request's hasher for a block size."""
        found = self._hashers.setdefault(request_id, {})
        if block_size not in found:
            found[block_size] = BlockHasher(block_size)
        return found[block_size]

    def forget(self, request_id: str) -> None:
        """Drops the hashers of a request that has ended."""
        self._hashers.pop(request_id, None)
