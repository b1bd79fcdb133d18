"""TLS handshakes of the HTTP listener: who says nothing keeps nobody else out."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.certificates import Certificates

import router.api.http.connections.acceptor
from kvrelay.errors import ConfigError
from router.api.http.connections.acceptor import Acceptor
from router.api.listeners import http_listener

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Hello(asyncio.Protocol):
    """Greets whoever is through with the handshake."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
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
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        writer.close()
        assert await greeted(port)


async def test_the_socket_is_free_again_afterwards(tmp_path: Path) -> None:
    async with listening(tmp_path) as port:
        with pytest.raises(ConfigError, match="choose another port"):
            http_listener(f"127.0.0.1:{port}", "listen.http")
    http_listener(f"127.0.0.1:{port}", "listen.http").close()
