"""uvicorn's HTTP/1.1 protocol, with bounds against clients that only keep connections busy."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Hashable
from functools import partial
from typing import Any, Literal

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from kvrelay.errors import Code
from router.api.http.connections.read_turns import ReadTurns
from router.api.http.encoding import to_json
from router.process import open_files
from router.runtime.stream_reader import SLOW_READER_S

# Connections of one listener.
MAX_CONNECTIONS = 4096
# Size of the request line and headers.
MAX_HEAD_BYTES = 16 * 2**10
MAX_HEAD_LINES = 256
# Number of chunks that a body may have at any size. Above it, chunks must have CHUNK_BYTES on
# average.
FREE_CHUNKS = 256
CHUNK_BYTES = 256
# Timeout for a request, from its first byte (or from the connection) to its last.
RECEIVE_S = 30.0
# A refused client may send this much longer and more before the connection is closed. Closing at
# once could destroy the refusal before the client reads it.
LINGER_S = 1.0
LINGER_BYTES = 2**20
# Received bytes that wait for the answer to an earlier request of the connection.
MAX_UNPARSED = 64 * 2**10
# Bytes of a chunk besides its data.
_CHUNK_FRAMING = 32
# Bytes that are parsed at once. A piece may hold several requests.
_PIECE = 2048
_VERSIONS = ("1.0", "1.1")
_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)((?:[/?][^#]*)?)", re.IGNORECASE)
_WORDS = {
    400: "this is not an HTTP/1.1 request",
    408: f"the request did not come within {RECEIVE_S:g} s",
    413: f"the body comes in many small chunks; send at least {CHUNK_BYTES} bytes in each",
    431: f"the request's headers are over {MAX_HEAD_BYTES} bytes or {MAX_HEAD_LINES} lines",
    501: "the body has a transfer coding besides chunked; send it as it is, or chunked",
    503: "the router is shutting down; send the request to another router",
    505: "the request is not HTTP/1; send it as HTTP/1.1",
}


class _Refused(Exception):
    """A request that gets an error of the connection. Raised in the parser's callbacks."""

    def __init__(self, status: int, reason: str = "") -> None:
        """reason: what is wrong with a request of a status that does not say it."""
        super().__init__(f"{_WORDS[status]}: {reason}" if reason else _WORDS[status])
        self.status = status


def _refused(error: httptools.HttpParserError) -> _Refused:
    """Returns the refusal of a request that the parser, or a callback of the parser, rejects."""
    cause = error.__context__
    if isinstance(cause, _Refused):
        return cause
    # The second is the preface of HTTP/2.
    if str(error) in ("Invalid HTTP version", "Pause on PRI/Upgrade"):
        return _Refused(505)
    return _Refused(400, str(error))


def most_connections() -> int:
    """Returns the limit on open connections."""
    return min(MAX_CONNECTIONS, open_files() // 2)


class BoundedProtocol(HttpToolsProtocol):
    """Adds bounds to uvicorn's protocol.

    uvicorn bounds the idle time between two requests of a connection and the memory of each
    connection. It does not bound the time that a request takes to arrive, the time that an answer
    stays unread, or the number of connections. The parser bounds neither a head nor the chunks and
    trailers of a body, and it takes all requests that have arrived at once.

    An answer may come before its request is complete. The rest of the request is then discarded.
    """

    # The listener's connections without a running request, oldest first.
    idle: dict[BoundedProtocol, None]
    # Shared by the listener's connections.
    turns: ReadTurns

    def __init__(self, config: Config, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self._receiving: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        # Received and not parsed yet.
        self._unparsed = b""
        # Whether the connection waits for its read turn.
        self._waits = False
        # The part of a request that comes next; None between two requests.
        self._part: Literal["head", "body"] | None = None
        self._head_bytes = 0
        self._chunks = 0
        self._body_bytes = 0
        # Bytes of a body's chunk headers and trailers, and of the body in the last piece.
        self._framing_bytes = 0
        self._piece_body = 0
        # The request that is being answered. Later requests of the connection wait in `pipeline`.
        self._running: RequestResponseCycle | None = None
        # Bytes that may still be discarded; None before the connection is refused.
        self._linger_bytes: int | None = None
        # Status of a refusal that waits for answers to earlier requests.
        self._refusal: _Refused | None = None

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the receive timeout. Above `most_connections`, aborts the oldest idle connection,
        or this connection if none is idle.
        """
        super().connection_made(transport)
        if len(self.connections) > most_connections() and not self._make_room():
            transport.abort()
            return
        self.idle[self] = None
        self._receiving = self.loop.call_later(RECEIVE_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the connection's timeouts and its requests."""
        self._received()
        self.idle.pop(self, None)
        self._unparsed = b""
        self.pipeline.clear()
        if self._running is not None:
            self._disconnect(self._running)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads the data when it is this connection's turn. Receives nothing more until then."""
        if self._linger_bytes is not None:
            self._linger_bytes -= len(data)
            if self._linger_bytes < 0:
                self.transport.close()
            return
        self._unparsed += data
        self._take_turn()

    def _take_turn(self) -> None:
        if not self._waits and not self.turns.take(self._who(), self._read):
            self._waits = True
            self.transport.pause_reading()

    def _who(self) -> Hashable:
        """Returns the tenant of the connection's last request, or the client's address before the
        first request.
        """
        tenant = self.scope["state"].get("tenant") if self.scope else None
        return tenant.name if tenant else (self.client[0] if self.client else None, None)

    def _read(self) -> None:
        """Parses what has arrived, up to the end of a request that is not answered yet."""
        self._waits = False
        data, self._unparsed = self._unparsed, b""
        start = 0
        while start < len(data) and self._may_parse:
            start += self._parse(data[start : start + _PIECE])
        if self.transport.is_closing() or self._linger_bytes is not None:
            return
        self._unparsed = data[start:]
        if len(self._unparsed) >= MAX_UNPARSED:
            self.transport.pause_reading()
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    @property
    def _may_parse(self) -> bool:
        if self.transport.is_closing() or self._linger_bytes is not None:
            return False
        return self._refusal is None and (self._part is not None or not self._answering)

    @property
    def _answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    @property
    def _answering_earlier(self) -> bool:
        """Whether a request before the one that arrives is being answered."""
        return self._answering and not (self._part == "body" and self.cycle is self._running)

    def _parse(self, piece: bytes) -> int:
        """Returns the number of bytes that the parser has taken."""
        if self._part != "body":
            self._head_bytes += len(piece)
        self._piece_body = 0
        try:
            self.parser.feed_data(piece)
            if self._part == "head" and self._head_bytes > MAX_HEAD_BYTES:
                raise _Refused(431)
            if self._part == "body":
                self._framing_bytes += len(piece) - self._piece_body
                if self._framing_bytes > MAX_HEAD_BYTES + self._chunks * _CHUNK_FRAMING:
                    raise _Refused(431)
        except httptools.HttpParserUpgrade as upgrade:
            # The parser has stopped behind the head.
            self._stay_with_http1()
            return int(upgrade.args[0])
        except httptools.HttpParserError as error:
            self._refuse(_refused(error))
        except _Refused as error:
            self._refuse(error)
        return len(piece)

    def _stay_with_http1(self) -> None:
        """Parses the head of the request again without its Upgrade header, which a server may
        ignore. With the header, the parser takes the body for another protocol's.
        """
        kept = [(name, value) for name, value in self.headers if name != b"upgrade"]
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in kept]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._parse(b"\r\n".join(lines) + b"\r\n\r\n")

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        """Starts the receive timeout of a request."""
        self._unset_keepalive_if_required()
        self._part = "head"
        self._chunks = self._body_bytes = self._framing_bytes = 0
        if self._receiving is None:
            self._receiving = self.loop.call_later(RECEIVE_S, self._too_slow)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header. Ignores trailers, which follow a body in chunks."""
        if self._part == "body":
            return
        super().on_header(name, value)
        if len(self.headers) > MAX_HEAD_LINES:
            raise _Refused(431)

    def on_headers_complete(self) -> None:
        """Starts the request. A request of HTTP/1.1 names its host once (RFC 9112, 3.2)."""
        self._head_bytes = 0
        # The last piece may hold the end of a large head, and what follows it.
        lines = sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.url) + lines > MAX_HEAD_BYTES:
            raise _Refused(431)
        version = self.parser.get_http_version()
        if version not in _VERSIONS:
            raise _Refused(505)
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (version == "1.1" and not hosts):
            raise _Refused(400, f"it has {hosts} headers Host; send one")
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if any(one.strip().lower() != b"chunked" for one in codings):
            raise _Refused(501)
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise _Refused(400, "CONNECT is for a proxy, which this is not")
            return
        if not self.url.startswith(b"/"):
            self._to_origin_form()
        if version == "1.0":
            # A client of HTTP/1.0 does not understand 100 Continue (RFC 9110, 10.1.1).
            self.expect_100_continue = False
        super().on_headers_complete()
        self._part = "body"
        self.idle.pop(self, None)

    def _to_origin_form(self) -> None:
        """Takes the path of a target that is a whole URL. The URL's authority replaces the header
        Host (RFC 9112, 3.2.2), so that no check sees another host.
        """
        absolute = _ABSOLUTE.fullmatch(self.url)
        if absolute is None:
            raise _Refused(400, "its target is neither a path, which begins with /, nor a URL")
        host, path = absolute.groups()
        self.url = path if path.startswith(b"/") else b"/" + path
        self.headers[:] = [(b"host", host), *(one for one in self.headers if one[0] != b"host")]

    def on_chunk_header(self) -> None:
        """Counts a chunk."""
        self._chunks += 1
        if self._chunks > FREE_CHUNKS + self._body_bytes // CHUNK_BYTES:
            raise _Refused(413)

    def on_body(self, body: bytes) -> None:
        """Takes a part of a body."""
        self._body_bytes += len(body)
        self._piece_body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the receive timeout."""
        if self.parser.should_upgrade():
            return
        self._part = None
        self._received()
        super().on_message_complete()
        if not self._answering:
            self._keep_alive()

    # Answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        unchunked = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, partial(_unchunked, app, cycle) if unchunked else app)

    def on_response_complete(self) -> None:
        """Marks the connection as idle, and goes on with what has arrived."""
        if not self.transport.is_closing():
            self.idle[self] = None
        super().on_response_complete()
        if self._part is not None:
            # The rest of the request still arrives, within the receive timeout.
            self._unset_keepalive_if_required()
        if self._answering:
            self.idle.pop(self, None)
        elif self._refusal is not None:
            self._refuse(self._refusal)
        elif self._unparsed:
            self._take_turn()

    def pause_writing(self) -> None:
        """Pauses writing and aborts the connection if it lasts SLOW_READER_S."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(SLOW_READER_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Resumes writing and cancels the slow reader's timeout."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def shutdown(self) -> None:
        """Refuses a request that still arrives, and closes the connection after the answers."""
        if self._linger_bytes is not None:
            # It has been refused.
            self.transport.close()
            return
        arrives = self._part == "head" or (self._part == "body" and not self.cycle.response_started)
        if arrives and not self._answering_earlier:
            self._refuse(_Refused(503))
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """Closes the idle connection, unless the client is still reading the last answer."""
        if self.transport.get_write_buffer_size():
            self._keep_alive()
        else:
            super().timeout_keep_alive_handler()

    def _keep_alive(self) -> None:
        """Starts the timeout for the next request of the connection."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _make_room(self) -> bool:
        """Aborts the connection that has been idle for longest. Returns False if no connection is
        idle.
        """
        oldest = next(iter(self.idle), None)
        if oldest is not None:
            del self.idle[oldest]
            oldest.transport.abort()
        return oldest is not None

    def _received(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _too_slow(self) -> None:
        self._receiving = None
        if self._answering_earlier:
            # The connection reads only a part of the next request in the meantime.
            self._receiving = self.loop.call_later(RECEIVE_S, self._too_slow)
        elif self._part == "head":
            self._refuse(_Refused(408))
        # No byte has arrived, or the request is being processed.
        else:
            self.transport.abort()

    def _refuse(self, refused: _Refused) -> None:
        """Answers a request with an error unless its answer has begun, and closes the connection.
        Waits until earlier requests are answered.
        """
        self._refusal = None
        begun = self._part == "body"
        if self._answering_earlier:
            if begun:
                self.pipeline.popleft()
            self._refusal = refused
            return
        if begun:
            # The request is being processed while its body arrives.
            self._disconnect(self.cycle)
        if not (begun and self.cycle.response_started):
            self.transport.write(_refusal(refused))
        self._linger()

    @staticmethod
    def _disconnect(cycle: RequestResponseCycle) -> None:
        cycle.disconnected = not cycle.response_complete
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()

    def _linger(self) -> None:
        """Closes the connection after LINGER_S or LINGER_BYTES, and discards what arrives until
        then.
        """
        self._linger_bytes = LINGER_BYTES
        self._received()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)


async def _unchunked(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Runs the app for a client of HTTP/1.0, which does not understand chunks. An answer without a
    length ends with the connection.
    """

    unsized = False

    async def sent(message: Message) -> None:
        nonlocal unsized
        if message["type"] == "http.response.start":
            unsized = all(name.lower() != b"content-length" for name, _ in message["headers"])
            if unsized:
                cycle.chunked_encoding = False
        elif unsized:
            # The bytes that uvicorn allows in this message.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, sent)


def _refusal(refused: _Refused) -> bytes:
    """Returns an answer in the shape of all errors."""
    error = {
        "message": str(refused),
        "type": Code.UNAVAILABLE.openai_type if refused.status == 503 else "invalid_request_error",
        "param": None,
        "code": refused.status,
    }
    body = to_json({"error": error}).encode()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return STATUS_LINE[refused.status] + f"{head}connection: close\r\n\r\n".encode() + body
