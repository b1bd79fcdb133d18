"""The router's copy of one worker's prefix cache. Pure."""

from __future__ import annotations

from kvrelay.types.block_keys import DEVICE_TIER, unpack_keys
from kvrelay.worker_messages import CacheUpdate
from router.core.prefixes.block_set import BlockSet, ClusteredKeys, Keys

# Shortest and longest time between two requests for a snapshot, in seconds. It doubles as long as
# snapshots do not help.
RESYNC_S = (0.5, 60.0)
# Most blocks of one worker. 2**23 of them take up to 190 MiB.
MOST_BLOCKS = 2**23


class CacheReplica:
    """Exact once the first snapshot is complete, up to what has changed since the last update.

    If an update is missing, or the checksum differs, the replica wants a snapshot and keeps what it
    has until that is complete. A wrong replica costs time and never changes tokens: workers compare
    the content of the blocks that they find.
    """

    def __init__(self) -> None:
        self._blocks = BlockSet()
        # The snapshot that is coming in. Until it is complete, lookups use the blocks before it.
        self._coming = self._blocks
        # Number of the last update.
        self._number = 0
        # Updates are ignored until the next snapshot.
        self._lost = False
        self._resync_at = 0.0
        self._pause_s = RESYNC_S[0]
        # The worker's content was exactly this at the last update.
        self.exact = False
        # Snapshots that began, and updates that were missing or did not fit.
        self.snapshots = 0
        self.gaps = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def keys(self) -> frozenset[int]:
        """The keys of all blocks; for tests and tools, since it takes long."""
        return frozenset(self._blocks)

    def match(self, keys: Keys) -> int:
        """Returns the number of leading blocks that the worker holds."""
        return self._blocks.match(keys)

    def apply(self, update: CacheUpdate, now: float) -> bool:
        """Takes in an update. Returns whether the worker has to be asked for a snapshot."""
        if update.number <= self._number:
            # It came twice, or late.
            return False
        known = update.tier == DEVICE_TIER
        if update.number != self._number + 1 and not (known and update.begins):
            self._lose()
        self._number = update.number
        if known:
            self._apply(update)
        return self._wants_snapshot(now)

    def _apply(self, update: CacheUpdate) -> None:
        if update.begins:
            self._coming = BlockSet()
            if not self._blocks:
                self._blocks = self._coming
            self._lost = False
            self.snapshots += 1
        if self._lost:
            return
        try:
            if update.begins:
                self._coming.reserve(min(max(0, update.blocks), MOST_BLOCKS))
            self._coming.remove(unpack_keys(update.removed))
            self._coming.add(unpack_keys(update.stored))
        except ClusteredKeys:
            self._give_up()
            return
        self.exact = False
        if len(self._coming) > MOST_BLOCKS:
            self._give_up()
        elif update.complete:
            self._check(update)

    def _check(self, update: CacheUpdate) -> None:
        self._blocks = self._coming
        if (len(self._blocks), self._blocks.checksum) == (update.blocks, update.checksum):
            self.exact = True
            self._pause_s = RESYNC_S[0]
        else:
            self._lose()

    def _give_up(self) -> None:
        """Forgets the content, which no honest worker has."""
        self._blocks = self._coming = BlockSet()
        self._lose()

    def _lose(self) -> None:
        self.gaps += not self._lost
        self._lost = True
        self.exact = False

    def _wants_snapshot(self, now: float) -> bool:
        if not self._lost or now < self._resync_at:
            return False
        self._resync_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, RESYNC_S[1])
        return True
