"""Tells routers which blocks this worker's prefix cache holds."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from kvrelay.clock import Clock
from kvrelay.engine.kvcache.change_journal import ChangeJournal, Changes
from kvrelay.types.block_keys import MAX_KEYS, pack_keys
from kvrelay.worker.session import RouterSession
from kvrelay.worker_messages import CacheUpdate

# Longest time from a change of the cache to its update, in seconds.
FLUSH_S = 0.1
# Longest time without an update. The checksum in it shows a router that it has lost one.
BEAT_S = 0.5
# Pause between two parts of a snapshot, in which other tasks run.
PART_PAUSE_S = 0.002
# Events that may wait in a session. A router that is further behind gets a snapshot later instead
# of updates now.
MOST_PENDING = 256


class FindableBlocks(Protocol):
    """The blocks of a prefix cache. Each has a number below `num_blocks` while it is cached."""

    @property
    def num_blocks(self) -> int:
        """One more than the largest number."""

    @property
    def num_named(self) -> int:
        """How many blocks are cached."""

    @property
    def journal(self) -> ChangeJournal:
        """What has changed."""

    def hashes(self, start: int, end: int) -> list[bytes]:
        """Returns the hashes of the cached blocks with these numbers."""


@dataclass(slots=True)
class _Feed:
    """The updates to one router."""

    number: int = 0
    # First block number of the snapshot's next part; None if the router has the whole snapshot.
    next_block: int | None = 0
    told_at: float = 0.0


class CacheFeeds:
    """The updates to all routers that understand them. Lives on the event loop of the cache.

    A snapshot is sent in parts, by ranges of block numbers, with updates between them. Each part
    and each update says what is true when it is made, and a hash that changes after the first part
    is in a later update. So the router knows the cache after the last part.
    """

    def __init__(self, blocks: FindableBlocks, clock: Clock, part_blocks: int = MAX_KEYS) -> None:
        """`part_blocks`: blocks that one part of a snapshot covers, and most keys of an update."""
        self._blocks = blocks
        self._clock = clock
        self._part_blocks = part_blocks
        self._feeds: dict[RouterSession, _Feed] = {}
        self._opened = asyncio.Event()
        # Snapshots begun since the start.
        self.snapshots = 0

    def open(self, session: RouterSession) -> None:
        """Begins to tell a router. The first part of the snapshot is sent at once."""
        self._feeds[session] = _Feed()
        self._send_part(session)
        self._opened.set()

    def close(self, session: RouterSession) -> None:
        """Ends the updates to a router. Does nothing if there are none."""
        self._feeds.pop(session, None)

    def resync(self, session: RouterSession) -> None:
        """Begins a new snapshot for a router. Does nothing if it gets no updates."""
        if session in self._feeds:
            self._feeds[session].next_block = 0
            self._opened.set()

    def flush(self) -> None:
        """Tells all routers what has changed since the last call."""
        if not self._blocks.journal:
            return
        changes = self._blocks.journal.drain()
        for session, feed in self._feeds.items():
            if changes.overflow or session.pending > MOST_PENDING:
                feed.next_block = 0
            elif feed.next_block != 0:
                self._send_changes(session, feed, changes)

    async def run(self) -> None:
        """Sends updates and snapshots until cancelled."""
        while True:
            self._opened.clear()
            pause_s = self.step()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._opened.wait()

    def step(self) -> float:
        """Sends what is due. Returns the seconds until the next step."""
        self.flush()
        self._send_parts()
        return PART_PAUSE_S if self._behind() else FLUSH_S

    def _behind(self) -> bool:
        """Whether a router can take another part of its snapshot now."""
        return any(
            feed.next_block is not None and session.pending <= MOST_PENDING
            for session, feed in self._feeds.items()
        )

    def _send_parts(self) -> None:
        now = self._clock.now()
        for session, feed in self._feeds.items():
            if session.pending > MOST_PENDING:
                continue
            if feed.next_block is not None:
                self._send_part(session)
            elif now >= feed.told_at + BEAT_S:
                self._send(session, feed)

    def _send_part(self, session: RouterSession) -> None:
        feed = self._feeds[session]
        start = feed.next_block
        assert start is not None, "a part belongs to a snapshot"
        end = start + self._part_blocks
        self.snapshots += start == 0
        feed.next_block = end if end < self._blocks.num_blocks else None
        stored = pack_keys(self._blocks.hashes(start, end))
        self._send(session, feed, begins=start == 0, stored=stored)

    def _send_changes(self, session: RouterSession, feed: _Feed, changes: Changes) -> None:
        """Sends the changes in as many updates as they need. The checksum holds after the last."""
        stored, removed = changes.stored, changes.removed
        last = max(len(stored), len(removed)) - 1
        for start in range(0, last + 1, self._part_blocks):
            part = slice(start, start + self._part_blocks)
            self._send(
                session,
                feed,
                complete=part.stop > last,
                stored=pack_keys(stored[part]),
                removed=pack_keys(removed[part]),
            )

    def _send(
        self,
        session: RouterSession,
        feed: _Feed,
        *,
        begins: bool = False,
        complete: bool = True,
        stored: bytes = b"",
        removed: bytes = b"",
    ) -> None:
        feed.number += 1
        feed.told_at = self._clock.now()
        session.send(
            CacheUpdate(
                feed.number,
                begins=begins,
                complete=complete and feed.next_block is None,
                stored=stored,
                removed=removed,
                blocks=self._blocks.num_named,
                checksum=self._blocks.journal.checksum,
            )
        )
