"""Workers without an engine for routers of other projects: HTTP servers that stream completions at
a fixed pace, as OpenAI's API has them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, cast

import httptools

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
# What routers ask a worker about itself.
_ABOUT = {"status": "ok", "object": "list", "data": [{"id": "demo", "object": "model"}]}


@dataclass(slots=True)
class _Completion:
    request_id: str
    max_tokens: int
    connection: asyncio.Transport
    produced: int = 0


class HttpWorker:
    """One worker. Each step gives each of its completions one more event with `word`.

    `said` receives, for each request, the time.perf_counter time at which each token was written.
    A request is known by its field `user`, which routers pass on.
    """

    def __init__(self, word: bytes, said: defaultdict[str, list[float]]) -> None:
        self.url = ""
        self._said = said
        self._running: list[_Completion] = []
        choice = {"index": 0, "text": word.decode(), "logprobs": None, "finish_reason": None}
        event = {
            "id": "cmpl-0123456789abcdef0123456789abcdef",
            "object": "text_completion",
            "created": 1_700_000_000,
            "model": "demo",
            "choices": [choice],
        }
        self._event = _chunk(f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode())
        self._end = _chunk(b"data: [DONE]\n\n") + _chunk(b"")
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Binds a free port of the loopback interface, and sets `url`."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self), "127.0.0.1", 0
        )
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """Takes no more connections."""
        assert self._server is not None
        self._server.close()

    def step(self) -> None:
        """Writes one event of each completion."""
        going_on = []
        for one in self._running:
            if one.connection.is_closing():
                continue
            self._said[one.request_id].append(time.perf_counter())
            one.produced += 1
            is_last = one.produced >= one.max_tokens
            one.connection.write(self._event + self._end if is_last else self._event)
            if not is_last:
                going_on.append(one)
        self._running = going_on

    def begin(self, request: dict[str, Any], connection: asyncio.Transport) -> None:
        """Begins a completion with the next step."""
        connection.write(_STREAM_HEAD)
        self._running.append(_Completion(request["user"], request["max_tokens"], connection))


class _Connection(asyncio.Protocol):
    """One connection of a router."""

    def __init__(self, worker: HttpWorker) -> None:
        self._worker = worker
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have no base class in common with asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            # Routers also ask whether a worker speaks HTTP/2, as gRPC does.
            self._transport.close()

    def on_body(self, part: bytes) -> None:
        self._body += part

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        if self._parser.get_method() == b"POST":
            self._worker.begin(json.loads(body), self._transport)
            return
        answer = json.dumps(_ABOUT).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(answer)}"
        self._transport.write(head.encode() + b"\r\n\r\n" + answer)


def _chunk(data: bytes) -> bytes:
    """A chunk of HTTP/1.1's chunked transfer coding (RFC 9112, 7.1)."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
