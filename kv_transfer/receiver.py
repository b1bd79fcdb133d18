"""The decode worker's end of a hand-off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import xxhash

from kv_transfer.arena import Arena
from kv_transfer.lease import Lease, LeaseTable
from kv_transfer.threads import in_thread
from kv_transfer.transports import Inbound, memory
from kv_transfer.transports.grpc import GrpcInbound
from kv_transfer.transports.shm import SegmentCache
from kvrelay.clock import Clock
from kvrelay.errors import Cancelled, DataLoss, FailedPrecondition, KvRelayError, Unimplemented
from kvrelay.wire.status import abort
from kvrelay.wire.transfer import (
    Frame,
    KvBlocks,
    KvCommit,
    KvOpen,
    KvReceipt,
    KvTransferServiceServicer,
    SharedSegment,
    frame_from_proto,
    pb,
    receipt_to_proto,
)

OnCommit = Callable[[Lease, int, int], None]


@dataclass(slots=True)
class _Arrived:
    """What a push has brought so far."""

    blocks: set[int] = field(default_factory=set)  # indices into the lease's blocks
    frames: int = 0
    digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)


class Receiver(KvTransferServiceServicer):
    """Writes pushed KV to leased blocks, and to no others. Lives on the event loop that owns the lease table.

    Each frame is checked against its lease when it is about to be written. `on_commit(lease, first token,
    num tokens)` runs on the event loop once for a lease whose blocks are all there; from then on they are
    the caller's. It must not raise.
    """

    def __init__(
        self,
        arena: Arena,
        leases: LeaseTable,
        *,
        worker_id: str,
        layout_hash: str,
        on_commit: OnCommit,
        clock: Clock,
        digests: bool = True,
    ) -> None:
        self._arena = arena
        self._leases = leases
        self._layout_hash = layout_hash
        self._on_commit = on_commit
        self._clock = clock
        self._digests = digests
        self._segments = SegmentCache()
        self._pushes: dict[int, asyncio.Timeout] = {}  # under way, by lease id
        memory.register_receiver(worker_id, leases.epoch)

    def revoke(self, lease_id: int) -> None:
        """Ends the push to a lease that was closed or has expired, even if its sender is silent."""
        if lease_id in self._pushes:
            self._pushes[lease_id].reschedule(asyncio.get_running_loop().time())

    async def Push(
        self, request_iterator: AsyncIterator[pb.KvFrame], context: grpc.aio.ServicerContext
    ) -> pb.KvReceipt:
        frames = (frame_from_proto(message) async for message in request_iterator)
        try:
            return receipt_to_proto(await self._receive(frames))
        except KvRelayError as error:
            await abort(context, error)

    async def _receive(self, frames: AsyncIterator[Frame]) -> KvReceipt:
        opening = await anext(frames, None)
        if not isinstance(opening, KvOpen):
            raise FailedPrecondition(f"a push begins with an open frame, not with {type(opening).__name__}")
        if opening.layout_hash != self._layout_hash:
            raise FailedPrecondition(f"KV layout {opening.layout_hash} of the sender is not mine, {self._layout_hash}")
        lease = self._find(opening)
        if lease.lease_id in self._pushes:
            raise FailedPrecondition(f"another push to lease {lease.lease_id} is under way")
        try:
            async with asyncio.timeout(None) as revoked:
                self._pushes[lease.lease_id] = revoked
                return await self._receive_blocks(opening, frames)
        except TimeoutError:
            raise FailedPrecondition(f"lease {lease.lease_id} was closed during the push") from None
        finally:
            del self._pushes[lease.lease_id]

    async def _receive_blocks(self, opening: KvOpen, frames: AsyncIterator[Frame]) -> KvReceipt:
        with self._inbound(opening) as inbound:
            arrived = _Arrived()
            async for frame in frames:
                match frame:
                    case KvBlocks():
                        await self._write(opening, frame, inbound, arrived)
                    case KvCommit():
                        return self._commit(opening, frame, arrived)
                    case KvOpen():
                        raise FailedPrecondition("a push has one open frame, its first")
            raise Cancelled("the sender ended the push without a commit")

    def _find(self, opening: KvOpen) -> Lease:
        """The lease as of now; raises when it has ended since the last look."""
        lease = self._leases.find(opening.lease_id, opening.epoch, opening.generation, self._clock.now())
        if lease.key != (opening.request_id, opening.attempt):
            raise FailedPrecondition(f"lease {lease.lease_id} is for another request")
        return lease

    @contextmanager
    def _inbound(self, opening: KvOpen) -> Iterator[Inbound]:
        """For one push. Left without an exception, its connections are used again."""
        match opening.transport, opening.segment:
            case "grpc", _:
                yield GrpcInbound(self._arena, digests=self._digests)
            case "memory", SharedSegment() as segment:
                yield memory.accept(segment, self._arena, digests=self._digests)
            case "shm", SharedSegment() as segment:
                yield self._segments.accept(segment, self._arena, digests=self._digests)
            case transport, _:
                raise Unimplemented(f"transport {transport!r} is not one that this worker takes")

    async def _write(self, opening: KvOpen, frame: KvBlocks, inbound: Inbound, arrived: _Arrived) -> None:
        lease = self._find(opening)
        indices = range(frame.first, frame.first + frame.count)
        if frame.sequence != arrived.frames:
            raise DataLoss(f"frame {frame.sequence} came where frame {arrived.frames} was due")
        if frame.count < 1 or frame.first < lease.cached_blocks or indices.stop > len(lease.blocks):
            raise DataLoss(
                f"frame {frame.sequence} brings blocks {frame.first} to {indices.stop - 1}, "
                f"the lease takes {lease.cached_blocks} to {len(lease.blocks) - 1}"
            )
        if not arrived.blocks.isdisjoint(indices):
            raise DataLoss(f"frame {frame.sequence} brings blocks that were there before")
        if frame.num_bytes != frame.count * self._arena.layout.block_bytes:
            raise DataLoss(f"frame {frame.sequence} has {frame.num_bytes} bytes for {frame.count} blocks")
        if not self._leases.is_committed(lease.lease_id):  # else a repetition, of which only the commit counts
            self._leases.pin(lease.lease_id)
            try:
                await in_thread(inbound.unpack, frame, lease.blocks[frame.first : indices.stop])
            finally:
                self._leases.unpin(lease.lease_id)
        arrived.blocks.update(indices)
        arrived.frames += 1
        arrived.digest.update(frame.digest.to_bytes(8, "little"))

    def _commit(self, opening: KvOpen, commit: KvCommit, arrived: _Arrived) -> KvReceipt:
        lease = self._find(opening)
        if not self._leases.is_committed(lease.lease_id):
            self._check_complete(lease, commit, arrived)
        if self._leases.commit(lease.lease_id, commit):
            self._on_commit(lease, commit.first_token, commit.num_tokens)
        blocks = len(lease.writable)
        return KvReceipt(blocks, blocks * self._arena.layout.block_bytes)

    def _check_complete(self, lease: Lease, commit: KvCommit, arrived: _Arrived) -> None:
        if missing := len(lease.writable) - len(arrived.blocks):
            raise DataLoss(f"{missing} of {len(lease.writable)} blocks are missing at the commit")
        if commit.frames != arrived.frames or commit.digest != arrived.digest.intdigest():
            raise DataLoss(f"the commit is of {commit.frames} frames, other ones than the {arrived.frames} that came")
        if self._arena.layout.blocks_for(commit.num_tokens) != len(lease.blocks) or commit.first_token < 0:
            raise DataLoss(f"{commit.num_tokens} tokens do not fill the lease's {len(lease.blocks)} blocks")
