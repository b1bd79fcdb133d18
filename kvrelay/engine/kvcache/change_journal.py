"""What has changed in a prefix cache since routers were last told."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.engine.kvcache.cache_listener import CacheListener
from kvrelay.types.block_keys import KEY_BYTES

# Changed hashes that are remembered. Beyond, routers get a new snapshot.
MOST_CHANGES = 2**16


@dataclass(frozen=True, slots=True)
class Changes:
    """Hashes that the cache holds now and did not hold before, or the other way round."""

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    # There were too many changes, and these are not all.
    overflow: bool = False


class ChangeJournal(CacheListener):
    """The net changes of the findable hashes, and the checksum of all of them.

    A record takes constant time and the journal is bounded, so it costs the same whether somebody
    reads it or not.
    """

    def __init__(self) -> None:
        # Whether the cache holds the hash now.
        self._changes: dict[bytes, bool] = {}
        self._overflow = False
        # XOR of the keys of all findable blocks.
        self.checksum = 0

    def __bool__(self) -> bool:
        return bool(self._changes) or self._overflow

    def named(self, hash: bytes) -> None:
        """Records that the cache holds a hash that it did not hold."""
        self._record(hash, True)

    def forgotten(self, hash: bytes) -> None:
        """Records that the cache does not hold a hash any more."""
        self._record(hash, False)

    def _record(self, hash: bytes, held: bool) -> None:
        self.checksum ^= int.from_bytes(hash[:KEY_BYTES], "little")
        # A hash that is stored and removed again stays in here: a snapshot that is being sent may
        # have passed its old block and not reached its new block.
        self._changes[hash] = held
        if len(self._changes) > MOST_CHANGES:
            del self._changes[hash]
            self._overflow = True

    def drain(self) -> Changes:
        """Returns the changes since the last call. Each hash is in there once, as it is now."""
        changes = Changes(
            tuple(hash for hash, held in self._changes.items() if held),
            tuple(hash for hash, held in self._changes.items() if not held),
            self._overflow,
        )
        self._changes.clear()
        self._overflow = False
        return changes
