"""The prefill worker's end of a hand-off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import NamedTuple

import xxhash

from kv_transfer.arena import Arena
from kv_transfer.call import PushCall
from kv_transfer.channels import Channels, blocks_per_frame
from kv_transfer.choice import choose_transport
from kv_transfer.threads import in_thread
from kv_transfer.transports import Outbound, memory
from kv_transfer.transports.group import SenderGroups
from kv_transfer.transports.grpc import GrpcOutbound
from kv_transfer.transports.named import NamedOutbound
from kvrelay.clock import Clock
from kvrelay.errors import Internal, KvRelayError, Unavailable, Unimplemented
from kvrelay.messages import HandoffTarget
from kvrelay.telemetry import get_logger
from kvrelay.types import Handoff
from kvrelay.wire.transfer import (
    Frame,
    KvBlocks,
    KvCommit,
    KvOpen,
    KvReceipt,
)

log = get_logger(__name__)


class Sender:
    """Pushes KV from one arena to any number of decode workers. Lives on one event loop.

    A peer that takes no bytes for `patience` seconds, or owes a receipt for as long, counts as gone.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        host_id: str,
        layout_hash: str,
        clock: Clock,
        digests: bool = True,
        host: str = "127.0.0.1",
        patience: float = 10.0,
    ) -> None:
        self.arena = arena
        self.host_id = host_id
        self.layout_hash = layout_hash
        self.clock = clock
        self.digests = digests
        self.patience = patience
        self.channels = Channels(arena.layout)
        self._groups = SenderGroups(host, patience)
        memory.register_sender(arena)

    def open(self, key: tuple[str, int], target: HandoffTarget) -> Push:
        """Begins a push, without waiting for the peer. Raises Unimplemented for a transport that cannot work."""
        transport, why = choose_transport(
            target.transport,
            same_process=memory.is_local(target.worker_id, target.epoch),
            same_host=target.host_id == self.host_id,
            device=self.arena.buffer.device.type,
        )
        return Push(self, key, target, transport, why)

    @contextmanager
    def outbound(self, transport: str, target: HandoffTarget) -> Iterator[Outbound]:
        """For one push. Left without an exception, its connections are used again."""
        match transport:
            case "memory" | "shm":
                yield NamedOutbound(self.arena, digests=self.digests)
            case "gloo" | "nccl":
                with self._groups.lend(transport, target, self.arena, digests=self.digests) as outbound:
                    yield outbound
            case _:
                yield GrpcOutbound(self.arena, digests=self.digests)

    async def close(self) -> None:
        """Ends the connections; pushes that are under way fail."""
        await self.channels.close()
        self._groups.close()


class Run(NamedTuple):
    """Blocks of the sender's arena that become the lease's blocks `first`, `first` + 1, ..."""

    first: int
    blocks: Sequence[int]


class Push:
    """One request's KV on its way. Ends with `commit` or `abort`; until one of these has returned, the blocks
    that were given to `send` must stay as they are.

    `error` says why the push has failed, as soon as it has. `transport` is how the bytes travel, `why` for what
    reason. `bytes_packed` counts the KV bytes that were made into frames.
    """

    def __init__(self, sender: Sender, key: tuple[str, int], target: HandoffTarget, transport: str, why: str) -> None:
        self.transport = transport
        self.why = why
        self.error: KvRelayError | None = None
        self.bytes_packed = 0
        self._sender = sender
        self._key = key
        self._target = target
        self._runs: list[Run] = []
        self._first_sent_at: float | None = None
        self._ending: tuple[int, int] | None = None  # first token, num tokens
        self._aborted = False
        self._news = asyncio.Event()  # a run, the ending, an abort, or the end of the call
        self._commit_frame: KvCommit | None = None  # once the peer may have it
        self._current: PushCall | None = None
        self._receipt: KvReceipt | None = None
        self._task = asyncio.create_task(self._push())

    def send(self, first: int, blocks: Sequence[int]) -> None:
        """Queues blocks whose KV is complete, to become the lease's blocks `first`, `first` + 1, ..."""
        assert self._ending is None, "no blocks after the commit"
        if blocks:
            if self._first_sent_at is None:
                self._first_sent_at = self._sender.clock.now()
            self._runs.append(Run(first, tuple(blocks)))
            self._news.set()

    async def commit(self, first_token: int, num_tokens: int, prefill_done_at: float) -> Handoff:
        """Waits until all blocks are with the decode worker and the request has become its own.

        `prefill_done_at` is a time of the sender's clock. Raises what the push failed of: after Unavailable
        nobody knows whether the decode worker has taken over, after any other error it has not.
        """
        assert self._ending is None, "a push is committed once"
        self._ending = first_token, num_tokens
        self._news.set()
        await asyncio.shield(self._task)
        if self._receipt is None:
            assert self.error is not None, "a push ends with a receipt or an error"
            raise self.error
        now = self._sender.clock.now()
        return Handoff(
            transport=self.transport,
            blocks=self._receipt.blocks,
            block_bytes=self._sender.arena.layout.block_bytes,
            bytes=self._receipt.bytes,
            cached_blocks=self._target.cached_blocks,
            seconds=now - (prefill_done_at if self._first_sent_at is None else self._first_sent_at),
            exposed_seconds=now - prefill_done_at,
            why=self.why,
        )

    async def abort(self) -> None:
        """Breaks off; returns once neither side reads the blocks any more. A push that is over stays as it is."""
        self._aborted = True
        self._news.set()
        await asyncio.shield(self._task)

    async def _push(self) -> None:
        try:
            self._receipt = await self._hand_over_or_ask_again()
        except KvRelayError as error:
            self.error = error
        except Exception as error:  # whatever it is, it is this push's alone and has to be told
            log.exception("push failed", request=self._key[0], worker=self._target.worker_id)
            self.error = Internal(f"the push broke off: {error}")

    async def _hand_over_or_ask_again(self) -> KvReceipt:
        try:
            return await self._hand_over_or_fall_back()
        except Unavailable:
            if self._commit_frame is not None:
                # The answer may be what was lost: a decode worker that has committed gives it again.
                with suppress(KvRelayError):
                    return await self._call(self._opening("grpc"), _only(self._commit_frame))
            raise

    async def _hand_over_or_fall_back(self) -> KvReceipt:
        try:
            return await self._hand_over()
        except Unimplemented as error:
            if self._target.transport != "auto" or self.transport == "grpc":
                raise
            self.why = f"{self.transport} failed: {error.message}"
            self.transport = "grpc"
            return await self._hand_over()

    async def _hand_over(self) -> KvReceipt:
        with self._sender.outbound(self.transport, self._target) as outbound:
            opening = outbound.announce(self._opening(self.transport))
            return await self._call(opening, self._frames(outbound))

    async def _call(self, opening: KvOpen, frames: AsyncGenerator[Frame, None]) -> KvReceipt:
        """One call with these frames; fewer, if the peer ends it before."""
        channels, address = self._sender.channels, self._target.address
        channel = channels.get(address)
        call = PushCall(channel, address, self._sender.patience)
        call.when_over(self._news.set)
        self._current = call
        try:
            await call.open(opening)
            async with aclosing(frames):
                async for frame in frames:
                    await call.write(frame)
            return await call.receipt()
        except Unavailable:
            channels.retire(address, channel, self._sender.patience)
            if call.is_over:
                await call.receipt()  # what the peer says comes before what was noticed here
            raise
        finally:
            await call.close()

    async def _frames(self, outbound: Outbound) -> AsyncGenerator[Frame, None]:
        """The push from its first blocks to its commit, as far as it gets."""
        self.bytes_packed = 0
        if not self._refused:
            await in_thread(outbound.connect)  # even if aborted, since the receiver is connecting too
        block_bytes = self._sender.arena.layout.block_bytes
        count = 0
        digest = xxhash.xxh3_64()
        async for first, blocks in self._cut_runs():
            header = KvBlocks(sequence=count, first=first, count=len(blocks), num_bytes=len(blocks) * block_bytes)
            frame = await in_thread(outbound.pack, header, blocks)
            count += 1
            digest.update(frame.digest.to_bytes(8, "little"))
            self.bytes_packed += frame.num_bytes
            yield frame
        if self._ending is not None and not self._stopped:
            first_token, num_tokens = self._ending
            self._commit_frame = KvCommit(count, digest.intdigest(), first_token, num_tokens)
            yield self._commit_frame

    async def _cut_runs(self) -> AsyncGenerator[Run, None]:
        """The runs as they are sent, none longer than fits a frame."""
        size = blocks_per_frame(self._sender.arena.layout)
        next_run = 0
        while not self._stopped:
            if next_run < len(self._runs):
                first, blocks = self._runs[next_run]
                next_run += 1
                for start in range(0, len(blocks), size):
                    if not self._stopped:
                        yield Run(first + start, blocks[start : start + size])
            elif self._ending is None:
                self._news.clear()
                await self._news.wait()
            else:
                return

    @property
    def _refused(self) -> bool:
        return self._current is not None and self._current.is_over

    @property
    def _stopped(self) -> bool:
        return self._aborted or self._refused

    def _opening(self, transport: str) -> KvOpen:
        request_id, attempt = self._key
        target = self._target
        return KvOpen(
            request_id=request_id,
            attempt=attempt,
            lease_id=target.lease_id,
            epoch=target.epoch,
            generation=target.generation,
            layout_hash=self._sender.layout_hash,
            transport=transport,
        )


async def _only(frame: Frame) -> AsyncGenerator[Frame, None]:
    yield frame
