"""Names for KV blocks by what is in them: equal names mean equal tokens from the start of the sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash


class BlockHasher:
    """Hashes a growing sequence block by block, each hash covering all blocks before it.

    A block's name is xxh3-64(parent's name || its token ids as int32), and the first parent is
    xxh3-64(salt): sequences of different tenants share no name. Only full blocks have one.
    """

    def __init__(self, block_size: int, salt: str = "") -> None:
        self.block_size = block_size
        self.hashes: list[int] = []
        self._root = xxhash.xxh3_64_intdigest(salt.encode())

    def extend(self, token_ids: Sequence[int]) -> list[int]:
        """Takes the whole sequence so far; returns the names of all its full blocks, computing the new ones only."""
        size = self.block_size
        for end in range((len(self.hashes) + 1) * size, len(token_ids) + 1, size):
            parent = self.hashes[-1] if self.hashes else self._root
            digest = xxhash.xxh3_64(parent.to_bytes(8, "little"))
            digest.update(array("i", token_ids[end - size : end]).tobytes())
            self.hashes.append(digest.intdigest())
        return self.hashes


def block_hashes(token_ids: Sequence[int], block_size: int, salt: str = "") -> list[int]:
    """The names of all full blocks of `token_ids`."""
    return BlockHasher(block_size, salt).extend(token_ids)
