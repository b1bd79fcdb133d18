"""The decode worker's end of a hand-off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import grpc

from kv_transfer.arena import Arena
from kv_transfer.arrivals import Arrivals
from kv_transfer.lease import Lease, LeaseTable
from kv_transfer.threads import in_thread
from kv_transfer.transports import Inbound, memory
from kv_transfer.transports.group import ReceiverGroups
from kv_transfer.transports.grpc import GrpcInbound
from kv_transfer.transports.shm import SegmentCache
from kvrelay.clock import Clock
from kvrelay.errors import Cancelled, FailedPrecondition, KvRelayError, Unimplemented
from kvrelay.wire.status import abort
from kvrelay.wire.transfer import (
    Frame,
    KvBlocks,
    KvCommit,
    KvOpen,
    KvReceipt,
    KvTransferServiceServicer,
    frame_from_proto,
    pb,
    receipt_to_proto,
)

OnCommit = Callable[[Lease, int, int], None]


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
        host: str = "127.0.0.1",
        patience: float = 10.0,
    ) -> None:
        self._arena = arena
        self._leases = leases
        self._layout_hash = layout_hash
        self._on_commit = on_commit
        self._clock = clock
        self._digests = digests
        self._segments = SegmentCache()
        self._groups = ReceiverGroups(host, patience)
        self._pushes: dict[int, asyncio.Timeout] = {}  # under way, by lease id
        memory.register_receiver(worker_id, leases.epoch)

    @property
    def under_way(self) -> int:
        """Pushes that are being received."""
        return len(self._pushes)

    def revoke(self, lease_id: int) -> None:
        """Ends the push to a lease that was closed or has expired, even if its sender is silent."""
        push = self._pushes.get(lease_id)
        if push is not None and not push.expired():
            push.reschedule(asyncio.get_running_loop().time())

    async def Push(
        self, request_iterator: AsyncIterator[pb.KvFrame], context: grpc.aio.ServicerContext
    ) -> pb.KvReceipt:
        frames = (frame_from_proto(message) async for message in request_iterator)
        try:
            return receipt_to_proto(await self._receive(frames, context))
        except KvRelayError as error:
            await abort(context, error)

    async def _receive(self, frames: AsyncIterator[Frame], context: grpc.aio.ServicerContext) -> KvReceipt:
        opening = await anext(frames, None)
        if not isinstance(opening, KvOpen):
            raise FailedPrecondition(f"a push begins with an open frame, not with {type(opening).__name__}")
        if opening.layout_hash != self._layout_hash:
            raise FailedPrecondition(
                f"KV layout {opening.layout_hash} of the sender is not mine, {self._layout_hash}; both workers need "
                "the same model, kv.dtype and kv.block_size, and native kernels or none"
            )
        lease = self._find(opening)
        if lease.lease_id in self._pushes:
            raise FailedPrecondition(f"another push to lease {lease.lease_id} is under way")
        try:
            async with asyncio.timeout(None) as revoked:
                self._pushes[lease.lease_id] = revoked
                return await self._receive_blocks(opening, frames, context)
        except TimeoutError:
            raise FailedPrecondition(f"lease {lease.lease_id} was closed during the push") from None
        finally:
            del self._pushes[lease.lease_id]

    async def _receive_blocks(
        self, opening: KvOpen, frames: AsyncIterator[Frame], context: grpc.aio.ServicerContext
    ) -> KvReceipt:
        with self._inbound(opening) as inbound:
            await context.send_initial_metadata(())  # says to the sender that its push is taken
            await in_thread(inbound.connect)
            arrivals = Arrivals(self._find(opening), self._arena.layout)
            async for frame in frames:
                match frame:
                    case KvBlocks():
                        await self._write(opening, frame, inbound, arrivals)
                    case KvCommit():
                        return self._commit(opening, frame, arrivals)
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
        match opening.transport:
            case "grpc":
                yield GrpcInbound(self._arena, digests=self._digests)
            case "memory" if opening.segment is not None:
                yield memory.accept(opening.segment, self._arena, digests=self._digests)
            case "shm" if opening.segment is not None:
                with self._segments.lend(opening.segment, self._arena, digests=self._digests) as mapped:
                    yield mapped
            case "gloo" | "nccl" as backend:
                with self._groups.lend(backend, opening.rendezvous, self._arena, digests=self._digests) as joined:
                    yield joined
            case transport:
                raise Unimplemented(f"transport {transport!r} is not one that this worker takes")

    async def _write(self, opening: KvOpen, frame: KvBlocks, inbound: Inbound, arrivals: Arrivals) -> None:
        lease = self._find(opening)
        blocks = arrivals.check(frame)
        if not self._leases.is_committed(lease.lease_id):  # else this is a repetition, of which the commit will tell
            self._leases.pin(lease.lease_id)
            try:
                await in_thread(inbound.unpack, frame, blocks)
            finally:
                self._leases.unpin(lease.lease_id)
        arrivals.add(frame)

    def _commit(self, opening: KvOpen, commit: KvCommit, arrivals: Arrivals) -> KvReceipt:
        lease = self._find(opening)
        if not self._leases.is_committed(lease.lease_id):
            arrivals.check_complete(commit)
        if self._leases.commit(lease.lease_id, commit):
            self._on_commit(lease, commit.first_token, commit.num_tokens)
        blocks = len(lease.writable)
        return KvReceipt(blocks, blocks * self._arena.layout.block_bytes)
