"""One gRPC call of KvTransferService.Push, seen from the sender."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc

from kvrelay.errors import Unavailable
from kvrelay.wire.status import error_from_rpc
from kvrelay.wire.transfer import KvReceipt, kv_push, receipt_from_proto

# grpc.aio's own status when a write in flight meets the end of the call. It can stand before the
# peer's status, or in its place.
_INTERRUPTED_WRITE = (grpc.StatusCode.INTERNAL, "Internal error from Core")


class PushCall:
    """Every wait for the peer ends after `timeout_s` seconds, with Unavailable.

    What a single step of the call fails of does not matter: once the call is over, its outcome says
    why.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._call = kv_push(channel)()
        self._writing: asyncio.Future[None] | None = None  # what `write_behind` began
        self._outcome = asyncio.ensure_future(self._wait_for_outcome())

    @property
    def is_over(self) -> bool:
        return self._outcome.done()

    def when_over(self, callback: Callable[[], None]) -> None:
        self._outcome.add_done_callback(lambda _: callback())

    async def open(self, opening: bytes) -> None:
        """Writes the first frame.

        Returns when the peer, by its initial metadata, has said that it takes the push, or the call
        is over.
        """
        await self.write(opening)
        await self._step(self._call.initial_metadata(), "did not answer")
        if self._call.done():  # refused; a write now would stand in the way of the reason
            await asyncio.wait({self._outcome}, timeout=self._timeout_s)

    async def write(self, frame: bytes) -> None:
        """Returns when the peer's flow control has let the frame pass, or the call is over."""
        await self._step(self._call.write(frame), "took no bytes")

    async def write_behind(self, frame: bytes) -> None:
        """Begins to write a frame once the one before is written."""
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
        """Breaks off a call that is not over."""
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
            raise Unavailable(f"{self._address} ended the push while a frame was on its way")
        raise error_from_rpc(status, self._address)

    async def _status(self) -> grpc.aio.AioRpcError:
        code = await self._call.code()
        metadata = await self._call.initial_metadata(), await self._call.trailing_metadata()
        return grpc.aio.AioRpcError(code, *metadata, details=await self._call.details())

    async def _end(self) -> None:
        with suppress(grpc.aio.AioRpcError):
            await self._call
