"""The shared core of the blocking and the asyncio stream: everything but I/O."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from kvrelay.client.answer import Answer, Token, tokens_of
from kvrelay.client.base_client import BaseClient
from kvrelay.client.pause import tell
from kvrelay.client.request import GenerateOptions, build_request
from kvrelay.client.retry import Retry
from kvrelay.errors import Cancelled, KvRelayError
from kvrelay.wire import inference as wire


class BaseStream:
    """The shared core of the streams: the subclasses read responses, and this class decides how to
    handle them.
    """

    def __init__(
        self, client: BaseClient, retry: Retry, prompt: str | None, options: GenerateOptions
    ) -> None:
        # The call in progress, of grpc or grpc.aio. First: a stream that is refused below is
        # dropped, too.
        self._call: Any = None
        request = build_request(prompt, options)
        # Converted once here, so that InvalidArgument points at the caller's mistake.
        wire.request_to_proto(request)
        self._client = client
        self._answer = Answer(request)
        self._retry = retry
        self._error: KvRelayError | None = None
        # Tokens that were received but not yet read by the caller.
        self._untaken: deque[Token] = deque()

    def __repr__(self) -> str:
        state = (
            "finished"
            if self._answer.finished
            else "under way"
            if self._error is None
            else repr(self._error)
        )
        return (
            f"<kvrelay.{type(self).__name__}: {self._answer.num_tokens} tokens, "
            f"{self._retry.calls} calls, {state}>"
        )

    def _finished(self) -> bool:
        """Whether the answer is complete. Raises the error that ended the answer, if any, and
        FailedPrecondition in a forked process.
        """
        if self._error is not None:
            raise self._error
        if not self._answer.finished:
            self._client._raise_if_forked()
        return self._answer.finished

    def _begin(self) -> tuple[wire.pb.GenerateRequest, float]:
        """Returns the message and the timeout in seconds of the next call."""
        now = time.monotonic()
        timeout = self._retry.begin(now)
        self._answer.begin(now)
        return wire.request_to_proto(self._answer.request()), timeout

    def _receive(self, response: wire.GenerateResponse) -> bool:
        """Adds a response; returns whether it brought anything new."""
        news = self._answer.receive(response, time.monotonic())
        if news:
            self._retry.progress()
            self._client._is_known = True
        return news

    def _failed(self, error: KvRelayError) -> float:
        """Returns the seconds until the next call. Raises the error when there is no further
        call.
        """
        try:
            seconds = self._retry.failed(error, time.monotonic())
        except KvRelayError as told:
            # The next read raises it again.
            self._error = told
            raise
        tell(error, seconds)
        return seconds

    def _is_ended(self) -> bool:
        """Whether the stream was cancelled or its client closed."""
        return self._error is not None or self._client._closed

    def _left(self) -> None:
        if self._error is None and not self._answer.finished:
            self._error = Cancelled("the stream was closed before the answer was complete")

    def _take(self, response: wire.GenerateResponse | None = None) -> Iterator[Token]:
        """Yields the tokens that the caller has not read yet, including those of `response`. Tokens
        that the caller does not request stay in the queue.
        """
        if response is not None:
            self._untaken.extend(tokens_of(response))
        while self._untaken:
            yield self._untaken.popleft()

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        # gRPC's locks may not survive a fork.
        if call is not None and not self._client._forked:
            call.cancel()
