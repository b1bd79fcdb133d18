"""TLS handshakes of the HTTP listener: who says nothing keeps nobody else out."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from support.certificates import Certificates

import router.api.http.connections.acceptor
from kvrelay.errors import ConfigError
from router.api.http.connections.acceptor import Acceptor
from router.api.http.server import http_listener

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Hello(asyncio.Protocol):
    """Greets whoever is through with the handshake."""

    def connection_made(self, transport: Any) -> None:
        transport.write(b"hello")
        transport.close()


@asynccontextmanager
async def listening(folder: Path) -> AsyncIterator[int]:
    cert, key = Certificates(folder).issue("router")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    listener = http_listener("127.0.0.1:0", "listen.http")
    accepting = asyncio.create_task(Acceptor(listener, Hello, context).run())
    try:
        yield listener.getsockname()[1]
    finally:
        accepting.cancel()
        await asyncio.wait([accepting])
        listener.close()


async def greeted(port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    heard = await reader.read()
    writer.close()
    await writer.wait_closed()
    return heard == b"hello"


async def ended(one: Streams) -> None:
    reader, writer = one
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()


async def test_the_oldest_handshake_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.api.http.connections.acceptor, "MAX_HANDSHAKES", 3)
    monkeypatch.setattr(router.api.http.connections.acceptor, "HANDSHAKE_S", 3600.0)
    async with listening(tmp_path) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await greeted(port)
        await ended(silent[0])
        assert await greeted(port)
        for _, writer in silent[1:]:
            writer.close()


async def test_a_silent_handshake_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.api.http.connections.acceptor, "HANDSHAKE_S", 0.1)
    async with listening(tmp_path) as port:
        await ended(await asyncio.open_connection("127.0.0.1", port))
        assert await greeted(port)


async def test_what_is_no_tls_ends_alone(tmp_path: Path) -> None:
    async with listening(tmp_path) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes(range(256)))
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read(1) in (b"", b"\x15"), "nothing, or a TLS alert"
        writer.close()
        assert await greeted(port)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_http_without_tls_is_told_what_the_port_speaks(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def ask() -> None:
        async with listening(tmp_path) as port, httpx.AsyncClient() as client:
            for _ in range(3):
                found = await client.get(f"http://127.0.0.1:{port}/health")
                assert found.status_code == 400
                assert found.text == "This port speaks HTTPS only; begin with https://.\n"
            assert await greeted(port)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(ask())


async def test_the_socket_is_free_again_afterwards(tmp_path: Path) -> None:
    async with listening(tmp_path) as port:
        with pytest.raises(ConfigError, match="choose another port"):
            http_listener(f"127.0.0.1:{port}", "listen.http")
    http_listener(f"127.0.0.1:{port}", "listen.http").close()
