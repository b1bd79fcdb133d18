"""A decode worker's leases of blocks. Pure: the time is an argument, in monotonic seconds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from kvrelay.errors import FailedPrecondition, NotFound

_REMEMBERED_COMMITS = 1024


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks promised to one hand-off. The leading `cached_blocks` already hold their KV and are
    never written.
    """

    lease_id: int
    generation: int
    # Request id, attempt.
    key: tuple[str, int]
    # Block numbers in the worker's arena.
    blocks: tuple[int, ...]
    cached_blocks: int
    # True if a commit may bring fewer blocks, a prefix of these.
    partial: bool = False
    # Duration of the grant in seconds, without renewals.
    seconds: float = 0.0
    # Hash of the files of the sequence's adapter; empty for the base model.
    adapter: str = ""
    # Tokens whose KV the blocks will hold; 0 if the commit says how many.
    num_tokens: int = 0

    @property
    def writable(self) -> tuple[int, ...]:
        """The blocks that a push may write."""
        return self.blocks[self.cached_blocks :]


@dataclass(slots=True)
class _Entry:
    lease: Lease
    expires_at: float
    pins: int = 0
    closed: bool = False


class LeaseTable:
    """The leases of one worker in one epoch.

        grant ──▶ live ──commit──▶ committed: the blocks are the sequence's from now on
                   │
                   └─close, expire──▶ closed ──no copy under way──▶ release: the blocks may be freed

    A lease is pinned while a copy into its blocks is under way. So the hand-off never writes to
    blocks that `release` has returned. Lease ids and generations only increase and are never
    reused.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        # Live and closed leases.
        self._entries: dict[int, _Entry] = {}
        # The latest commits, oldest first.
        self._committed: dict[int, tuple[Lease, Hashable]] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        """Number of leases whose blocks the table holds: live leases, and closed leases that are
        not released.
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
        adapter: str = "",
        num_tokens: int = 0,
    ) -> Lease:
        """Grants a lease on `blocks`, which the caller holds, for `seconds`. The table owns them
        until commit or release.
        """
        number = next(self._numbers)
        lease = Lease(
            lease_id=number,
            generation=number,
            key=key,
            blocks=tuple(blocks),
            cached_blocks=cached_blocks,
            partial=partial,
            seconds=seconds,
            adapter=adapter,
            num_tokens=num_tokens,
        )
        self._entries[lease.lease_id] = _Entry(lease, now + seconds)
        return lease

    def renew(self, lease_ids: Iterable[int], seconds: float, now: float) -> list[int]:
        """Extends live leases to `seconds` from now. Returns the ids that are no longer live; these
        are unchanged.
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
        """The live or committed lease with these numbers.

        Raises FailedPrecondition for a stale epoch or generation and for an ended lease, NotFound
        for an id that is unknown or was ended and released.
        """
        if epoch != self.epoch:
            raise FailedPrecondition(
                f"epoch {epoch} is not the current epoch {self.epoch} of this worker"
            )
        if lease_id in self._committed:
            lease = self._committed[lease_id][0]
        elif lease_id in self._entries:
            entry = self._entries[lease_id]
            lease = entry.lease
            if entry.closed or now >= entry.expires_at:
                raise FailedPrecondition(f"lease {lease_id} has ended")
        else:
            raise NotFound(
                f"lease {lease_id} does not exist in epoch {epoch}; it may have been released"
            )
        if generation != lease.generation:
            raise FailedPrecondition(
                f"generation {generation} of lease {lease_id} is not the current generation "
                f"{lease.generation}"
            )
        return lease

    def pin(self, lease_id: int) -> None:
        """A copy into the lease's blocks begins. `find` must just have returned the lease as
        live.
        """
        entry = self._entries[lease_id]
        assert not entry.closed, f"lease {lease_id} is closed"
        entry.pins += 1

    def unpin(self, lease_id: int) -> None:
        """A copy into the lease's blocks ends."""
        entry = self._entries[lease_id]
        assert entry.pins > 0, f"lease {lease_id} is not pinned"
        entry.pins -= 1

    def commit(self, lease_id: int, content: Hashable) -> bool:
        """Gives the blocks of a lease that `find` returned to its sequence. `content` is the
        sender's commit.

        Returns False if the lease was already committed with equal content. Raises
        FailedPrecondition if it was committed with other content.
        """
        if lease_id in self._committed:
            if self._committed[lease_id][1] != content:
                raise FailedPrecondition(
                    f"lease {lease_id} is already committed with other content"
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
        """True if the lease is among the latest commits."""
        return lease_id in self._committed

    def close(self, lease_id: int) -> None:
        """Ends a live lease. A committed, closed or unknown lease is unchanged."""
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
        """Removes and returns the closed leases without a running copy. The caller frees their
        blocks.
        """
        released = [
            entry.lease for entry in self._entries.values() if entry.closed and not entry.pins
        ]
        for lease in released:
            del self._entries[lease.lease_id]
        return released

    def check_integrity(self) -> None:
        """Asserts that no writable block of a lease belongs to another lease."""
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
