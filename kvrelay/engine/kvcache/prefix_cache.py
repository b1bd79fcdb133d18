"""Accounting of the KV cache: blocks, and the prefixes that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvrelay.engine.kvcache.block_hashes import HASH_BYTES, BlockHasher
from kvrelay.engine.kvcache.block_pool import BlockPool
from kvrelay.engine.kvcache.cache_listener import CacheListener
from kvrelay.types.kv_block import BlockKey


class KvCache:
    """A block pool whose full blocks are found again by model, adapter, salt and the tokens up to
    their end.

    A hash finds a candidate, and only equal content is a match. A block's content is its own tokens
    and a reference to the content before it: the serial number of the previous block's content, or
    the root (model, adapter and salt) for the first block. A serial number stands for one content
    and is never reused. So a match is exact from the root on, independent of the hashes, at the
    cost of one comparison of `block_size` tokens per block.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        model: str = "",
        hash_bytes: int = HASH_BYTES,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._prefix_cache = prefix_cache
        self._model = model
        self._hash_bytes = hash_bytes
        # Block -> its key, as of its last publication. None while nobody asks for keys, since an
        # identity takes a second hash of all tokens.
        self._keys: dict[int, BlockKey] | None = None

    def listen(self, listener: CacheListener) -> None:
        """Tells the listener of the named blocks, and keeps their keys for it. Call it before the
        first block is published.
        """
        self.pool.listeners.append(listener)
        self._keys = {}

    def hasher(self, salt: str, adapter: str = "") -> BlockHasher:
        """A hasher for a sequence whose blocks are matched and published here."""
        return BlockHasher(
            self.block_size,
            salt,
            model=self._model,
            adapter=adapter,
            hash_bytes=self._hash_bytes,
        )

    def match(self, prefix: BlockHasher, limit_tokens: int) -> list[int]:
        """The longest leading run of cached blocks within `limit_tokens` tokens. Adds a hold to
        each.
        """
        blocks: list[int] = []
        before: int | str = prefix.root
        limit = max(limit_tokens, 0) // self.block_size
        for hash, tokens in islice(zip(prefix.hashes, prefix.tokens, strict=True), limit):
            block = self.pool.lookup(hash, (before, tokens))
            if block is None:
                break
            blocks.append(block)
            before = self.pool.serial(block)
        self.pool.hold(blocks)
        return blocks

    def find(self, token_ids: Sequence[int], salt: str, adapter: str = "") -> list[int]:
        """Like `match`, for all full blocks of a sequence that does not run here."""
        prefix = self.hasher(salt, adapter)
        prefix.extend(token_ids)
        return self.match(prefix, len(token_ids))

    def allocate(self, n: int, after: int | None = None) -> list[int]:
        """Allocates `n` blocks with one hold each; see `BlockPool.allocate`. Raises OutOfBlocks."""
        return self.pool.allocate(n, after)

    def publish(
        self, prefix: BlockHasher, blocks: Sequence[int], first: int, end: int, tenant: str = ""
    ) -> None:
        """Makes blocks `first` to `end` - 1 of a sequence findable. They must be full, computed and
        held.

        The blocks before `first` must have been published or matched. If they have been withdrawn
        since, nothing is published. If another block already has the same content, lookups return
        that block.
        """
        if not self._prefix_cache:
            return
        before = self.pool.serial(blocks[first - 1]) if first else prefix.root
        if not before:
            return
        for index in range(first, end):
            content = before, prefix.tokens[index]
            before = self.pool.name(blocks[index], prefix.hashes[index], content, tenant)
            if self._keys is not None:
                hash, identity = prefix.hashes[index], prefix.identities()[index]
                self._keys[blocks[index]] = BlockKey(hash, identity, tenant)

    def key_of(self, block: int) -> BlockKey | None:
        """The key of a named block; None if it has no name, or if there is no listener."""
        key = None if self._keys is None else self._keys.get(block)
        return key if key is not None and self.pool.hash_of(block) == key.hash else None

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Makes held blocks unfindable because their KV is in doubt. Requests that hold them keep
        them.
        """
        for block in blocks:
            self.pool.unname(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Removes one hold from each block of a sequence, given in the sequence's order."""
        self.pool.release(blocks)

    def check_integrity(self) -> None:
        """Raises IntegrityError if the pool is inconsistent."""
        self.pool.check_integrity()
