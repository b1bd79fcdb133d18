"""The block hashes of one sequence, as the prefix cache of a worker has them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.types.block_keys import KEY_BYTES, pack_keys
from router.core.prefixes.block_set import Keys


class PromptBlocks:
    """The full blocks of a growing sequence, hashed once for each layout of blocks."""

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._packed = bytearray()

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._hasher.block_size

    @property
    def hashes(self) -> Sequence[bytes]:
        """The hashes of the blocks so far."""
        return self._hasher.hashes

    def covers(self, num_tokens: int) -> bool:
        """Whether all full blocks of a sequence of that length are hashed."""
        return num_tokens // self.block_size <= len(self.hashes)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes the whole sequence so far. Hashes the blocks that are new."""
        self._hasher.extend(token_ids)

    @property
    def keys(self) -> Keys:
        """The keys of the blocks so far."""
        known = len(self._packed) // KEY_BYTES
        if known < len(self.hashes):
            # A new buffer, since arrays of the old one may be in use.
            self._packed = self._packed + pack_keys(self.hashes[known:])
        return np.frombuffer(self._packed, np.dtype("<u8"))

    def common(self, other: PromptBlocks) -> int:
        """Returns the number of leading blocks that both sequences have.

        A hash covers all tokens before it, so the sequences differ from the first different hash
        on.
        """
        mine, theirs = self.hashes, other.hashes
        shorter = range(min(len(mine), len(theirs)))
        return bisect_left(shorter, True, key=lambda index: mine[index] != theirs[index])
