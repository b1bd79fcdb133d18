"""The KV cache's books: blocks, and the prefixes that they hold."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.engine.blocks import BlockPool


class KvCache:
    """A block pool whose full blocks are found again by the hash of the tokens up to their end (`hashing.py`)."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._prefix_cache = prefix_cache

    def match(self, hashes: Sequence[int], limit_tokens: int) -> list[int]:
        """The longest leading run of cached blocks within `limit_tokens` tokens, with a hold on each."""
        blocks: list[int] = []
        for hash in hashes[: max(limit_tokens, 0) // self.block_size]:
            block = self.pool.lookup(hash)
            if block is None:
                break
            blocks.append(block)
        self.pool.hold(blocks)
        return blocks

    def allocate(self, n: int, after: int | None = None) -> list[int]:
        """`n` blocks with one hold each, see `BlockPool.allocate`. Raises OutOfBlocks."""
        return self.pool.allocate(n, after)

    def publish(self, hashes: Sequence[int], blocks: Sequence[int], tenant: str = "") -> None:
        """Makes full, computed, held blocks findable. Where another block has the name already, it keeps it."""
        if self._prefix_cache:
            for block, hash in zip(blocks, hashes, strict=True):
                self.pool.name(block, hash, tenant)

    def release(self, blocks: Sequence[int]) -> None:
        """Gives back one hold on each block of a sequence, in the sequence's order."""
        self.pool.release(blocks)

    def check_integrity(self) -> None:
        """Raises IntegrityError with what is off."""
        self.pool.check_integrity()
