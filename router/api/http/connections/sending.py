"""Sends answers to HTTP clients: whole bodies, and streams of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.errors import Cancelled, KvRelayError
from kvrelay.process.telemetry import get_logger
from router.api.http.choices import Choices
from router.api.http.dialects.dialect import AnswerShape
from router.api.http.error_responses import unexpected

# Size up to which a body is written at once.
_ONE_PART_BYTES = 2**16
# nginx reads the second header.
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
T = TypeVar("T")

log = get_logger("router.http")


class JsonParts(Response):
    """A JSON body that is written part by part: an answer with logprobs may have many megabytes."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes], headers: dict[str, str]) -> None:
        length = sum(map(len, parts))
        super().__init__(headers=headers | {"content-length": str(length)})
        self._parts = parts if length > _ONE_PART_BYTES else [b"".join(parts)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        *parts, last = self._parts
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": last})


class EventStream(Response):
    """An event stream. It cancels its choices if the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, choices: Choices, events: AsyncIterator[str]) -> None:
        super().__init__(headers=_STREAM_HEADERS | {"x-kvrelay-path": choices.path or ""})
        del self.headers["content-length"]
        self._choices = choices
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._cancel_when_gone(receive))
        try:
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(head)
            async for text in self._events:
                body = {"type": "http.response.body", "body": text.encode(), "more_body": True}
                await send(body)
            await send({"type": "http.response.body", "body": b""})
        finally:
            watch.cancel()
            self._choices.cancel()

    async def _cancel_when_gone(self, receive: Receive) -> None:
        await _gone(receive)
        self._choices.cancel()


async def events(choices: Choices, shape: AnswerShape, request_id: str) -> AsyncIterator[str]:
    """Yields the server-sent events of a stream. Closing the generator cancels the choices."""
    try:
        if begin := shape.begin():
            yield begin
        async with aclosing(choices.responses()) as responses:
            async for index, response, logprobs in responses:
                if chunk := shape.chunk(index, response, logprobs):
                    yield chunk
        yield shape.end()
    except KvRelayError as error:
        yield shape.failed(error)
    except Exception:
        log.exception("unexpected_error", request=request_id)
        yield shape.failed(unexpected(request_id))
    finally:
        choices.cancel()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client disconnects, cancels `work` and raises
    Cancelled.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client closed the connection")
        return await task
    finally:
        for one in (task, watch):
            one.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
