"""The windowed parts of blocks: the KV of layers that attend to the last tokens only."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.engine.kvcache.block_eviction import CachedBlocks
from kvrelay.types.kv_layout import KvLayout


class PartMemory(Protocol):
    """The memory of the parts of blocks. Calls return at once."""

    def give_up(self, blocks: Sequence[int], *, only_windowed: bool = False) -> None:
        """Both parts of the blocks, or the windowed ones, hold nothing any more."""
        ...

    def take(self, blocks: Collection[int], *, windowed: bool) -> None:
        """One of the parts of each block will hold something."""
        ...


@dataclass(frozen=True, slots=True)
class BlockUnits:
    """The memory of a block in units: of the layers that keep all tokens, and of windowed
    layers.
    """

    unwindowed: int = 1
    windowed: int = 0

    @property
    def all(self) -> int:
        """Units of a block with both parts."""
        return self.unwindowed + self.windowed

    @classmethod
    def of(cls, layout: KvLayout) -> BlockUnits:
        """The units of the layout's blocks: the fewest in the ratio of their bytes."""
        unwindowed, windowed = layout.part_bytes
        divisor = math.gcd(unwindowed, windowed)
        return cls(unwindowed // divisor, windowed // divisor)

    @staticmethod
    def in_memory(layout: KvLayout, num_bytes: int) -> int:
        """The number of units in a memory."""
        return layout.bytes_for_parts(num_bytes) // math.gcd(*layout.part_bytes)


class WindowParts:
    """The windowed part of each block, in one of three states.

        absent ──hold──▶ held ──release──▶ idle ──drop──▶ absent
                          ▲                 │
                          └──────hold───────┘

    Idle parts belong to blocks that are in use and named: a sequence that shares the prefix up to
    such a block can start there. Owners share the memory of idle parts equally.
    """

    def __init__(self, num_blocks: int) -> None:
        self._present = bytearray(num_blocks)
        self._holds = [0] * num_blocks
        self._idle = CachedBlocks()
        # Parts that take memory, and holds, of which a part may have several.
        self.num_present = 0
        self.num_holds = 0

    @property
    def num_idle(self) -> int:
        """Parts that `pop_idle` can give."""
        return len(self._idle)

    def is_present(self, block: int) -> bool:
        """Whether the part takes memory."""
        return bool(self._present[block])

    def num_holds_of(self, block: int) -> int:
        """Number of holds of the part."""
        return self._holds[block]

    def hold(self, block: int, owner: str) -> None:
        """Adds a hold. A part that was absent takes memory from now on."""
        self._holds[block] += 1
        self.num_holds += 1
        if self._present[block]:
            self._idle.remove(block, owner)
        else:
            self._present[block] = True
            self.num_present += 1

    def release(self, block: int) -> bool:
        """Removes a hold. Returns whether it was the last one. The part is then to be rested or
        dropped.
        """
        self._holds[block] -= 1
        self.num_holds -= 1
        return not self._holds[block]

    def rest(self, block: int, owner: str) -> None:
        """Makes a present part that nobody holds idle."""
        if self._present[block] and not self._holds[block]:
            self._idle.add(block, owner)

    def wake(self, block: int, owner: str) -> None:
        """Makes a part not idle, if it is: its block is cached now, or about to be freed."""
        self._idle.remove(block, owner)

    def drop(self, block: int) -> bool:
        """Makes a part that is not idle absent. Returns whether it was present."""
        if not self._present[block]:
            return False
        self._present[block] = False
        self.num_present -= 1
        return True

    def pop_idle(self) -> int:
        """The block of the idle part to give up next, which is absent now."""
        block = self._idle.pop()
        self.drop(block)
        return block

    def idle(self) -> set[int]:
        """The blocks with idle parts."""
        return set(self._idle)

    def flaw(self) -> str:
        """Says which counts disagree; empty if none do."""
        if (found := self._present.count(1)) != self.num_present:
            return f"{found} windowed parts take memory, but {self.num_present} are counted"
        if sum(self._holds) != self.num_holds:
            return f"{sum(self._holds)} holds of windowed parts, but {self.num_holds} are counted"
        absent = [
            block for block, holds in enumerate(self._holds) if holds and not self._present[block]
        ]
        if absent:
            return f"windowed parts that are held are absent: {absent}"
        return self._idle.check_integrity()
