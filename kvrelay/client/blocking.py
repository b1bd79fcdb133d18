"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self, Unpack

import grpc

from kvrelay.client.answer import Completion, Token
from kvrelay.client.base_client import BaseClient
from kvrelay.client.base_stream import BaseStream
from kvrelay.client.pause import BlockingPause, tell
from kvrelay.client.request import GenerateOptions
from kvrelay.client.retry import Retry
from kvrelay.errors import KvRelayError, Unavailable
from kvrelay.wire import inference as wire


class Client(BaseClient):
    """A blocking client of one cluster.

    Threads may share a client. One thread at a time reads a stream; any thread may cancel it. Call
    `close`, or use the client in `with`.
    """

    _grpc = grpc
    _pause_of = BlockingPause
    _pause: BlockingPause

    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Returns the stream of an answer. The first read sends the request; `timeout` seconds
        count from then.

        Raises InvalidArgument at once for values of the wrong type. The stream retries a failed
        call from the last token received, on another router if possible. The stream raises an error
        that no retry can fix.
        """
        return Stream(self, self._retry(timeout), prompt, options)

    def models(self, *, timeout: float | None = None) -> tuple[wire.ModelInfo, ...]:
        """Returns the models that the cluster serves."""
        return self._list_models(self._retry(timeout))

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns when a router answers. After `timeout` seconds, raises the error of the last
        attempt.
        """
        self._list_models(self._retry(timeout, patient=True))

    def _list_models(self, retry: Retry) -> tuple[wire.ModelInfo, ...]:
        while True:
            timeout = retry.begin(time.monotonic())
            try:
                with self._renewing_channels():
                    stub = self._channels_to(retry.target).stub()
                    found = stub.ListModels(
                        wire.pb.ListModelsRequest(), timeout=timeout, metadata=self._metadata
                    )
                self._is_known = True
                return wire.models_from_proto(found)
            except grpc.RpcError as seen:
                error = self._typed(seen, retry.target)
            # Outside of the handler, so that a traceback does not show gRPC's error too.
            seconds = retry.failed(error, time.monotonic())
            tell(error, seconds)
            self._pause.wait(seconds, lambda: self._closed)

    def close(self) -> None:
        """Ends the calls in progress; their streams raise Cancelled."""
        self._closed = True
        self._pause.wake()
        with self._lock:
            calls = list(self._calls)
        # Also those on channels that an interrupt has replaced.
        for call in calls:
            call.cancel()
        for channels in self._channels:
            for channel in channels.opened:
                channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Stream(BaseStream):
    """The stream of an answer. Iterate over it to get the responses, or call `result`. Leaving the
    stream early cancels the request.
    """

    _client: Client

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> wire.GenerateResponse:
        with self._client._renewing_channels():
            response = self._next_response()
        if response is None:
            raise StopIteration
        return response

    def _next_response(self) -> wire.GenerateResponse | None:
        while not self._finished():
            try:
                if self._receive(response := self._read()):
                    return response
            except KvRelayError as error:
                self._drop_call()
                self._client._pause.wait(self._failed(error), self._is_ended)
        if self._call is not None and not self._client._forked:
            # The answer is complete, so the status of the call does not matter.
            with suppress(grpc.RpcError):
                next(self._call, None)
        return None

    def result(self) -> Completion:
        """Reads the remaining responses and returns the whole answer."""
        for _ in self:
            pass
        return self._answer.completion(self._retry.calls)

    @property
    def text(self) -> str:
        """The text of the whole answer. Reads the remaining responses first."""
        return self.result().text

    def tokens(self) -> Iterator[Token]:
        """Yields the remaining tokens, one by one. A caller that stops early gets the rest from the
        next call.
        """
        yield from self._take()
        for response in self:
            yield from self._take(response)

    def cancel(self) -> None:
        """Cancels the request unless it has finished. Further reads raise Cancelled. Any thread may
        call this method.
        """
        self._left()
        self._client._pause.wake()
        self._drop_call()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def _read(self) -> wire.GenerateResponse:
        client, index = self._client, self._retry.target
        target = client.targets[index]
        call = self._call
        if call is None:
            request, timeout = self._begin()
            call = self._call = client._channels_to(index).generate(
                request, timeout=timeout, metadata=client._metadata
            )
            with client._lock:
                client._calls.add(call)
            # Another thread cancelled before it could see the call.
            if self._error is not None:
                call.cancel()
        try:
            return wire.response_from_proto(next(call))
        except StopIteration:
            raise Unavailable(
                f"{target}: the stream ended before the answer was complete"
            ) from None
        except grpc.RpcError as error:
            # Raises Cancelled if `cancel` ended the call.
            self._finished()
            raise client._typed(error, index) from None
