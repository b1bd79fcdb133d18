"""The blocks whose KV comes into doubt while reads of a tier are under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Doubts:
    """Tells each read which blocks it may not use any more. Not thread-safe."""

    def __init__(self) -> None:
        # Identities by read.
        self._reads: dict[object, set[bytes]] = {}

    @contextmanager
    def meanwhile(self) -> Iterator[set[bytes]]:
        """Yields the identities that come into doubt until the context exits."""
        read = object()
        self._reads[read] = found = set[bytes]()
        try:
            yield found
        finally:
            del self._reads[read]

    def note(self, identity: bytes) -> None:
        """Tells the reads that are under way."""
        for found in self._reads.values():
            found.add(identity)
