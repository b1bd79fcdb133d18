"""Accounting of the KV cache: blocks, and the prefixes that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from kvrelay.engine.kvcache.block_hashes import HASH_BYTES, BlockHasher
from kvrelay.engine.kvcache.block_pool import BlockPool
from kvrelay.engine.kvcache.cache_listener import CacheListener
from kvrelay.engine.kvcache.window_parts import BlockUnits, PartMemory
from kvrelay.types.kv_block import BlockKey
from kvrelay.types.kv_layout import KvLayout


# Without slots, since the number of blocks is computed once.
@dataclass(frozen=True)
class WindowRule:
    """Which blocks of a sequence need their windowed parts."""

    layout: KvLayout
    # The most new tokens of a step.
    step_tokens: int

    @cached_property
    def most_blocks(self) -> int:
        """The most blocks with windowed parts that a sequence needs in a step."""
        return self.layout.most_windowed(self.step_tokens)

    def needed(self, num_computed: int, num_blocks: int) -> range:
        """The places of the blocks that the steps after `num_computed` tokens need, of a sequence
        with `num_blocks` blocks. A step needs fewer than these at the beginning of a prompt, but
        later ones do not need more.
        """
        first = self.layout.first_block(num_computed)
        return range(first, max(first, min(num_blocks, first + self.most_blocks)))


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
        windows: WindowRule | None = None,
        capacity: int | None = None,
        memory: PartMemory | None = None,
    ) -> None:
        """windows: if blocks may lack their windowed parts. capacity, memory: of a pool with
        windows; see `BlockPool`.
        """
        self.block_size = block_size
        self.windows = windows
        units = BlockUnits() if windows is None else BlockUnits.of(windows.layout)
        self.pool = BlockPool(num_blocks, units, capacity=capacity, memory=memory)
        self._prefix_cache = prefix_cache
        self._model = model
        self._hash_bytes = hash_bytes
        # Block -> its key, as of its last publication. None while nobody asks for keys, since an
        # identity takes a second hash of all tokens.
        self._keys: dict[int, BlockKey] | None = None

    @property
    def shares(self) -> bool:
        """Whether other workers may have the blocks: none of them lacks a part."""
        return self.windows is None

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

    def match(self, prefix: BlockHasher, limit_tokens: int, received: int = 0) -> list[int]:
        """The longest leading run of cached blocks within `limit_tokens` tokens after which a
        sequence can go on. Adds a hold to each, and to the windowed parts of `window_of(run)`.

        received: the tokens of the sequence if their KV will come by hand-off.
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
        blocks = blocks[: self._usable(blocks, received)]
        self.pool.hold(blocks)
        if window := self.window_of(blocks, received):
            self.pool.hold_windows(blocks[window.start : window.stop])
        return blocks

    def window_of(self, blocks: Sequence[int], received: int = 0) -> range:
        """The places of a run of full blocks whose windowed parts the next token needs: the one
        after the run, or after the tokens that will be received.
        """
        if self.windows is None:
            return range(0)
        first = self.windows.layout.first_block(max(received, len(blocks) * self.block_size))
        return range(first, max(first, len(blocks)))

    def _usable(self, blocks: Sequence[int], received: int) -> int:
        """The number of leading blocks that a sequence can go on after: the last of them need their
        windowed parts.
        """
        if self.windows is None:
            return len(blocks)
        layout, usable, since = self.windows.layout, 0, 0
        # Places since..place have their windowed parts.
        for place, block in enumerate(blocks):
            if not self.pool.has_window(block):
                since = place + 1
            if since <= layout.first_block(max(received, (place + 1) * self.block_size)):
                usable = place + 1
        return usable

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

    def release(self, blocks: Sequence[int], window: range = range(0)) -> None:
        """Removes one hold from each block of a sequence, given in the sequence's order, and from
        the windowed parts of the blocks in the places `window`.
        """
        if window:
            self.pool.release_windows(blocks[window.start : window.stop])
        self.pool.release(blocks)

    def check_integrity(self) -> None:
        """Raises IntegrityError if the pool is inconsistent."""
        self.pool.check_integrity()
