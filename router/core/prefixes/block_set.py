"""A compact set of block keys. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

_LEAST_SLOTS = 256
# The table doubles when it is fuller than this. 16 to 32 bytes a key.
_FULL = 1 / 2
# Longest search for a new key. Keys are random, and among a million of them the longest search
# takes less than 100 steps. Only keys that somebody has chosen need more.
_MOST_STEPS = 512
# Keys that `match` looks up one by one, before it looks up others together: so many at first, and
# each time this many times more, up to the most.
_FIRST = 8
_TOGETHER, _MORE, _MOST_TOGETHER = 256, 4, 4096


class ClusteredKeys(Exception):
    """The keys are not random: many of them collide."""


class BlockSet:
    """Keys in a hash table of 8 bytes a slot, with linear probing (Knuth, volume 3, 6.4, algorithm
    L, and R for removal without tombstones).

    Keys are parts of keyed hashes, so their low bits are their slots. 0 marks an empty slot; the
    key 0 is kept apart.
    """

    def __init__(self) -> None:
        self._table: Keys = np.zeros(_LEAST_SLOTS, np.uint64)
        # The same memory, for access to single slots.
        self._slots = self._table.data
        self._mask = _LEAST_SLOTS - 1
        self._used = 0
        self._has_zero = False
        # XOR of all keys.
        self.checksum = 0

    def __len__(self) -> int:
        return self._used + self._has_zero

    def __contains__(self, key: int) -> bool:
        return self._has_zero if key == 0 else self._slots[self._find(key)] == key

    def __iter__(self) -> Iterator[int]:
        if self._has_zero:
            yield 0
        yield from map(int, self._table[self._table != 0])

    @property
    def num_bytes(self) -> int:
        """Size of the table in bytes."""
        return self._table.nbytes

    def reserve(self, count: int) -> None:
        """Makes room for `count` keys in all."""
        slots = len(self._table)
        while count > _FULL * slots:
            slots *= 2
        if slots > len(self._table):
            self._rebuild(slots)

    def add(self, keys: Iterable[int]) -> None:
        """Adds keys. Raises ClusteredKeys for keys that are not random."""
        for key in keys:
            if key == 0:
                self._has_zero = True
                continue
            slot = self._find(key)
            if self._slots[slot]:
                continue
            if (slot - key) & self._mask > _MOST_STEPS:
                raise ClusteredKeys(
                    f"a search among {len(self)} keys takes over {_MOST_STEPS} steps"
                )
            self._slots[slot] = key
            self._used += 1
            self.checksum ^= key
            if self._used > _FULL * len(self._table):
                self._rebuild(2 * len(self._table))

    def remove(self, keys: Iterable[int]) -> None:
        """Removes keys. Keys that are not in the set are ignored."""
        for key in keys:
            if key == 0:
                self._has_zero = False
                continue
            slot = self._find(key)
            if self._slots[slot]:
                self._used -= 1
                self.checksum ^= key
                self._close_gap(slot)

    def match(self, keys: Keys) -> int:
        """Returns the number of leading keys that are in the set. The time grows with the result,
        not with the set.
        """
        for index, key in enumerate(keys[:_FIRST].tolist()):
            if key not in self:
                return index
        start, size = _FIRST, _TOGETHER
        while start < len(keys):
            part = keys[start : start + size]
            count = self._match(part)
            start += count
            if count < len(part):
                return start
            size = min(_MORE * size, _MOST_TOGETHER)
        return len(keys)

    def _match(self, keys: Keys) -> int:
        """Like `match`, for all keys together."""
        mask = self._mask
        slots = (keys & np.uint64(mask)).astype(np.intp)
        end = len(keys)
        # Places of the keys whose search goes on.
        open_ = np.flatnonzero(self._table[slots] != keys)
        while open_.size:
            missing = open_[self._table[slots[open_]] == 0]
            if missing.size:
                end = int(missing[0])
                open_ = open_[open_ < end]
            slots[open_] = (slots[open_] + 1) & mask
            open_ = open_[self._table[slots[open_]] != keys[open_]]
        if not self._has_zero and (zeros := np.flatnonzero(keys[:end] == 0)).size:
            # It looks like an empty slot.
            end = int(zeros[0])
        return end

    def _find(self, key: int) -> int:
        """Returns the slot of a key that is not 0, or the empty slot where it belongs."""
        slots, mask = self._slots, self._mask
        slot = key & mask
        while (found := slots[slot]) and found != key:
            slot = (slot + 1) & mask
        return slot

    def _close_gap(self, gap: int) -> None:
        """Empties a slot, and moves keys back into it that would not be found otherwise."""
        slots, mask = self._slots, self._mask
        slot = (gap + 1) & mask
        while key := slots[slot]:
            # The key may move if its own slot is not between the gap and its present slot.
            if (slot - key) & mask >= (slot - gap) & mask:
                slots[gap] = key
                gap = slot
            slot = (slot + 1) & mask
        slots[gap] = 0

    def _rebuild(self, size: int) -> None:
        """Moves all keys to a table of that many slots, a power of two."""
        keys = self._table[self._table != 0]
        mask = np.uint64(size - 1)
        keys = keys[np.argsort(keys & mask, kind="stable")]
        # Each key comes into its slot, or after the key before it.
        order = np.arange(len(keys), dtype=np.int64)
        places = np.maximum.accumulate((keys & mask).astype(np.int64) - order) + order
        self._table = np.zeros(size, np.uint64)
        self._slots = self._table.data
        self._mask = size - 1
        fits = places < size
        self._table[places[fits]] = keys[fits]
        # The last keys may have to go round to the first slots.
        for key in keys[~fits].tolist():
            self._slots[self._find(key)] = key
