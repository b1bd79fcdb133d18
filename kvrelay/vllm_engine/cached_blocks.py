"""The blocks in vLLM's prefix cache, under the hashes by which routers know blocks. Does not import
vLLM.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.engine.kvcache.block_hashes import BlockHasher, HashChain
from kvrelay.engine.kvcache.change_journal import ChangeJournal


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Consecutive full blocks that vLLM has cached: vLLM's hashes and the token ids of all of them.
    `before` is vLLM's hash of the block before them, or None at the start of a sequence, where
    `salt` counts.
    """

    hashes: tuple[bytes, ...]
    token_ids: tuple[int, ...]
    before: bytes | None = None
    salt: str = ""


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """What vLLM has cached since the last report, in this order, and which of these and other
    blocks it does not hold any more.
    """

    stored: tuple[StoredBlocks, ...] = ()
    gone: frozenset[bytes] = frozenset()


class CachedBlocks:
    """Implements `kvrelay.worker.cache_feed.FindableBlocks`. Lives on the worker's event loop.

    vLLM's hash of a block does not tell kvrelay's, so the blocks are hashed again. A block after an
    unknown one stays unknown, and routers then expect less than vLLM holds.
    """

    def __init__(self, num_blocks: int, hasher: Callable[[str], BlockHasher]) -> None:
        """hasher: makes the hasher of a new sequence with this salt."""
        self.num_blocks = num_blocks
        self.journal = ChangeJournal()
        self._hasher = hasher
        # By vLLM's hash.
        self._chains: dict[bytes, HashChain] = {}
        self._numbers: dict[bytes, int] = {}
        # kvrelay's hashes, by number.
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_named(self) -> int:
        """Number of known blocks."""
        return len(self._chains)

    def hashes(self, start: int, end: int) -> list[bytes]:
        """Returns kvrelay's hashes of the known blocks with these numbers."""
        return [hash for hash in self._hashes[start:end] if hash is not None]

    def apply(self, changes: CacheChanges) -> None:
        """Takes in what has changed."""
        # Blocks that are gone come first, since others have taken their place. Those that came and
        # went since the last report may have been followed by others.
        left = {hash: chain for hash in changes.gone if (chain := self._drop(hash)) is not None}
        for one in changes.stored:
            self._store(one, changes.gone, left)

    def _store(
        self, one: StoredBlocks, gone: frozenset[bytes], left: dict[bytes, HashChain]
    ) -> None:
        """Adds the blocks, but for those that are `gone`, which it adds to `left`."""
        if one.before is None:
            chain: HashChain | None = self._hasher(one.salt).chain
        else:
            chain = self._chains.get(one.before) or left.get(one.before)
        if chain is None or not one.hashes:
            return
        size = len(one.token_ids) // len(one.hashes)
        for number, hash in enumerate(one.hashes):
            tokens = one.token_ids[number * size : (number + 1) * size]
            chain = chain.then(array("i", tokens).tobytes())
            if hash in gone:
                left[hash] = chain
            elif hash not in self._chains:
                self._add(hash, chain)

    def _add(self, hash: bytes, chain: HashChain) -> None:
        if self._free:
            self._chains[hash] = chain
            self._numbers[hash] = self._free.pop()
            self._hashes[self._numbers[hash]] = chain.hash
            self.journal.named(chain.hash)

    def _drop(self, hash: bytes) -> HashChain | None:
        chain = self._chains.pop(hash, None)
        if chain is not None:
            number = self._numbers.pop(hash)
            self._hashes[number] = None
            self._free.append(number)
            self.journal.forgotten(chain.hash)
        return chain
