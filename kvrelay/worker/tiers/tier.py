"""The interface of a tier, and what tiers count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kv_transfer.blocks.single_blocks import BlockCopy
from kvrelay.types.kv_block import BlockKey
from kvrelay.types.workers import TierKind

# Weight of the newest measurement of a rate.
_WEIGHT = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlock:
    """A block outside of the pool."""

    key: BlockKey
    copy: BlockCopy


@dataclass(slots=True)
class TierCounts:
    """Counts of one tier, in blocks; see `TierLoad`."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    dropped: int = 0
    errors: int = 0
    error: str = ""
    read_rate: float = 0.0
    write_rate: float = 0.0
    # Stores that are not asked now.
    skipped: int = 0
    # Errors by what failed, for the log.
    by_reason: dict[str, int] = field(default_factory=dict)

    def read(self, num_bytes: int, seconds: float) -> None:
        """Adds a measurement of reading."""
        self.read_rate = _mean(self.read_rate, num_bytes, seconds)

    def written(self, num_bytes: int, seconds: float) -> None:
        """Adds a measurement of writing."""
        self.write_rate = _mean(self.write_rate, num_bytes, seconds)


class Tier(Protocol):
    """Blocks behind the pool. Lives on the worker's event loop, and never blocks it."""

    kind: TierKind
    counts: TierCounts

    @property
    def size_bytes(self) -> int:
        """Bytes that the tier may take."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes that the tier takes."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks that the tier holds."""
        ...

    @property
    def has_room(self) -> bool:
        """True if the tier takes a block now. False while it is behind."""
        ...

    @property
    def works(self) -> bool:
        """True if the tier stores what it takes, as far as is known."""
        ...

    @property
    def is_drained(self) -> bool:
        """True if there is nothing to store or to remove, or nothing can be."""
        ...

    async def wait_for_room(self) -> None:
        """Returns when the tier may have room."""
        ...

    def unsaved(self) -> Sequence[StoredBlock]:
        """The blocks that end with this process."""
        ...

    def holds(self, key: BlockKey) -> bool:
        """True if the tier probably returns the block. False also if only `probe` can tell."""
        ...

    def offer(self, block: StoredBlock) -> list[StoredBlock]:
        """Takes a block, or drops it if the tier is behind. Returns blocks that it gave up for it
        and that another tier may take.
        """
        ...

    async def probe(self, keys: Sequence[BlockKey]) -> int:
        """The number of leading blocks that the tier probably returns. May wait for a disk or for
        another process.
        """
        ...

    async def read(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        """The leading blocks of `keys` that the tier returns. May wait for a disk or for another
        process.
        """
        ...

    def touch(self, key: BlockKey) -> bool:
        """Makes the block the most recently used. Returns False if the tier does not hold it."""
        ...

    def forget(self, key: BlockKey) -> None:
        """Gives a block up, because its KV is in doubt."""
        ...

    def reject(self, key: BlockKey, reason: str) -> None:
        """Gives up a block that came back damaged, and counts an error."""
        ...

    async def run(self) -> None:
        """Opens the tier, and stores what it takes, until cancelled. May return before if there is
        nothing to do.
        """
        ...

    async def close(self) -> None:
        """Ends the tier. Call it when `run` has ended."""
        ...


def _mean(old: float, num_bytes: int, seconds: float) -> float:
    rate = num_bytes / max(seconds, 1e-6)
    return rate if not old else (1 - _WEIGHT) * old + _WEIGHT * rate
