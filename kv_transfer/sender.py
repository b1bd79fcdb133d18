"""The prefill worker's end of a hand-off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import NamedTuple

import xxhash

from kv_transfer.arena import Arena, device_of
from kv_transfer.call import PushCall
from kv_transfer.channels import Channels
from kv_transfer.copy_threads import in_thread
from kv_transfer.plan import Layers, Places
from kv_transfer.transport_selection import choose_transport
from kv_transfer.transports import Outbound, memory
from kv_transfer.transports.cuda_ipc import CudaIpcOutbound
from kv_transfer.transports.group import SenderGroups
from kv_transfer.transports.grpc import GrpcOutbound
from kv_transfer.transports.named import NamedOutbound
from kv_transfer.transports.nixl import NixlOutbound, ServedArena
from kvrelay.clock import Clock
from kvrelay.errors import Internal, KvRelayError, Unavailable, Unimplemented
from kvrelay.messages import HandoffTarget
from kvrelay.process.telemetry import get_logger
from kvrelay.protocol import Protocol, ours
from kvrelay.security.credentials import Credentials
from kvrelay.types import Handoff
from kvrelay.wire.transfer import (
    KvBlocks,
    KvCommit,
    KvOpen,
    KvReceipt,
    commit_digest,
    frame_to_bytes,
)

log = get_logger(__name__)


class Sender:
    """Pushes KV from one arena to any number of decode workers. Lives on one event loop.

    A peer that takes no bytes or sends no receipt for `timeout_s` seconds counts as gone.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        worker_id: str,
        host_id: str,
        model_id: str,
        layout_hash: str,
        sampled_model_id: str = "",
        clock: Clock,
        digests: bool = True,
        host: str = "127.0.0.1",
        timeout_s: float = 10.0,
        credentials: Credentials | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.arena = arena
        self.host_id = host_id
        self.model_id = model_id
        # The model's id for a receiver of protocol 0.
        self.sampled_model_id = sampled_model_id
        self.layout_hash = layout_hash
        self.clock = clock
        self.digests = digests
        self.timeout_s = timeout_s
        self._credentials = credentials
        self.channels = Channels(arena.layout, credentials)
        self._groups = SenderGroups(host, timeout_s)
        self._served = ServedArena(arena, host)
        memory.register_sender(arena)

    def open(self, key: tuple[str, int], target: HandoffTarget) -> Push:
        """Starts a push without waiting for the peer. Raises Unimplemented for a transport that
        cannot work.
        """
        transport, why = choose_transport(
            target.transport,
            same_process=memory.is_local(target.worker_id, target.epoch),
            same_host=target.host_id == self.host_id,
            device=device_of(self.arena),
            target_device=target.device,
            tls=self._credentials is not None,
        )
        return Push(self, key, target, transport, why)

    @contextmanager
    def outbound(self, transport: str, target: HandoffTarget) -> Iterator[Outbound]:
        """The sending half for one push. After an exit without an exception, its connections are
        reused.
        """
        match transport:
            case "memory" | "shm":
                yield NamedOutbound(self.arena, digests=self.digests)
            case "nixl":
                yield NixlOutbound(self._served, self.arena, digests=self.digests)
            case "cuda_ipc":
                yield CudaIpcOutbound(self.arena, digests=self.digests)
            case "gloo" | "nccl":
                with self._groups.lend(
                    transport, target, self.arena, digests=self.digests
                ) as outbound:
                    yield outbound
            case _:
                yield GrpcOutbound(self.arena, digests=self.digests)

    async def close(self) -> None:
        """Closes the connections. Running pushes fail."""
        await self.channels.close()
        self._groups.close()
        self._served.close()


class Run(NamedTuple):
    """Some layers of blocks of the sender's arena, which are the sequence's blocks `first`, `first`
    + 1, ...
    """

    first: int
    blocks: Sequence[int]
    layers: Layers


class Push:
    """The transfer of one request's KV. Ends with `commit` or `abort`. Until one of these has
    returned, the blocks given to `send` must not change.

    `error` is set as soon as the push has failed. `transport` names the transport and `why` the
    reason for it. `bytes_packed` counts the KV bytes in frames.
    """

    def __init__(
        self, sender: Sender, key: tuple[str, int], target: HandoffTarget, transport: str, why: str
    ) -> None:
        self.transport = transport
        self.why = why
        self.error: KvRelayError | None = None
        self.bytes_packed = 0
        self._sender = sender
        self._key = key
        self._target = target
        self._runs: list[Run] = []
        self._first_sent_at: float | None = None
        # First token, number of tokens.
        self._ending: tuple[int, int] | None = None
        self._aborted = False
        self._taken = asyncio.Event()
        # Set by a run, the ending, an abort, or the end of the call.
        self._news = asyncio.Event()
        # Set once the peer may have the frame.
        self._commit_frame: KvCommit | None = None
        self._current: PushCall | None = None
        self._receipt: KvReceipt | None = None
        self._task = asyncio.create_task(self._push())

    def send(self, first: int, blocks: Sequence[int], layers: Layers | None = None) -> None:
        """Queues the sequence's blocks `first`, `first` + 1, ..., whose KV is complete in these
        layers, or in all.
        """
        assert self._ending is None, "no blocks after the commit"
        if blocks:
            if self._first_sent_at is None:
                self._first_sent_at = self._sender.clock.now()
            layers = layers or Layers(0, len(self._sender.arena.layout.layers))
            self._runs.append(Run(first, tuple(blocks), layers))
            self._news.set()

    async def opened(self) -> None:
        """Returns when the decode worker has accepted the push, or the push has failed."""
        await self._taken.wait()

    async def commit(self, first_token: int, num_tokens: int, prefill_done_at: float) -> Handoff:
        """Waits until the decode worker has all blocks and owns the request.

        `prefill_done_at` is a time of the sender's clock. Raises the error of the push. After
        Unavailable it is unknown whether the decode worker has taken over; after any other error it
        has not.
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
            blocks=sum(len(run.blocks) for run in self._runs if run.layers.first == 0),
            block_bytes=self._sender.arena.layout.block_bytes,
            bytes=self.bytes_packed,
            cached_blocks=self._target.cached_tokens // self._sender.arena.layout.block_size,
            seconds=now - (prefill_done_at if self._first_sent_at is None else self._first_sent_at),
            exposed_seconds=now - prefill_done_at,
            why=self.why,
        )

    async def abort(self) -> None:
        """Cancels the push. Returns when neither side reads the blocks any more. A push that is
        over is unchanged.
        """
        self._aborted = True
        self._news.set()
        await asyncio.shield(self._task)

    async def _push(self) -> None:
        try:
            self._receipt = await self._hand_over_or_ask_again()
        except KvRelayError as error:
            self.error = error
        # Every exception fails this push only, and must be reported.
        except Exception as error:
            log.exception("kv_push_failed", request=self._key[0], worker=self._target.worker_id)
            self.error = Internal(f"the push failed: {error}")
        finally:
            self._taken.set()

    async def _hand_over_or_ask_again(self) -> KvReceipt:
        try:
            return await self._hand_over_or_fall_back()
        except Unavailable:
            if self._commit_frame is not None:
                # Perhaps only the answer was lost. A decode worker that has committed repeats it.
                with suppress(KvRelayError):
                    return await self._call(
                        self._opening("grpc"), _only(frame_to_bytes(self._commit_frame))
                    )
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
            opening = await in_thread(outbound.announce, self._opening(self.transport))
            return await self._call(opening, self._frames(outbound))

    async def _call(self, opening: KvOpen, frames: AsyncGenerator[bytes, None]) -> KvReceipt:
        """Makes one call with these frames, or with fewer if the peer ends it early."""
        channels, address = self._sender.channels, self._target.address
        channel = channels.get(address)
        call = PushCall(channel, address, self._sender.timeout_s)
        call.when_over(self._news.set)
        self._current = call
        try:
            await call.open(frame_to_bytes(opening))
            async with aclosing(frames):
                async for frame in frames:
                    # The next frame is packed while this frame is written.
                    await call.write_behind(frame)
            return await call.receipt()
        except Unavailable:
            channels.retire(address, channel, self._sender.timeout_s)
            if call.is_over:
                # The peer's error takes precedence over the local one.
                await call.receipt()
            raise
        finally:
            await call.close()

    async def _frames(self, outbound: Outbound) -> AsyncGenerator[bytes, None]:
        """The frames of the push from its first blocks to its commit, or until the push stops."""
        self.bytes_packed = 0
        if not self._refused:
            # Connects even if aborted, since the receiver is connecting too.
            await in_thread(outbound.connect)
            self._taken.set()
        count = 0
        digest = xxhash.xxh3_64()

        def pack(header: KvBlocks, blocks: Sequence[int]) -> bytes:
            frame = outbound.pack(header, blocks)
            for one in frame.digests:
                digest.update(one.to_bytes(8, "little"))
            return frame_to_bytes(frame)

        async for first, blocks, layers in self._cut_runs(outbound.frame_bytes):
            num_bytes = len(blocks) * self._block_bytes(layers)
            header = KvBlocks(count, first, len(blocks), layers.first, layers.num, num_bytes)
            message = await in_thread(pack, header, blocks)
            count += 1
            self.bytes_packed += num_bytes
            yield message
        if self._ending is not None and not self._stopped:
            first_token, num_tokens = self._ending
            self._commit_frame = KvCommit(
                count, commit_digest(digest, first_token, num_tokens), first_token, num_tokens
            )
            yield frame_to_bytes(self._commit_frame)

    async def _cut_runs(self, frame_bytes: int) -> AsyncGenerator[Run, None]:
        """Yields the queued runs, split to fit into frames."""
        next_run = 0
        while not self._stopped:
            if next_run < len(self._runs):
                first, blocks, layers = self._runs[next_run]
                next_run += 1
                size = max(1, frame_bytes // self._block_bytes(layers))
                for start in range(0, len(blocks), size):
                    if not self._stopped:
                        yield Run(first + start, blocks[start : start + size], layers)
            elif self._ending is None:
                self._news.clear()
                await self._news.wait()
            else:
                return

    def _block_bytes(self, layers: Layers) -> int:
        return Places.of_payload(self._sender.arena.layout, 1, layers).block_bytes

    @property
    def _refused(self) -> bool:
        return self._current is not None and self._current.is_over

    @property
    def _stopped(self) -> bool:
        return self._aborted or self._refused

    def _opening(self, transport: str) -> KvOpen:
        request_id, attempt = self._key
        target = self._target
        model_id, layout_hash, protocol = self._sender.model_id, self._sender.layout_hash, ours()
        # A target with protocol 0 may also come through a router of protocol 0, which drops unknown
        # fields. The receiver then treats this sender as one of protocol 0.
        if target.protocol < 1 and self._sender.sampled_model_id:
            model_id = self._sender.sampled_model_id
            layout_hash = self._sender.arena.layout.hash(model_id)
            protocol = Protocol()
        return KvOpen(
            request_id=request_id,
            attempt=attempt,
            lease_id=target.lease_id,
            epoch=target.epoch,
            generation=target.generation,
            layout_hash=layout_hash,
            transport=transport,
            model_id=model_id,
            layout=self._sender.arena.layout,
            sender=self._sender.worker_id,
            capability=target.capability,
            protocol=protocol,
        )


async def _only(frame: bytes) -> AsyncGenerator[bytes, None]:
    yield frame
