"""One gRPC call of KvTransferService.Push, seen from the sender."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc

from kvrelay.errors import Cancelled, Unavailable
from kvrelay.wire.status import error_from_rpc
from kvrelay.wire.transfer import Frame, KvReceipt, KvTransferServiceStub, frame_to_proto, receipt_from_proto


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
        if task.cancelled() or task.exception() is not None:
            await asyncio.wait({self._outcome}, timeout=self._patience)

    async def _wait_for_outcome(self) -> KvReceipt:
        try:
            return receipt_from_proto(await self._call)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self._address) from None
        except asyncio.CancelledError:  # which is how grpc.aio says that the peer answered CANCELLED, too
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise Cancelled(f"{self._address}: {await self._call.details()}") from None
