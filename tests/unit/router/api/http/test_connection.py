"""What the HTTP port bears: slow and endless requests, readers that do not read, and browsers sent
by another site.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Hashable

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from support.router_harness import DEMO, RouterHarness, running_router
from uvicorn import Config
from uvicorn.server import ServerState

import router.api.http.body
import router.api.http.connections.acceptor
import router.api.http.connections.connection
import router.api.http.connections.read_turns
import router.api.http.json_parser
import router.api.http.server
import router.frontend.tokenization
from kvrelay.errors import ResourceExhausted
from kvrelay.tenants import ANONYMOUS
from router.api.http.connections.connection import BoundedProtocol
from router.api.http.connections.read_turns import ReadTurns
from router.frontend.tokenization import Text


@pytest.fixture
async def cluster() -> AsyncIterator[RouterHarness]:
    async with running_router(prefill=0) as running:
        yield running


async def connect(cluster: RouterHarness) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = cluster.http.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def rest(reader: asyncio.StreamReader) -> tuple[int, dict[str, object]]:
    """(status, error) of the answer, up to the end of the connection; (0, {}) if it ends without
    one.
    """
    async with asyncio.timeout(60):
        raw = await reader.read()
    if not raw:
        return 0, {}
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    error: dict[str, object] = json.loads(body)["error"]
    return int(head.split()[1]), error


def head(cluster: RouterHarness, line: str, *more: str) -> bytes:
    host = cluster.http.removeprefix("http://")
    return "".join(f"{one}\r\n" for one in (f"{line} HTTP/1.1", f"host: {host}", *more)).encode()


async def test_a_body_with_two_lengths_is_refused_and_nothing_behind_it_is_read(
    cluster: RouterHarness,
) -> None:
    reader, writer = await connect(cluster)
    smuggled = head(cluster, "GET /version") + b"\r\n"
    both = ("content-length: 5", "transfer-encoding: chunked")
    writer.write(head(cluster, "POST /detokenize", *both) + b"\r\n0\r\n\r\n" + smuggled)
    status, error = await rest(reader)
    assert (status, error["type"]) == (400, "invalid_request_error")
    writer.close()


@pytest.mark.parametrize("version", ["HTTP/2.0", "HTTP/0.9", "HTTP/3.0"])
async def test_another_major_version_of_http_is_refused(
    cluster: RouterHarness, version: str
) -> None:
    reader, writer = await connect(cluster)
    host = cluster.http.removeprefix("http://")
    writer.write(f"GET /version {version}\r\nhost: {host}\r\n\r\n".encode())
    status, error = await rest(reader)
    assert (status, error["code"], error["type"]) == (505, 505, "invalid_request_error")
    writer.close()


@pytest.mark.parametrize(
    ("target", "header", "status"),
    [
        ("http://{}/v1/models", "{}", 200),
        ("HTTP://{}/v1/models?a=b", "{}", 200),
        ("http://{}/v1/models", "evil.example", 200),
        ("http://evil.example/v1/models", "{}", 403),
        ("http://{}", "{}", 200),
        ("http://{}?a", "{}", 200),
        ("http:///v1/models", "{}", 400),
        ("http://me@{}/v1/models", "{}", 400),
        ("ftp://{}/v1/models", "{}", 400),
    ],
)
async def test_a_target_may_be_a_whole_url_whose_host_counts(
    cluster: RouterHarness, target: str, header: str, status: int
) -> None:
    reader, writer = await connect(cluster)
    host = cluster.http.removeprefix("http://")
    lines = (
        *(f"GET {target.format(host)} HTTP/1.1", f"host: {header.format(host)}"),
        *("connection: close", "", ""),
    )
    writer.write("\r\n".join(lines).encode())
    async with asyncio.timeout(20):
        assert (await reader.read()).split()[1] == str(status).encode()
    writer.close()


@pytest.mark.parametrize("sent", ["", "GET /vers"])
async def test_a_connection_that_sends_no_whole_request_is_ended(
    cluster: RouterHarness, monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    monkeypatch.setattr(router.api.http.connections.connection, "RECEIVE_S", 0.2)
    reader, writer = await connect(cluster)
    if sent:
        writer.write(head(cluster, sent, "x-more: 1"))
    status, error = await rest(reader)
    assert status == (408 if sent else 0)
    if sent:
        assert (error["type"], error["code"]) == ("invalid_request_error", 408)
    writer.close()


async def test_headers_byte_by_byte_do_not_hold_a_connection(
    cluster: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.api.http.connections.connection, "RECEIVE_S", 0.3)
    reader, writer = await connect(cluster)
    writer.write(head(cluster, "GET /version"))
    answer = asyncio.create_task(rest(reader))
    while not answer.done():
        writer.write(b"x-slow: 1\r\n")
        await asyncio.sleep(0.02)
    assert (await answer)[0] == 408
    writer.close()


async def test_a_second_request_of_a_connection_has_its_own_time(
    cluster: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.api.http.connections.connection, "RECEIVE_S", 1.0)
    reader, writer = await connect(cluster)
    begun = asyncio.get_running_loop().time()
    async with asyncio.timeout(60):
        while asyncio.get_running_loop().time() < begun + 1.2:
            writer.write(head(cluster, "GET /version") + b"\r\n")
            assert b"200" in await reader.readline()
            await reader.readuntil(b"}")
            await asyncio.sleep(0.05)
    writer.write(b"GET /ver")
    assert (await rest(reader))[0] == 408
    writer.close()


async def test_a_body_that_does_not_come_is_not_waited_for(
    cluster: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.api.http.body, "RECEIVE_S", 0.2)
    reader, writer = await connect(cluster)
    writer.write(head(cluster, "POST /v1/completions", "content-length: 100") + b'\r\n{"model"')
    assert (await rest(reader))[0] == 408
    writer.close()


async def test_a_body_that_nobody_reads_does_not_hold_a_connection(
    cluster: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.api.http.connections.connection, "RECEIVE_S", 0.3)
    reader, writer = await connect(cluster)
    writer.write(head(cluster, "GET /version", "content-length: 1000000") + b"\r\n")
    ended = asyncio.create_task(reader.read())
    async with asyncio.timeout(60):
        while not ended.done():
            writer.write(b"x")
            await asyncio.sleep(0.02)
    writer.close()


async def test_bodies_that_are_too_many_at_one_time_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router.api.http.body, "MAX_HELD_BYTES", 1000)
    async with running_router(prefill=0) as cluster:
        await refused_while_a_body_is_held(cluster)


async def test_bodies_that_take_turns_come_whole(
    cluster: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One piece of one of them in each round of the event loop."""
    monkeypatch.setattr(router.api.http.connections.read_turns, "SLICE_S", 0.0)
    texts = [f"{number} " * 20_000 for number in range(12)]
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as http:
        answers = await asyncio.gather(
            *(http.post("/tokenize", json={"prompt": text}) for text in texts)
        )
        for text, answer in zip(texts, answers, strict=True):
            assert (
                answer.json()["tokens"]
                == (await http.post("/tokenize", json={"prompt": text})).json()["tokens"]
            )
            back = await http.post("/detokenize", json={"tokens": answer.json()["tokens"]})
            assert back.json()["prompt"].endswith(text)


async def test_a_connection_is_read_in_the_turns_of_its_tenant(
    cluster: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has shown a token; until then in those of its address."""
    asked: list[Hashable] = []
    take = ReadTurns.take

    def seen(turns: ReadTurns, who: Hashable, read: Callable[[], None]) -> bool:
        asked.append(who)
        return take(turns, who, read)

    monkeypatch.setattr(ReadTurns, "take", seen)
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as http:
        for _ in range(3):
            assert (await http.get("/v1/models")).status_code == 200
    assert asked == [("127.0.0.1", None), ANONYMOUS.name, ANONYMOUS.name]


async def test_connections_that_come_at_one_moment_let_others_run(
    cluster: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []

    class Counted(BoundedProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            rounds.append(turn)
            super().connection_made(transport)

    monkeypatch.setattr(router.api.http.server, "BoundedProtocol", Counted)
    turn, most = 0, 0
    connecting = [asyncio.create_task(connect(cluster)) for _ in range(100)]
    while len(rounds) < 100:
        await asyncio.sleep(0)
        turn += 1
    most = max(rounds.count(one) for one in set(rounds))
    assert most <= 2 * router.api.http.connections.acceptor.PER_ROUND
    for one in connecting:
        (await one)[1].close()


BODY = 2**18  # bytes
KEPT = 4  # requests that are compared
NOT_PARSED = {
    "too many values": b'{"model":"demo","messages":[' + b"{}," * (BODY // 3) + b"{}]}",
    "repeated key": b'{"model":"demo","prompt":["' + b"a" * BODY + b'"],"model":"demo"}',
    "no JSON": b'{"prompt":"' + b"a" * BODY + b'"',
}
REFUSED = {
    "unknown field": b'{"model":"demo","promt":"' + b"a" * BODY + b'"}',
    "wrong type": b'{"model":"demo","prompt":{"a":"' + b"a" * BODY + b'"}}',
    "unknown model": b'{"model":"none","prompt":"' + b"a" * BODY + b'"}',
    "too long": b'{"model":"demo","prompt":"' + b"a " * (BODY // 2) + b'"}',
    "too many tokens": b'{"model":"demo","prompt":[' + b"11," * (BODY // 8) + b"11]}",
}
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize")


# One parser serves all paths.
@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("path", "why"),
    [(PATHS[0], why) for why in NOT_PARSED] + list(itertools.product(PATHS, REFUSED)),
)
async def test_a_refused_body_is_not_kept(
    cluster: RouterHarness, path: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the garbage collector comes by: it may take long, and stops the event loop for all that
    it finds.
    """
    monkeypatch.setattr(router.api.http.json_parser, "MAX_VALUES", 2**12)
    body = {**NOT_PARSED, **REFUSED}[why]
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as http:
        held: list[int] = []
        for number in range(KEPT + 1):
            if number == 1:  # the first one imports and caches
                gc.collect()
                gc.disable()
                tracemalloc.start()
            try:
                answer = await http.post(path, content=body)
                assert 400 <= answer.status_code < 500
                held.append(tracemalloc.get_traced_memory()[0])
            finally:
                if number == KEPT:
                    tracemalloc.stop()
                    gc.enable()
    # Something else may allocate beside one of the requests, but not beside each.
    assert min(after - before for before, after in itertools.pairwise(held[1:])) < BODY / 4


async def refused_while_a_body_is_held(cluster: RouterHarness) -> None:
    _, writer = await connect(cluster)
    writer.write(head(cluster, "POST /tokenize", "content-length: 2000") + b"\r\n" + b" " * 900)
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as http, asyncio.timeout(60):
        while (response := await http.post("/tokenize", content=b" " * 500)).status_code == 400:
            await asyncio.sleep(0.01)  # the other is on its way
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        writer.close()
        while (await http.post("/tokenize", content=b" " * 500)).status_code == 429:
            await asyncio.sleep(0.01)


async def test_headers_and_bodies_over_the_bound(cluster: RouterHarness) -> None:
    for more in (("x-large: " + "x" * 20_000,), tuple(f"x-{number}: 1" for number in range(5000))):
        reader, writer = await connect(cluster)
        writer.write(head(cluster, "GET /version", *more) + b"\r\n")
        status, error = await rest(reader)
        assert (status, error["type"], error["param"]) == (431, "invalid_request_error", None)
        writer.close()
    reader, writer = await connect(cluster)
    writer.write(b"BLAH\r\n\r\n")
    assert (await rest(reader))[0] == 400
    writer.close()
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as http:
        response = await http.post(
            "/v1/completions", content=b" " * (router.api.http.body.MAX_BYTES + 1)
        )
        assert response.status_code == 413
        assert response.json()["error"]["code"] == 413


async def test_a_body_in_tiny_chunks_is_refused_and_one_in_many_large_ones_is_not(
    cluster: RouterHarness,
) -> None:
    """Each chunk costs as much as a thousand bytes of a large one."""
    begin = (
        head(cluster, "POST /tokenize", "transfer-encoding: chunked", "connection: close") + b"\r\n"
    )
    reader, writer = await connect(cluster)
    writer.write(begin + b"1\r\n \r\n" * 2000)
    status, error = await rest(reader)
    assert (status, error["type"]) == (413, "invalid_request_error")
    assert "256 bytes in each" in str(error["message"])
    writer.close()
    reader, writer = await connect(cluster)
    writer.write(begin + (b"100\r\n" + b" " * 256 + b"\r\n") * 2000 + b"0\r\n\r\n")
    status, error = await rest(reader)
    assert (status, error["message"]) == (
        400,
        "the body is not valid JSON: expected a value at character 512000",
    )
    writer.close()


async def test_a_head_of_many_lines_is_refused_also_behind_another_request(
    cluster: RouterHarness,
) -> None:
    for before in (b"", head(cluster, "GET /version") + b"\r\n"):
        reader, writer = await connect(cluster)
        writer.write(before + head(cluster, "GET /version", *("a: b",) * 300) + b"\r\n")
        async with asyncio.timeout(60):
            if before:
                assert b"200" in await reader.readline()
                await reader.readuntil(b"}")
        status, error = await rest(reader)
        assert (status, error["type"]) == (431, "invalid_request_error")
        writer.close()


async def test_connections_over_the_bound_are_ended_and_others_go_on(
    cluster: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.api.http.connections.connection, "MAX_CONNECTIONS", 3)
    held = [await connect(cluster) for _ in range(3)]
    # Each is accepted, and asks for something, before the next is tried
    for reader, writer in held:
        await ask_halfway(cluster, reader, writer)
    reader, writer = await connect(cluster)
    writer.write(head(cluster, "GET /version") + b"\r\n")
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    held[0][1].write(b'{"tokens":[11]}')
    await held[0][0].readuntil(b"}")
    held[1][1].close()
    async with asyncio.timeout(60):
        while True:
            reader, writer = await connect(cluster)
            writer.write(head(cluster, "GET /version") + b"\r\n")
            try:
                await reader.readuntil(b"}")
                break
            except (asyncio.IncompleteReadError, ConnectionResetError):
                writer.close()
                await asyncio.sleep(0.02)
    for _, one in (*held, (reader, writer)):
        one.close()


async def ask_halfway(
    cluster: RouterHarness, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """A request whose body has not come is under way."""
    writer.write(head(cluster, "GET /version") + b"\r\n")
    await reader.readuntil(b"}")
    expected = head(cluster, "POST /detokenize", "content-length: 15", "expect: 100-continue")
    writer.write(expected + b"\r\n")
    assert b"100" in await reader.readuntil(b"\r\n\r\n")


async def test_an_idle_connection_makes_room_for_a_new_one(
    cluster: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.api.http.connections.connection, "MAX_CONNECTIONS", 3)
    busy, silent, served = [await connect(cluster) for _ in range(3)]
    await ask_halfway(cluster, *busy)
    served[1].write(head(cluster, "GET /version") + b"\r\n")
    await served[0].readuntil(b"}")
    new = []
    for oldest in (silent, served):
        reader, writer = await connect(cluster)
        new.append(writer)
        writer.write(head(cluster, "GET /version") + b"\r\n")
        await reader.readuntil(b"}")
        with contextlib.suppress(ConnectionResetError):
            assert await oldest[0].read() == b""
        oldest[1].close()
        await ask_halfway(cluster, reader, writer)
    busy[1].write(b'{"tokens":[11]}')
    await busy[0].readuntil(b"}")
    for one in (busy[1], *new):
        one.close()


class Transport(asyncio.Transport):
    """Of a connection that takes nothing in."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = asyncio.Event()

    def abort(self) -> None:
        self.aborted.set()


async def test_a_reader_that_does_not_read_is_left_and_one_that_does_in_time_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router.api.http.connections.connection, "SLOW_READER_S", 0.05)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nothing was asked")

    def connected() -> tuple[BoundedProtocol, Transport]:
        protocol, transport = BoundedProtocol(Config(app), ServerState(), {}), Transport()
        protocol.idle = {}
        protocol.connection_made(transport)
        return protocol, transport

    (reading, its), (stuck, gone) = connected(), connected()
    reading.pause_writing()
    reading.resume_writing()
    stuck.pause_writing()
    async with asyncio.timeout(60):
        await gone.aborted.wait()
    assert not its.aborted.is_set()
    for one in (reading, stuck):
        one.connection_lost(ConnectionResetError())


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        (None, None, 200),
        ("localhost:8000", None, 200),
        ("[::1]:8000", None, 200),
        ("127.0.0.2", None, 200),
        (None, "SAME", 200),
        ("localhost:1", "http://localhost:1", 200),
        ("evil.example", None, 403),
        ("evil.example:8000", None, 403),
        ("127.0.0.1.evil.example", None, 403),
        ("localhost.evil.example", None, 403),
        ("10.0.0.1", None, 403),
        ("", None, 403),
        ("[::1", None, 403),
        ("localhost@evil.example", None, 403),
        (None, "http://evil.example", 403),
        (None, "null", 403),
        (None, "http://127.0.0.1:1", 403),
        ("localhost:1", "https://localhost:1", 403),
    ],
)
async def test_browsers_that_another_site_sends_are_refused(
    cluster: RouterHarness, host: str | None, origin: str | None, status: int
) -> None:
    headers = {}
    if host is not None:
        headers["host"] = host
    if origin is not None:
        headers["origin"] = cluster.http if origin == "SAME" else origin
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as http:
        for path in ("/version", "/health", "/", "/nothing"):
            response = await http.get(path, headers=headers)
            assert response.status_code == (404 if (status, path) == (200, "/nothing") else status)
        if status == 403:
            error = response.json()["error"]
            assert (error["type"], error["param"]) == (
                "permission_error",
                "origin" if origin else "host",
            )


async def test_too_many_long_texts_at_one_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.frontend.tokenization, "MAX_WAITING", 7000)
    text = Text.load(DEMO)
    first = asyncio.create_task(text.encode("a " * 2500))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="too many long texts") as caught:
        await text.encode("b " * 2500)
    assert caught.value.retry_after_s == 1.0
    assert await text.encode("short")
    assert len(await first) >= 2500
    await text.close()


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_request_that_still_arrives_when_the_router_ends_is_told(
    cluster: RouterHarness, signals: int
) -> None:
    whole = head(cluster, "POST /v1/completions", "content-length: 100") + b'\r\n{"prompt": "a'
    arriving = [await connect(cluster) for _ in range(2)]
    for (_, writer), data in zip(arriving, (whole, whole[:30]), strict=True):
        writer.write(data)
    await asyncio.sleep(0.05)
    for _ in range(signals):
        cluster.stop()
    for reader, writer in arriving:
        status, error = await rest(reader)
        assert (status, error["type"]) == (503, "service_unavailable_error")
        writer.close()
    await asyncio.wait_for(cluster.task, 60)
