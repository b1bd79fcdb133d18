"""A decode worker's promises of blocks. Pure: the time is an argument, in monotonic seconds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from kvrelay.errors import FailedPrecondition, NotFound

_REMEMBERED_COMMITS = 1024


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks promised to one hand-off. The leading `cached_blocks` hold their KV already and are
    never written.
    """

    lease_id: int
    generation: int
    key: tuple[str, int]  # request id, attempt
    blocks: tuple[int, ...]  # block numbers in the worker's arena
    cached_blocks: int
    partial: bool = False  # a commit may bring fewer blocks than these, from the first on
    seconds: float = 0.0  # that it was granted for; renewals come on top

    @property
    def writable(self) -> tuple[int, ...]:
        return self.blocks[self.cached_blocks :]


@dataclass(slots=True)
class _Entry:
    lease: Lease
    expires_at: float
    pins: int = 0
    closed: bool = False


class LeaseTable:
    """The leases of one worker in one incarnation, its epoch.

        grant ──▶ live ──commit──▶ committed: the blocks are the sequence's from now on
                   │
                   └─close, expire──▶ closed ──no copy under way──▶ release: the blocks may be freed

    A lease is pinned while a copy into its blocks is under way. So blocks that `release` returns
    are never written to by the hand-off they were leased for. Lease ids and generations only go up;
    neither comes twice.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._entries: dict[int, _Entry] = {}  # live and closed
        self._committed: dict[int, tuple[Lease, Hashable]] = {}  # the latest ones, oldest first
        self._numbers = count(1)

    def __len__(self) -> int:
        """Leases whose blocks the table holds: live ones, and closed ones that were not
        released.
        """
        return len(self._entries)

    def __iter__(self) -> Iterator[Lease]:
        return (entry.lease for entry in self._entries.values())

    def grant(
        self,
        key: tuple[str, int],
        blocks: Sequence[int],
        cached_blocks: int,
        seconds: float,
        now: float,
        *,
        partial: bool = False,
    ) -> Lease:
        """Takes over `blocks`, which the caller holds, until commit or release."""
        number = next(self._numbers)
        lease = Lease(number, number, key, tuple(blocks), cached_blocks, partial, seconds)
        self._entries[lease.lease_id] = _Entry(lease, now + seconds)
        return lease

    def renew(self, lease_ids: Iterable[int], seconds: float, now: float) -> list[int]:
        """Lets live leases end `seconds` from now; returns the ids that are live no more, which
        stay so.
        """
        gone = []
        for lease_id in lease_ids:
            entry = self._entries.get(lease_id)
            if entry is None or entry.closed or now >= entry.expires_at:
                gone.append(lease_id)
            else:
                entry.expires_at = now + seconds
        return gone

    def find(self, lease_id: int, epoch: int, generation: int, now: float) -> Lease:
        """The live or committed lease of these numbers.

        Raises FailedPrecondition for a stale epoch or generation and for an ended lease, NotFound
        for an id that was never granted or is long gone.
        """
        if epoch != self.epoch:
            raise FailedPrecondition(f"epoch {epoch} is not this worker's, which is {self.epoch}")
        if lease_id in self._committed:
            lease = self._committed[lease_id][0]
        elif lease_id in self._entries:
            entry = self._entries[lease_id]
            lease = entry.lease
            if entry.closed or now >= entry.expires_at:
                raise FailedPrecondition(f"lease {lease_id} has ended")
        else:
            raise NotFound(f"lease {lease_id} is unknown in epoch {epoch}, or ended and released")
        if generation != lease.generation:
            raise FailedPrecondition(
                f"generation {generation} of lease {lease_id} is not the current {lease.generation}"
            )
        return lease

    def pin(self, lease_id: int) -> None:
        """A copy into the lease's blocks begins. The lease is live, as `find` said just now."""
        entry = self._entries[lease_id]
        assert not entry.closed, f"lease {lease_id} is closed"
        entry.pins += 1

    def unpin(self, lease_id: int) -> None:
        entry = self._entries[lease_id]
        assert entry.pins > 0, f"lease {lease_id} is not pinned"
        entry.pins -= 1

    def commit(self, lease_id: int, content: Hashable) -> bool:
        """Gives the blocks of a lease that `find` returned to its sequence; `content` is what was
        committed.

        False if that was done before with equal content; FailedPrecondition if with other content.
        """
        if lease_id in self._committed:
            if self._committed[lease_id][1] != content:
                raise FailedPrecondition(
                    f"lease {lease_id} was committed before with other content"
                )
            return False
        entry = self._entries[lease_id]
        assert not entry.closed, f"lease {lease_id} is closed"
        assert entry.pins == 0, f"a copy into lease {lease_id} is under way"
        del self._entries[lease_id]
        self._committed[lease_id] = entry.lease, content
        if len(self._committed) > _REMEMBERED_COMMITS:
            del self._committed[next(iter(self._committed))]
        return True

    def is_committed(self, lease_id: int) -> bool:
        return lease_id in self._committed

    def close(self, lease_id: int) -> None:
        """Ends a live lease. One that is committed, closed or unknown stays as it is."""
        entry = self._entries.get(lease_id)
        if entry is not None:
            entry.closed = True

    def expire(self, now: float) -> list[Lease]:
        """Closes the leases whose time is over, and returns them."""
        expired = [
            entry
            for entry in self._entries.values()
            if not entry.closed and now >= entry.expires_at
        ]
        for entry in expired:
            entry.closed = True
        return [entry.lease for entry in expired]

    def release(self) -> list[Lease]:
        """Forgets the closed leases that no copy is under way to; the caller frees their blocks."""
        released = [
            entry.lease for entry in self._entries.values() if entry.closed and not entry.pins
        ]
        for lease in released:
            del self._entries[lease.lease_id]
        return released

    def check_integrity(self) -> None:
        """No block that a lease may be written to belongs to another lease."""
        owners: dict[int, int] = {}
        for lease in self:
            for block in lease.writable:
                other = owners.setdefault(block, lease.lease_id)
                assert other == lease.lease_id, (
                    f"block {block} is in leases {other} and {lease.lease_id}"
                )
        for lease in self:
            for block in lease.blocks[: lease.cached_blocks]:
                assert block not in owners, (
                    f"cached block {block} of lease {lease.lease_id} is written to"
                )
