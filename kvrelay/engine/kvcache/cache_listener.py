"""What a block pool tells of its named blocks."""

from __future__ import annotations


class CacheListener:
    """Hears of the pool's named blocks. A subclass overrides the events that it needs.

    Calls come in the order of the events, on the event loop that owns the pool, and must return at
    once.
    """

    def named(self, hash: bytes) -> None:
        """A lookup finds the hash from now on."""

    def forgotten(self, hash: bytes) -> None:
        """A lookup does not find the hash any more."""

    def cached(self, block: int) -> None:
        """No request holds the named block any more. Later calls are of blocks that are evicted
        later.
        """

    def withdrawn(self, block: int) -> None:
        """The KV of the named block is in doubt, wherever it is. `forgotten` follows."""
