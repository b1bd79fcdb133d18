"""The asyncio client. It has the same methods as the blocking client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from kvrelay.client.answer import Completion, Token
from kvrelay.client.base_client import BaseClient
from kvrelay.client.base_stream import BaseStream
from kvrelay.client.channels import Channels
from kvrelay.client.pause import AsyncPause, tell
from kvrelay.client.request import GenerateOptions
from kvrelay.client.retry import Retry
from kvrelay.errors import FailedPrecondition, Internal, KvRelayError, Unavailable
from kvrelay.wire import inference as wire
from kvrelay.wire.status import task_cancelled


class AsyncClient(BaseClient):
    """A client of one cluster for asyncio, on one event loop. Call `close`, or use the client in
    `async with`. A call on a second event loop raises FailedPrecondition.
    """

    _grpc = grpc.aio
    _pause_of = AsyncPause
    _pause: AsyncPause
    # The event loop of the channels, once there are any.
    _loop: asyncio.AbstractEventLoop | None = None

    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Returns the stream of an answer. The first read sends the request; `timeout` seconds
        count from then.

        Raises InvalidArgument at once for values of the wrong type. The stream retries a failed
        call from the last token received, on another router if possible. The stream raises an error
        that no retry can fix.
        """
        return AsyncStream(self, self._retry(timeout), prompt, options)

    async def models(self, *, timeout: float | None = None) -> tuple[wire.ModelInfo, ...]:  # noqa: ASYNC109
        """Returns the models that the cluster serves."""
        return await self._list_models(self._retry(timeout))

    async def wait_ready(self, timeout: float = 60.0) -> None:  # noqa: ASYNC109
        """Returns when a router answers. After `timeout` seconds, raises the error of the last
        attempt.
        """
        await self._list_models(self._retry(timeout, patient=True))

    async def _list_models(self, retry: Retry) -> tuple[wire.ModelInfo, ...]:
        while True:
            list_models = self._channels_to(retry.target).stub().ListModels
            timeout = retry.begin(time.monotonic())
            try:
                found = await list_models(
                    wire.pb.ListModelsRequest(), timeout=timeout, metadata=self._metadata
                )
                self._raise_if_unreadable(found, retry.target)
                self._is_known = True
                return wire.models_from_proto(found)
            except asyncio.CancelledError:
                if not task_cancelled():
                    self._raise_if_closed()
                raise
            except grpc.RpcError as seen:
                error = self._typed(seen, retry.target)
            # Outside of the handler, so that a traceback does not show gRPC's error too.
            seconds = retry.failed(error, time.monotonic())
            tell(error, seconds)
            await self._pause.wait(seconds, lambda: self._closed)

    def _channels_to(self, index: int) -> Channels:
        self._raise_if_closed()
        self._raise_if_elsewhere()
        self._loop = asyncio.get_running_loop()
        return super()._channels_to(index)

    def _raise_if_elsewhere(self) -> None:
        if self._loop not in (None, asyncio.get_running_loop()):
            raise FailedPrecondition(
                "the client was used on another event loop; create a client for each event loop, "
                "such as for each asyncio.run"
            )

    def _raise_if_unreadable(self, message: Any, index: int) -> None:
        """Raises Internal for None, which grpc.aio returns for bytes that it cannot read."""
        if message is None:
            raise Internal(f"{self.targets[index]}: the response is not a message of kvrelay")

    async def close(self) -> None:
        """Ends the calls in progress; their streams raise Cancelled. On another event loop than the
        client's, returns before they have ended.
        """
        self._closed = True
        loop = self._loop
        if loop is not None and loop is not asyncio.get_running_loop() and loop.is_running():
            # That loop may wait for this one.
            asyncio.run_coroutine_threadsafe(self._end_calls(), loop)
        else:
            await self._end_calls()

    async def _end_calls(self) -> None:
        self._pause.wake()
        for channels in self._channels:
            for channel in channels.opened:
                await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncStream(BaseStream):
    """The stream of an answer. Iterate over it to get the responses, or await it to get the whole
    answer. Leaving the stream early cancels the request.
    """

    _client: AsyncClient

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> wire.GenerateResponse:
        self._client._raise_if_elsewhere()
        while not self._finished():
            try:
                if self._receive(response := await self._read()):
                    return response
            except KvRelayError as error:
                self._drop_call()
                await self._client._pause.wait(self._failed(error), self._is_ended)
        if self._call is not None:
            await self._drain(self._call)
        raise StopAsyncIteration

    async def result(self) -> Completion:
        """Reads the remaining responses and returns the whole answer."""
        async for _ in self:
            pass
        return self._answer.completion(self._retry.calls)

    def __await__(self) -> Generator[Any, None, Completion]:
        return self.result().__await__()

    async def tokens(self) -> AsyncIterator[Token]:
        """Yields the remaining tokens, one by one. A caller that stops early gets the rest from the
        next call.
        """
        for token in self._take():
            yield token
        async for response in self:
            for token in self._take(response):
                yield token

    def cancel(self) -> None:
        """Cancels the request unless it has finished. Further reads raise Cancelled."""
        self._left()
        self._client._pause.wake()
        self._drop_call()

    def __del__(self) -> None:
        # A task of gRPC keeps the call of a stream that its user has left.
        with suppress(RuntimeError):  # the event loop may have ended
            self._drop_call()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    async def _drain(self, call: Any) -> None:
        """Reads the end of the call. The answer is complete, so the status of the call does not
        matter.
        """
        if self._client._forked:
            return
        try:
            with suppress(grpc.RpcError):
                await call.read()
        except asyncio.CancelledError:
            if task_cancelled():
                raise

    async def _read(self) -> wire.GenerateResponse:
        client, index = self._client, self._retry.target
        target = client.targets[index]
        if self._call is None:
            request, timeout = self._begin()
            self._call = client._channels_to(index).generate(
                request, timeout=timeout, metadata=client._metadata
            )
        try:
            message = await self._call.read()
        except asyncio.CancelledError:
            if task_cancelled():
                # gRPC has cancelled the call. The next read resumes the answer with another call.
                self._drop_call()
                raise
            # Raises Cancelled if `cancel` ended the call.
            self._finished()
            client._raise_if_closed()
            raise Unavailable(f"{target}: the call was cancelled by another task") from None
        except grpc.RpcError as error:
            # Raises Cancelled if `cancel` ended the call.
            self._finished()
            raise client._typed(error, index) from None
        if message is grpc.aio.EOF:
            raise Unavailable(f"{target}: the stream ended before the answer was complete")
        client._raise_if_unreadable(message, index)
        return wire.response_from_proto(message)
