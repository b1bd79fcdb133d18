"""The HTTP protocol by itself: what it reads does not depend on how it arrives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from router.api.http.connections import connection as http_connection
from router.api.http.connections.connection import (
    MAX_HEAD_BYTES,
    MAX_UNPARSED,
    BoundedProtocol,
)
from router.api.http.connections.read_turns import ReadTurns


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reading = True
        self.closed = False
        self.ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        assert not self.ended
        self.written += bytes(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Tells what it was asked."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    told = {
        "method": scope["method"],
        "path": scope["path"],
        "query": scope["query_string"].decode(),
        "headers": [[name.decode(), value.decode()] for name, value in scope["headers"]],
        "body": body.decode("latin-1"),
    }
    data = json.dumps(told).encode()
    length = str(len(data)).encode()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
    )
    await send({"type": "http.response.body", "body": data})


def connected(
    app: Callable[[Scope, Receive, Send], Awaitable[None]] = echo,
) -> tuple[BoundedProtocol, Transport]:
    protocol, transport = (
        BoundedProtocol(Config(app, access_log=False), ServerState(), {}),
        Transport(),
    )
    protocol.idle = {}
    protocol.turns = ReadTurns()
    protocol.connection_made(transport)
    return protocol, transport


async def answers(parts: list[bytes]) -> bytes:
    """What comes back for these parts, each of which arrives once the loop has been idle."""
    protocol, transport = connected()
    for part in parts:
        protocol.data_received(part)
        await settled(protocol, transport)
    protocol.connection_lost(None)
    return transport.written


async def settled(protocol: BoundedProtocol, transport: Transport) -> None:
    """Returns when nothing more happens by itself."""
    for _ in range(1000):
        before = transport.written, transport.closed
        for _ in range(10):
            await asyncio.sleep(0)
        if before == (transport.written, transport.closed):
            return
    raise AssertionError("the protocol does not come to rest")


def told(written: bytes) -> list[dict[str, object]]:
    """The bodies of the answers."""
    bodies = []
    while written:
        head, _, rest = written.partition(b"\r\n\r\n")
        lengths = [
            line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        ]
        length = int(lengths[0].split(b":")[1])
        bodies.append(json.loads(rest[:length]))
        written = rest[length:]
    return bodies


HOST = b"host: a\r\n"
REQUESTS = {
    "get": b"GET /a?b=c HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute": b"GET http://u/a?b=c HTTP/1.1\r\n" + HOST + b"\r\n",
    "length": b"POST /b HTTP/1.1\r\n" + HOST + b"content-length: 5\r\n\r\nhello",
    "chunks": b"POST /c HTTP/1.1\r\n"
    + HOST
    + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n",
    "upgrade": b"POST /d HTTP/1.1\r\n"
    + HOST
    + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 5\r\n\r\nhello",
    "upgrade get": b"GET /e HTTP/1.1\r\n" + HOST + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n",
    "blank lines": b"\r\n\r\nGET /f HTTP/1.1\r\n" + HOST + b"\r\n",
    "no length": b"POST /g HTTP/1.1\r\n" + HOST + b"\r\n",
}
REFUSED = {
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
    "version 2": (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", 505),
    "version 3": (b"GET / HTTP/3.0\r\n" + HOST + b"\r\n", 505),
    "version 0.9": (b"GET /\r\n\r\n", 505),
    "preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "a URL with a user": (b"GET http://u@a/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a name": (b"GET a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "CONNECT": (b"CONNECT a:1 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    "two lengths": (
        b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab",
        400,
    ),
    "length and chunks": (
        b"POST / HTTP/1.1\r\n"
        + HOST
        + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "not the last coding": (
        b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked, x\r\n\r\n",
        400,
    ),
    "another coding": (
        b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        501,
    ),
    "coding twice": (
        b"POST / HTTP/1.1\r\n"
        + HOST
        + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        501,
    ),
    "space before colon": (b"GET / HTTP/1.1\r\nhost : a\r\n\r\n", 400),
    "bare CR": (b"GET / HTTP/1.1\rhost: a\r\n\r\n", 400),
    "long line": (b"GET /" + b"a" * 30_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431),
}
# Words of the errors that the status does not explain.
REASONS = {
    "no host": "it has 0 headers Host; send one",
    "two hosts": "it has 2 headers Host; send one",
    "a URL with a user": "its target is neither a path",
    "a name": "Invalid characters in url",
    "CONNECT": "CONNECT is for a proxy",
    "not HTTP": "Invalid method encountered",
    "two lengths": "Duplicate Content-Length",
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_is_answered(name: str) -> None:
    (body,) = told(await answers([REQUESTS[name]]))
    assert body["body"] == ("hello" if b"hello" in REQUESTS[name] or name == "chunks" else "")
    if name in ("get", "absolute"):
        assert (body["path"], body["query"]) == ("/a", "b=c")
        assert body["headers"] == [["host", "a" if name == "get" else "u"]]


@pytest.mark.parametrize("size", [MAX_HEAD_BYTES - 200, MAX_HEAD_BYTES + 1, MAX_HEAD_BYTES + 700])
async def test_the_bound_of_a_head_does_not_depend_on_its_cuts(size: int) -> None:
    head = b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * size + b"\r\n\r\n"
    found = []
    for cut in (len(head), 1, 1000, 2048, MAX_HEAD_BYTES - 100, len(head) - 1):
        protocol, transport = connected()
        for part in filter(None, (head[:cut], head[cut:])):
            protocol.data_received(part)
            await settled(protocol, transport)
        (answer,) = told(transport.written)
        found.append("error" in answer)
        protocol.connection_lost(None)
    assert found == [size > MAX_HEAD_BYTES] * len(found)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.sampled_from(sorted(REQUESTS)), min_size=1, max_size=6), st.data())
def test_answers_do_not_depend_on_how_requests_are_cut(
    names: list[str], data: st.DataObject
) -> None:
    whole = b"".join(REQUESTS[name] for name in names)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=12)))
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    alone = [told(asyncio.run(answers([REQUESTS[name]])))[0] for name in names]
    assert told(asyncio.run(answers(parts))) == alone


@pytest.mark.parametrize("before", ["", "get", "chunks"])
@pytest.mark.parametrize("name", REFUSED)
async def test_a_bad_request_is_refused_once_earlier_ones_are_answered(
    name: str, before: str
) -> None:
    request, status = REFUSED[name]
    good = REQUESTS.get(before, b"")
    for cut in (len(good), len(good) + 3, None):
        whole = good + request
        parts = [whole] if cut is None else [whole[:cut], whole[cut:]]
        protocol, transport = connected()
        for part in filter(None, parts):
            protocol.data_received(part)
            await settled(protocol, transport)
        *first, last = told(transport.written)
        assert len(first) == bool(before)
        error = last["error"]
        assert isinstance(error, dict)
        assert (error["code"], error["type"]) == (status, "invalid_request_error")
        if status == 400:
            words = f"this is not an HTTP/1.1 request: {REASONS.get(name, '')}"
            assert error["message"].startswith(words)
        assert transport.ended
        protocol.connection_lost(None)


@pytest.mark.parametrize("name", [*REQUESTS, *REFUSED])
@pytest.mark.parametrize("waits", [False, True])
async def test_a_shutdown_at_any_byte_of_a_request(name: str, waits: bool) -> None:
    """The connection ends with what has been answered, and whatever still comes is not written
    about.
    """
    request = REQUESTS.get(name) or REFUSED[name][0]
    for cut in range(0, len(request) + 1, max(1, len(request) // 200)):
        protocol, transport = connected()
        protocol.data_received(request[:cut])
        if waits:
            await settled(protocol, transport)
        protocol.shutdown()
        await settled(protocol, transport)
        if not transport.closed:
            protocol.data_received(request[cut:])
        assert transport.closed or transport.ended
        protocol.connection_lost(None)


async def test_a_bad_chunk_is_refused_while_the_request_is_processed() -> None:
    request = REQUESTS["chunks"].replace(b"3;x=y", b"zz")
    protocol, transport = connected()
    protocol.data_received(request)
    await settled(protocol, transport)
    (body,) = told(transport.written)
    assert isinstance(body["error"], dict)
    assert transport.ended
    protocol.connection_lost(None)


@pytest.mark.parametrize("name", ["trailer", "trailers", "chunk extension"])
async def test_what_frames_a_body_is_bounded(name: str) -> None:
    """Its parsing has a cost, and nobody needs more of it."""
    endless = {
        "trailer": (b"0\r\nx: ", b"a" * 2**16),
        "trailers": (b"0\r\n", b"x: a\r\n" * 2**14),
        "chunk extension": (b"5;", b"x" * 2**16),
    }
    first, again = endless[name]
    protocol, transport = connected()
    protocol.data_received(REQUESTS["chunks"].partition(b"2\r\n")[0] + first)
    taken = 0
    while not transport.ended:
        assert taken < 2**20
        protocol.data_received(again)
        taken += len(again)
        await settled(protocol, transport)
    (body,) = told(transport.written)
    assert isinstance(body["error"], dict)
    assert body["error"]["code"] == 431
    protocol.connection_lost(None)


@pytest.mark.parametrize("behind", ["", "get", "length", "part of a head", "part of a body"])
async def test_a_client_that_leaves_cancels_its_request(behind: str) -> None:
    """Whatever it has sent behind the request."""
    left = asyncio.Event()

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        left.set()

    protocol, transport = connected(waiting)
    more = {"part of a head": b"GET / HT", "part of a body": REQUESTS["length"][:-2], "": b""}
    protocol.data_received(REQUESTS["get"] + (more | REQUESTS)[behind])
    await settled(protocol, transport)
    assert not left.is_set()
    protocol.connection_lost(None)
    async with asyncio.timeout(60):
        await left.wait()
    assert len(protocol.server_state.tasks) <= 1


async def test_a_bad_chunk_behind_a_request_waits_for_the_answer() -> None:
    go_on = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        await echo(scope, receive, send)

    protocol, transport = connected(slow)
    protocol.data_received(REQUESTS["get"] + REQUESTS["chunks"].replace(b"3;x=y", b"zz"))
    await settled(protocol, transport)
    assert not transport.written
    go_on.set()
    await settled(protocol, transport)
    first, last = told(transport.written)
    assert first["path"] == "/a"
    assert isinstance(last["error"], dict)
    protocol.connection_lost(None)


async def test_a_long_answer_outlives_the_timeout_of_the_request_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_connection, "RECEIVE_S", 0.01)
    go_on = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        await echo(scope, receive, send)

    for more in (b"GET / HT", REQUESTS["length"][:-2]):
        go_on.clear()
        protocol, transport = connected(slow)
        protocol.data_received(REQUESTS["get"] + more)
        await asyncio.sleep(0.1)
        assert not transport.closed
        go_on.set()
        await settled(protocol, transport)
        assert told(transport.written)[0]["path"] == "/a"
        protocol.connection_lost(None)


async def test_an_answer_before_the_end_of_its_request_is_the_only_one() -> None:
    async def early(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    head, _, chunks = REQUESTS["chunks"].partition(b"\r\n\r\n")
    protocol, transport = connected(early)
    protocol.data_received(head + b"\r\n\r\n")
    await settled(protocol, transport)
    assert told(transport.written) == [{}]
    assert protocol.timeout_keep_alive_task is None, "the rest of the request may still come"
    protocol.data_received(chunks)
    await settled(protocol, transport)
    assert protocol.timeout_keep_alive_task is not None
    protocol.data_received(head + b"\r\n\r\n")
    await settled(protocol, transport)
    protocol.data_received(b"zz\r\n")
    await settled(protocol, transport)
    assert told(transport.written) == [{}, {}]
    assert transport.ended
    protocol.connection_lost(None)


@pytest.mark.parametrize("upgrade", [b"", b"connection: upgrade\r\nupgrade: h2c\r\n"])
async def test_a_client_of_http_1_0_gets_what_it_understands(upgrade: bytes) -> None:
    async def unsized(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(3):
            part = b"part %d," % number
            await send({"type": "http.response.body", "body": part, "more_body": number < 2})

    protocol, transport = connected(unsized)
    request = b"POST / HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 1\r\n" + upgrade
    protocol.data_received(request + b"\r\na")
    await settled(protocol, transport)
    head, _, body = transport.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"chunked" not in head
    assert b"connection: close" in head
    assert body == b"part 0,part 1,part 2,"
    assert transport.closed
    protocol.connection_lost(None)


async def test_trailers_are_not_taken_for_headers() -> None:
    request = REQUESTS["chunks"].replace(b"0\r\n\r\n", b"0\r\nauthorization: x\r\n\r\n")
    (body,) = told(await answers([request]))
    assert body["headers"] == [["host", "a"], ["transfer-encoding", "chunked"]]


async def test_requests_behind_another_wait_unparsed() -> None:
    begun, go_on = 0, asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal begun
        begun += 1
        await go_on.wait()
        await echo(scope, receive, send)

    protocol, transport = connected(slow)
    number = 10_000
    for _ in range(10):
        protocol.data_received(REQUESTS["get"] * (number // 10))
        await settled(protocol, transport)
    assert begun == 1
    assert len(protocol.pipeline) < 100
    assert transport.reading == (number * len(REQUESTS["get"]) < MAX_UNPARSED)
    go_on.set()
    while len(transport.written) < number:
        await asyncio.sleep(0)
    await settled(protocol, transport)
    assert len(told(transport.written)) == number
    assert transport.reading
    protocol.connection_lost(None)
