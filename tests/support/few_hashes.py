"""A prefix cache in which many blocks have the hash of another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.engine.kvcache.kv_cache import KvCache

Cut = Callable[[bytes, int], bytes]  # what is left of the hash of a sequence's block of that index


def one_for_all(_hash: bytes, _index: int) -> bytes:
    return b""


def one_for_each_place(_hash: bytes, index: int) -> bytes:
    """Any two sequences collide at each block, and no two blocks of one sequence do."""
    return index.to_bytes(2, "little")


def one_of_three(hash: bytes, _index: int) -> bytes:
    return bytes([hash[0] % 3])


CUTS: tuple[Cut, ...] = (one_for_all, one_for_each_place, one_of_three)


class CutHasher(BlockHasher):
    """Production's hasher, but for what is left of its hashes."""

    cut: Cut

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        known = len(self.hashes)
        super().extend(token_ids)
        self.hashes[known:] = [
            self.cut(hash, index) for index, hash in enumerate(self.hashes[known:], known)
        ]
        return self.hashes


class CollidingCache(KvCache):
    def __init__(self, num_blocks: int, block_size: int, cut: Cut) -> None:
        super().__init__(num_blocks, block_size)
        self._cut = cut

    def hasher(self, salt: str, adapter: str = "") -> CutHasher:
        hasher = CutHasher(self.block_size, salt, adapter=adapter)
        hasher.cut = self._cut
        return hasher
