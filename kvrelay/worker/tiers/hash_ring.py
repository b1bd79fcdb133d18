"""Consistent hashing: which store keeps which block. Pure.

Source: Karger et al., "Consistent Hashing and Random Trees", STOC 1997.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from hashlib import blake2b

# Points of each store. More points spread the blocks more evenly: with 160, the share of a store is
# within about 20 % of the mean.
POINTS = 160
_POINT_BYTES = 8
_PERSON = b"kvr ring"


class HashRing:
    """Stores by their names. All workers with the same names, in any order, agree on the store of a
    block. A store that leaves loses only its own blocks; one that joins takes over only its share.
    """

    def __init__(self, names: Sequence[str]) -> None:
        assert names, "a ring has at least one store"
        points = sorted(
            (_point(f"{name}#{number}".encode()), name)
            for name in set(names)
            for number in range(POINTS)
        )
        self._points = [point for point, _ in points]
        self._names = [name for _, name in points]
        self._count = len(set(names))

    def place(self, key: bytes, works: Callable[[str], bool] = lambda _: True) -> str | None:
        """The store of a block: the first one after the block's point that works; None if none
        does. So the blocks of a store that does not work go to all others evenly. The key is a
        hash, whose first bytes are the point.
        """
        start = bisect_right(self._points, int.from_bytes(key[:_POINT_BYTES], "big"))
        refused: set[str] = set()
        for step in range(len(self._names)):
            name = self._names[(start + step) % len(self._names)]
            if name in refused:
                continue
            if works(name):
                return name
            refused.add(name)
            if len(refused) == self._count:
                break
        return None


def _point(data: bytes) -> int:
    digest = blake2b(data, digest_size=_POINT_BYTES, person=_PERSON).digest()
    return int.from_bytes(digest, "big")
