"""A push: the transfer of one request's KV to the decode worker that has leased blocks for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from kv_transfer.blocks.copy_threads import in_thread
from kv_transfer.blocks.plan import Layers
from kv_transfer.channels import GRACE_S
from kv_transfer.push_call import PushCall
from kv_transfer.push_frames import PushFrames, Run
from kv_transfer.retry_policy import PushAttempt, RetryPolicy
from kv_transfer.transports import vllm_nixl
from kvrelay.errors import Internal, KvRelayError, Unavailable
from kvrelay.process.telemetry import get_logger
from kvrelay.types.kv_layout import KvLayout
from kvrelay.types.requests import Handoff
from kvrelay.wire.transfer import KvOpen, KvReceipt, VllmBlocks, frame_to_bytes
from kvrelay.worker_messages import HandoffTarget

if TYPE_CHECKING:
    from kv_transfer.sender import Sender

log = get_logger(__name__)


class Push:
    """Runs until `commit` or `abort`. Until one of these has returned, the blocks given to `send`
    must not change.

    `error` is set as soon as the push has failed.
    """

    def __init__(
        self,
        sender: Sender,
        key: tuple[str, int],
        target: HandoffTarget,
        attempt: PushAttempt,
        adapter: str = "",
        num_tokens: int = 0,
    ) -> None:
        """num_tokens: of the prompt, for layouts with windows."""
        self.error: KvRelayError | None = None
        # The first block of the sequence whose windowed layers are sent.
        self.windows_from = sender.arena.layout.first_block(num_tokens)
        self._sender = sender
        self._key = key
        self._target = target
        self._adapter = adapter
        self._attempt = attempt
        self._frames = PushFrames(sender.arena.layout)
        self._first_sent_at: float | None = None
        self._aborted = False
        # Set once the decode worker has accepted the push, or the push has failed.
        self._taken = asyncio.Event()
        self._receipt: KvReceipt | None = None
        self._task = asyncio.create_task(self._run())

    @property
    def transport(self) -> str:
        """Name of the transport."""
        return self._attempt.transport

    @property
    def why(self) -> str:
        """Reason for the transport."""
        return self._attempt.why

    @property
    def bytes_packed(self) -> int:
        """KV bytes in frames."""
        return self._frames.num_bytes

    def send(self, first: int, blocks: Sequence[int], layers: Layers | None = None) -> None:
        """Queues the sequence's blocks `first`, `first` + 1, ..., whose KV is complete in these
        layers, or in all. Windowed layers are sent from block `windows_from` on.
        """
        if blocks:
            if self._first_sent_at is None:
                self._first_sent_at = self._sender.clock.now()
            layers = layers or Layers(0, len(self._sender.arena.layout.layers))
            layout, run = self._sender.arena.layout, Run(first, tuple(blocks), layers)
            for part in needed_runs(layout, run, self.windows_from):
                self._frames.add(part)

    async def opened(self) -> None:
        """Returns when the decode worker has accepted the push, or the push has failed."""
        await self._taken.wait()

    @property
    def may_be_taken(self) -> bool:
        """Whether the decode worker may own the request: its commit was sent, and not refused."""
        refused = self.error is not None and not isinstance(self.error, Unavailable)
        return self._frames.commit_frame is not None and not refused

    async def commit(
        self,
        first_token: int,
        num_tokens: int,
        prefill_done_at: float,
        in_vllm: VllmBlocks | None = None,
    ) -> Handoff:
        """Waits until the decode worker has all blocks and owns the request. `in_vllm`: for
        vllm-nixl, the KV that the decode worker's vLLM reads.

        `prefill_done_at` is a time of the sender's clock. Raises the error of the push. After
        Unavailable it is unknown whether the decode worker has taken over; after any other error it
        has not.
        """
        self._frames.end(first_token, num_tokens, in_vllm)
        await asyncio.shield(self._task)
        if self._receipt is None:
            assert self.error is not None, "a push ends with a receipt or an error"
            raise self.error
        now, layout = self._sender.clock.now(), self._sender.arena.layout
        blocks, num_bytes = self._frames.num_blocks, self.bytes_packed
        if in_vllm is not None:
            blocks, num_bytes = self._receipt.blocks, self._receipt.bytes
        return Handoff(
            transport=self.transport,
            blocks=blocks,
            block_bytes=layout.block_bytes,
            bytes=num_bytes,
            cached_blocks=self._target.cached_tokens // layout.block_size,
            seconds=now - (prefill_done_at if self._first_sent_at is None else self._first_sent_at),
            exposed_seconds=now - prefill_done_at,
            why=self.why,
        )

    async def abort(self) -> None:
        """Cancels the push. Returns when neither side reads the blocks any more. A push that is
        over is unchanged.
        """
        self._aborted = True
        self._frames.wake()
        await asyncio.shield(self._task)

    async def _run(self) -> None:
        try:
            self._receipt = await self._try_attempts()
        except KvRelayError as error:
            self.error = error
        # Every exception fails this push only, and must be reported.
        except Exception as error:
            log.exception("kv_push_failed", request=self._key[0], worker=self._target.worker_id)
            self.error = Internal(f"the push failed: {error}")
        finally:
            self._taken.set()

    async def _try_attempts(self) -> KvReceipt:
        policy = RetryPolicy(self._target.transport)
        attempt: PushAttempt | None = self._attempt
        while attempt is not None:
            self._attempt = attempt
            try:
                return await (self._repeat_commit() if attempt.commit_only else self._hand_over())
            except KvRelayError as error:
                # A commit that cannot be repeated leaves the reason of the push as it was.
                if not attempt.commit_only:
                    reason = error
                attempt = policy.following(
                    attempt, error, commit_sent=self._frames.commit_frame is not None
                )
        raise reason

    async def _hand_over(self) -> KvReceipt:
        async with self._sender.outbound(self.transport, self._target) as outbound:
            opening = self._opening(self.transport)
            async with self._call(await in_thread(outbound.announce, opening)) as call:
                if not call.is_over:
                    # Connects even if aborted, since the receiver is connecting too.
                    await in_thread(outbound.connect)
                    self._taken.set()
                packed = self._frames.packed(outbound, lambda: self._aborted or call.is_over)
                async with aclosing(packed) as frames:
                    async for frame in frames:
                        # The next frame is packed while this frame is written.
                        await call.write_behind(frame)
                return await call.receipt()

    def _opening(self, transport: str) -> KvOpen:
        return self._sender.opening(self._key, self._target, transport, self._adapter)

    async def _repeat_commit(self) -> KvReceipt:
        assert self._frames.commit_frame is not None, "the commit was sent before"
        # A receiver that reads in vLLM takes no other transport.
        transport = vllm_nixl.NAME if self.transport == vllm_nixl.NAME else "grpc"
        async with self._call(self._opening(transport)) as call:
            await call.write_behind(frame_to_bytes(self._frames.commit_frame))
            return await call.receipt()

    @asynccontextmanager
    async def _call(self, opening: KvOpen) -> AsyncIterator[PushCall]:
        """An opened call to the decode worker. Raises the peer's error rather than the local
        one.
        """
        channels, address = self._sender.channels, self._target.address
        channel = channels.get(address)
        call = PushCall(channel, address, self._sender.timeout_s)
        call.when_over(self._frames.wake)
        try:
            await call.open(frame_to_bytes(opening))
            yield call
        except Unavailable:
            # Other pushes on the channel last as long as the prefill of their prompts.
            channels.retire(address, channel, GRACE_S)
            if call.is_over:
                await call.receipt()
            raise
        finally:
            await call.close()


def needed_runs(layout: KvLayout, run: Run, windows_from: int) -> Iterator[Run]:
    """The parts of a run that the decode worker needs: windowed layers from the sequence's block
    `windows_from` on.
    """
    early = min(max(0, windows_from - run.first), len(run.blocks))
    first, end = run.layers.first, run.layers.first + run.layers.num
    while early and (first := layout.kept_from(first)) < end:
        last = first + 1
        while last < end and layout.kept_from(last) == last:
            last += 1
        yield Run(run.first, run.blocks[:early], Layers(first, last - first))
        first = last
    if run.blocks[early:]:
        yield Run(run.first + early, run.blocks[early:], run.layers)
