"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self, Unpack

import grpc

from kvrelay.client.answer import Completion, Token
from kvrelay.client.base import BaseClient, BaseStream
from kvrelay.client.request import GenerateOptions
from kvrelay.client.retry import Retry
from kvrelay.errors import KvRelayError, Unavailable
from kvrelay.wire import inference as wire


class Client(BaseClient):
    """A blocking client of one cluster.

    Threads may share it. A stream is read by one thread at a time, and cancelled by any. Close it,
    or use it in `with`.
    """

    _grpc = grpc
    _sleep = staticmethod(time.sleep)

    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Starts an answer. Nothing is sent before the stream is read, and `timeout` seconds count
        from then.

        Raises InvalidArgument at once for values of the wrong kind. Failures while reading are
        tried again, elsewhere if possible, from the token where they happened; what is final is
        raised from the stream.
        """
        return Stream(self, self._retry(timeout), prompt, options)

    def models(self, *, timeout: float | None = None) -> tuple[wire.ModelInfo, ...]:
        """The models that the cluster serves."""
        return self._list_models(self._retry(timeout))

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns once a router answers; raises why none did when `timeout` seconds have passed."""
        self._list_models(self._retry(timeout, patient=True))

    def _list_models(self, retry: Retry) -> tuple[wire.ModelInfo, ...]:
        while True:
            list_models = self._stub(retry.target).ListModels
            timeout = retry.begin(time.monotonic())
            try:
                return wire.models_from_proto(
                    list_models(
                        wire.pb.ListModelsRequest(), timeout=timeout, metadata=self._metadata
                    )
                )
            except grpc.RpcError as error:
                self._sleep(retry.failed(self._typed(error, retry.target), time.monotonic()))

    def close(self) -> None:
        """Ends the calls under way; their streams raise Cancelled."""
        self._closed = True
        for channel in self._channels:
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
    """An answer as it comes: iterate for its responses, or call `result`. Leaving it early cancels
    the request.
    """

    _client: Client

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> wire.GenerateResponse:
        while not self._finished():
            try:
                if self._receive(response := self._read()):
                    return response
            except KvRelayError as error:
                self._drop_call()
                self._client._sleep(self._failed(error))
        if self._call is not None and not self._client._forked:
            with suppress(grpc.RpcError):  # the answer is whole; how its call ends changes nothing
                next(self._call, None)
        raise StopIteration

    def result(self) -> Completion:
        """Reads the rest and returns the whole answer."""
        for _ in self:
            pass
        return self._answer.completion(self._retry.calls)

    @property
    def text(self) -> str:
        """The whole answer's text; reads the rest first."""
        return self.result().text

    def tokens(self) -> Iterator[Token]:
        """The tokens that are left, one by one. Whoever stops early finds the rest here again."""
        yield from self._take()
        for response in self:
            yield from self._take(response)

    def cancel(self) -> None:
        """Ends the request unless it has finished; reading on raises Cancelled. Any thread may call
        this.
        """
        self._left()
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
            call = self._call = client._stub(index).Generate(
                request, timeout=timeout, metadata=client._metadata
            )
            if self._error is not None:  # another thread cancelled before it could see the call
                call.cancel()
        try:
            return wire.response_from_proto(next(call))
        except StopIteration:
            raise Unavailable(f"{target}: the stream ended before the answer did") from None
        except grpc.RpcError as error:
            self._finished()  # raises Cancelled if our `cancel` ended the call
            raise client._typed(error, index) from error
