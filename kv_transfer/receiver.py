"""The decode worker's end of a hand-off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc

from kv_transfer.block_writer import BlockWriter
from kv_transfer.blocks.arena import Arena
from kv_transfer.blocks.copy_threads import in_thread
from kv_transfer.frame_validator import FrameValidator
from kv_transfer.layout_check import LayoutCheck
from kv_transfer.lease import Lease, LeaseTable
from kv_transfer.prefetch import prefetch
from kv_transfer.push_call import ACCEPTED
from kv_transfer.receiver_transports import ReceiverTransports
from kv_transfer.transports import Inbound, memory
from kv_transfer.transports.vllm_nixl import VllmReads
from kvrelay.clock import Clock
from kvrelay.errors import (
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    KvRelayError,
    ResourceExhausted,
)
from kvrelay.protocol_version import ours
from kvrelay.security.capability import PushGrant, check_capability, make_capability, make_key
from kvrelay.types.kv_layout import KvLayout
from kvrelay.wire.status import abort
from kvrelay.wire.transfer import (
    Frame,
    KvBlocks,
    KvCommit,
    KvOpen,
    KvReceipt,
    frame_from_bytes,
    pb,
    receipt_to_proto,
)

OnCommit = Callable[[Lease, int, int], None]

# Pushes without an opening frame, which have not yet named a lease.
_MAX_UNOPENED = 256


@dataclass(frozen=True, slots=True)
class _Push:
    deadline: asyncio.Timeout
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Receiver:
    """Writes pushed KV to leased blocks only. Lives on the event loop that owns the lease table.

    Each frame is checked against its lease just before it is written. `on_commit(lease, first
    token, num tokens)` runs on the event loop once for a lease whose blocks have all arrived. The
    callback then owns the blocks. It must not raise.

    A push to a live lease ends with the lease; see `revoke`. Any other push may be silent for
    `timeout_s` seconds.
    """

    def __init__(
        self,
        arena: Arena,
        leases: LeaseTable,
        *,
        worker_id: str,
        model_id: str,
        layout_hash: str,
        sampled_model_id: str = "",
        on_commit: OnCommit,
        clock: Clock,
        digests: bool = True,
        host: str = "127.0.0.1",
        timeout_s: float = 10.0,
        vllm_reads: VllmReads | None = None,
    ) -> None:
        """vllm_reads: for a worker whose vLLM reads the KV of all hand-offs, after the commit."""
        self._arena = arena
        self._vllm_reads = vllm_reads
        self._leases = leases
        self._worker_id = worker_id
        self._key = make_key()
        self._layouts = LayoutCheck(arena.layout, layout_hash, model_id, sampled_model_id)
        self._on_commit = on_commit
        self._clock = clock
        self._digests = digests
        self._timeout_s = timeout_s
        self._unopened = 0
        self._transports = ReceiverTransports(
            arena.buffer.device, host, timeout_s, in_vllm=vllm_reads is not None
        )
        self._drop_dead_at = 0.0
        # Pushes under way, by lease id.
        self._pushes: dict[int, _Push] = {}
        memory.register_receiver(worker_id, leases.epoch)

    def capability(self, lease: Lease, sender: str) -> str:
        """The capability with which the worker `sender` can push to the lease. A push without it is
        rejected.
        """
        return make_capability(self._key, self._grant(lease, sender))

    def _grant(self, lease: Lease, sender: str) -> PushGrant:
        return PushGrant(
            *lease.key,
            sender=sender,
            receiver=self._worker_id,
            lease_id=lease.lease_id,
            epoch=self._leases.epoch,
            generation=lease.generation,
            num_blocks=len(lease.blocks),
            seconds=lease.seconds,
        )

    @property
    def under_way(self) -> int:
        """Number of pushes that are being received."""
        return len(self._pushes)

    def revoke(self, lease_id: int) -> None:
        """Ends the push to a lease that was closed or has expired, even if its sender is silent."""
        push = self._pushes.get(lease_id)
        if push is not None and not push.deadline.expired():
            push.deadline.reschedule(asyncio.get_running_loop().time())

    async def end(self, lease_id: int) -> None:
        """Closes a lease unless it is committed. After the return no push writes to its blocks."""
        self._leases.close(lease_id)
        self.revoke(lease_id)
        if lease_id in self._pushes:
            await self._pushes[lease_id].over.wait()

    def keep_house(self, now: float) -> None:
        """Gives back the memory of senders that have ended, once a second."""
        if now >= self._drop_dead_at:
            self._drop_dead_at = now + 1.0
            self._transports.drop_dead()

    async def close(self) -> None:
        """Ends all pushes. After the return no push writes to the arena."""
        for lease_id in list(self._pushes):
            await self.end(lease_id)

    async def Push(
        self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> pb.KvReceipt:
        """KvTransferService.Push; see `add_kv_transfer_servicer`."""
        frames = (frame_from_bytes(message) async for message in request_iterator)
        try:
            return receipt_to_proto(await self._receive(frames, context))
        except KvRelayError as error:
            await abort(context, error)

    async def _receive(
        self, frames: AsyncIterator[Frame], context: grpc.aio.ServicerContext
    ) -> KvReceipt:
        opening = await self._first_of(frames)
        ours().check(opening.protocol, opening.sender or "the sender")
        lease = self._find(opening)
        check_capability(self._key, self._grant(lease, opening.sender), opening.capability)
        if opening.adapter != lease.adapter:
            raise FailedPrecondition(
                f"the KV is computed with {_weights(opening.adapter)}, and the request needs "
                f"{_weights(lease.adapter)}"
            )
        theirs = self._layouts.layout_of(opening)
        if lease.lease_id in self._pushes:
            raise FailedPrecondition(f"another push to lease {lease.lease_id} is in progress")
        repeated = self._leases.is_committed(lease.lease_id)
        try:
            async with asyncio.timeout(self._timeout_s if repeated else None) as deadline:
                self._pushes[lease.lease_id] = _Push(deadline)
                return await self._receive_blocks(opening, theirs, frames, context)
        except TimeoutError:
            if repeated:
                raise DeadlineExceeded(
                    f"the commit was not repeated within {self._timeout_s:g} s"
                ) from None
            raise FailedPrecondition(f"lease {lease.lease_id} was closed during the push") from None
        finally:
            self._pushes.pop(lease.lease_id).over.set()

    async def _first_of(self, frames: AsyncIterator[Frame]) -> KvOpen:
        """Waits for the opening frame, unless too many pushes are waiting for theirs."""
        wait = self._timeout_s if self._unopened < _MAX_UNOPENED else 0
        self._unopened += 1
        try:
            async with asyncio.timeout(wait):
                opening = await anext(frames, None)
        except TimeoutError:
            if not wait:
                raise ResourceExhausted(
                    f"{_MAX_UNOPENED} pushes without a first frame are open; retry later",
                    retry_after_s=self._timeout_s,
                ) from None
            raise DeadlineExceeded(f"no open frame arrived within {wait:g} s") from None
        finally:
            self._unopened -= 1
        if not isinstance(opening, KvOpen):
            raise FailedPrecondition(
                f"the first frame of a push must be an open frame, not {type(opening).__name__}"
            )
        return opening

    async def _receive_blocks(
        self,
        opening: KvOpen,
        theirs: KvLayout,
        frames: AsyncIterator[Frame],
        context: grpc.aio.ServicerContext,
    ) -> KvReceipt:
        async with (
            self._transports.accept(opening, theirs) as inbound,
            aclosing(prefetch(frames)) as coming,
        ):
            await _say_taken(context)
            await in_thread(inbound.connect)
            lease = self._find(opening)
            validator = FrameValidator(lease, self._arena.layout, theirs)
            writer = BlockWriter(
                self._arena, lease, theirs, opening.digest if self._digests else None
            )
            async for frame in coming:
                match frame:
                    case KvBlocks():
                        validator.check(frame)
                        await self._write(opening, frame, inbound, writer)
                        validator.add(frame)
                    case KvCommit() if self._vllm_reads is not None:
                        return await self._commit_in_vllm(
                            opening, frame, validator, self._vllm_reads
                        )
                    case KvCommit():
                        return self._commit(opening, frame, validator)
                    case KvOpen():
                        raise FailedPrecondition(
                            "a push must have only one open frame, as its first frame"
                        )
            raise Cancelled("the sender ended the push without a commit")

    def _find(self, opening: KvOpen) -> Lease:
        """The current state of the lease; raises if it has ended in the meantime."""
        lease = self._leases.find(
            opening.lease_id, opening.epoch, opening.generation, self._clock.now()
        )
        if lease.key != (opening.request_id, opening.attempt):
            raise FailedPrecondition(f"lease {lease.lease_id} belongs to another request")
        return lease

    async def _write(
        self, opening: KvOpen, frame: KvBlocks, inbound: Inbound, writer: BlockWriter
    ) -> None:
        lease = self._find(opening)
        if self._leases.is_committed(lease.lease_id):
            return  # a repetition, of which the commit will tell

        def take() -> None:
            writer.write(inbound.source(frame), frame)

        self._leases.pin(lease.lease_id)
        try:
            await in_thread(take)
        finally:
            self._leases.unpin(lease.lease_id)

    def _commit(self, opening: KvOpen, commit: KvCommit, validator: FrameValidator) -> KvReceipt:
        lease = self._find(opening)
        if not self._leases.is_committed(lease.lease_id):
            if (commit.in_vllm is None) != (self._vllm_reads is None):
                raise DataLoss("the commit does not match the transport of the push")
            validator.check_complete(commit)
        if self._leases.commit(lease.lease_id, commit):
            self._on_commit(lease, commit.first_token, commit.num_tokens)
        return self._receipt(len(lease.writable))

    async def _commit_in_vllm(
        self, opening: KvOpen, commit: KvCommit, validator: FrameValidator, reads: VllmReads
    ) -> KvReceipt:
        """Commits, and gives the receipt when vLLM has the KV: until then, the sender counts the
        hand-off as running. A repeated commit gets its receipt at once.
        """
        lease = self._find(opening)
        if commit.in_vllm is None or self._leases.is_committed(lease.lease_id):
            return self._commit(opening, commit, validator)
        validator.check_complete(commit)
        reading = reads.expect(lease, commit.in_vllm)
        self._commit(opening, commit, validator)
        return self._receipt(await reading)

    def _receipt(self, blocks: int) -> KvReceipt:
        return KvReceipt(blocks, blocks * self._arena.layout.block_bytes)


async def _say_taken(context: grpc.aio.ServicerContext) -> None:
    """Tells the sender that its push is accepted. A cancelled caller waits until the message is
    sent.

    If gRPC is interrupted in the middle of the message, it cannot send a status either, and the
    sender would wait for one.
    """
    saying = asyncio.ensure_future(context.send_initial_metadata(ACCEPTED))
    try:
        await asyncio.shield(saying)
    except asyncio.CancelledError:
        await asyncio.wait({saying})
        raise


def _weights(adapter: str) -> str:
    return f"adapter {adapter[:40]!r}" if adapter else "the base model alone"
