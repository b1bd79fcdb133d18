"""One gRPC call of KvTransferService.Push, seen from the sender."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc

from kvrelay.errors import Unavailable
from kvrelay.wire.status import error_from_rpc
from kvrelay.wire.transfer import Frame, KvReceipt, KvTransferServiceStub, frame_to_proto, receipt_from_proto

_WRITE_FAILED = "Internal error from Core"  # grpc.aio's own status when a write meets a broken connection first


class PushCall:
    """Every wait for the peer ends after `patience` seconds, with Unavailable.

    What a single step of the call fails of does not matter: once the call is over, its outcome says why.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, patience: float) -> None:
        self._address = address
        self._patience = patience
        self._call = KvTransferServiceStub(channel).Push()
        self._outcome = asyncio.ensure_future(self._wait_for_outcome())

    @property
    def is_over(self) -> bool:
        return self._outcome.done()

    def when_over(self, callback: Callable[[], None]) -> None:
        self._outcome.add_done_callback(lambda _: callback())

    async def write(self, frame: Frame) -> None:
        """Returns when the peer's flow control has let the frame pass, or the call is over."""
        await self._step(self._call.write(frame_to_proto(frame)), "took no bytes")

    async def receipt(self) -> KvReceipt:
        """Ends the stream of frames and waits for the answer. Raises the peer's error."""
        await self._step(self._call.done_writing(), "took no bytes")
        await self._step(asyncio.shield(self._outcome), "sent no receipt")
        return self._outcome.result()

    async def close(self) -> None:
        """Breaks off a call that is not over."""
        self._call.cancel()
        await asyncio.wait({self._outcome})
        self._outcome.exception()

    async def _step(self, step: Awaitable[object], failing: str) -> None:
        task = asyncio.ensure_future(step)
        done, _ = await asyncio.wait({task}, timeout=self._patience)
        if not done:
            task.cancel()
            raise Unavailable(f"{self._address} {failing} for {self._patience:g} s")
        if not task.cancelled():
            task.exception()

    async def _wait_for_outcome(self) -> KvReceipt:
        # The status first: to await a call that the peer ended with CANCELLED raises asyncio.CancelledError.
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return receipt_from_proto(await self._call)
        details = await self._call.details()
        if code is grpc.StatusCode.INTERNAL and details == _WRITE_FAILED:
            raise Unavailable(f"{self._address}: the connection broke off")
        metadata = await self._call.initial_metadata(), await self._call.trailing_metadata()
        raise error_from_rpc(grpc.aio.AioRpcError(code, *metadata, details=details), self._address)
