"""The sender's side of one gRPC call of KvTransferService.Push."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc

from kvrelay.errors import Unavailable
from kvrelay.wire.status import error_from_rpc
from kvrelay.wire.transfer import KvReceipt, kv_push, receipt_from_proto

# grpc.aio's own status when the call ends during a write. It can precede the peer's status or
# replace it.
_INTERRUPTED_WRITE = (grpc.StatusCode.INTERNAL, "Internal error from Core")
# grpc.aio's status of the calls of a channel that is closed.
_CLOSED_CHANNEL = (grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
# Initial metadata of a receiver that accepts a push. A refusal has none.
ACCEPTED = (("kvrelay-push", "accepted"),)
# The status of a refusal follows its metadata within this time. A push to a receiver of an earlier
# version, which does not send ACCEPTED, begins this much later.
_REFUSAL_S = 0.05


class PushCall:
    """One push call. Every wait for the peer ends with Unavailable after `timeout_s` seconds.

    Errors of single steps are ignored: after the call is over, its outcome gives the reason.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._call = kv_push(channel)()
        # The write that `write_behind` started.
        self._writing: asyncio.Future[None] | None = None
        self._is_closed = False
        self._outcome = asyncio.ensure_future(self._wait_for_outcome())

    @property
    def is_over(self) -> bool:
        """True if the call has ended."""
        return self._outcome.done()

    def when_over(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the call ends."""
        self._outcome.add_done_callback(lambda _: callback())

    async def open(self, opening: bytes) -> None:
        """Writes the first frame.

        Returns when the peer's initial metadata accepts the push, or when the call is over.
        """
        await self.write(opening)
        answer = asyncio.ensure_future(self._call.initial_metadata())
        await self._step(answer, "did not answer")
        # A write would hide the reason of a refusal.
        if answer.cancelled() or answer.exception() or ACCEPTED[0] not in list(answer.result()):
            await asyncio.wait({self._outcome}, timeout=_REFUSAL_S)

    async def write(self, frame: bytes) -> None:
        """Returns when the peer's flow control has accepted the frame, or the call is over."""
        await self._step(self._call.write(frame), "took no bytes")

    async def write_behind(self, frame: bytes) -> None:
        """Waits for the previous write, then starts to write the frame."""
        if self._writing is not None:
            await self._writing
        self._writing = asyncio.ensure_future(self.write(frame))

    async def receipt(self) -> KvReceipt:
        """Ends the stream of frames and waits for the answer. Raises the peer's error."""
        if self._writing is not None:
            await self._writing
        await self._step(self._call.done_writing(), "took no bytes")
        await self._step(asyncio.shield(self._outcome), "sent no receipt")
        return self._outcome.result()

    async def close(self) -> None:
        """Cancels the call if it is not over."""
        self._is_closed = True
        self._call.cancel()
        if self._writing is not None:
            await asyncio.wait({self._writing})
            self._writing.exception()
        await asyncio.wait({self._outcome})
        self._outcome.exception()

    async def _step(self, step: Awaitable[object], failing: str) -> None:
        task = asyncio.ensure_future(step)
        done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        if not done:
            task.cancel()
            raise Unavailable(f"{self._address} {failing} for {self._timeout_s:g} s")
        if task.cancelled() or task.exception() is not None:
            await asyncio.wait({self._outcome}, timeout=self._timeout_s)

    async def _wait_for_outcome(self) -> KvReceipt:
        status = await self._status()
        if (status.code(), status.details()) == _INTERRUPTED_WRITE:
            await asyncio.wait({asyncio.ensure_future(self._end())})
            status = await self._status()
        if status.code() is grpc.StatusCode.OK:
            return receipt_from_proto(await self._call)
        if (status.code(), status.details()) == _INTERRUPTED_WRITE:
            raise Unavailable(f"{self._address} ended the push while a frame was being sent")
        if not self._is_closed and (status.code(), status.details()) == _CLOSED_CHANNEL:
            raise Unavailable(f"the connection to {self._address} was closed during the push")
        raise error_from_rpc(status, self._address)

    async def _status(self) -> grpc.aio.AioRpcError:
        code = await self._call.code()
        metadata = await self._call.initial_metadata(), await self._call.trailing_metadata()
        return grpc.aio.AioRpcError(code, *metadata, details=await self._call.details())

    async def _end(self) -> None:
        with suppress(grpc.aio.AioRpcError):
            await self._call
