"""A network between two ends that can fail: everything stops, is held back, is lost, or is
reset.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class TcpProxy:
    """Passes bytes on in both directions, while it may.

    `passes` of each direction is an event. `limit`: bytes that the clients may still send; none is
    no limit. `target` may be set later; connections wait for it.
    """

    def __init__(self, target: asyncio.Future[str]) -> None:
        self.target = target
        self.address = ""
        self.resets = 0  # connections that were broken off
        self.passes = {"up": asyncio.Event(), "down": asyncio.Event()}
        self.loses: set[str] = set()  # directions in which what comes is read and passed to nobody
        self.lost = 0  # bytes
        self.heal()
        self.limit: int | None = None
        self.held_back = 0  # bytes that came and did not pass at once
        self._connections: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    def part(self) -> None:
        """From now on nothing passes in either direction; nothing is lost."""
        for event in self.passes.values():
            event.clear()

    def heal(self) -> None:
        self.loses.clear()
        for event in self.passes.values():
            event.set()

    def reset(self) -> None:
        """Breaks off all connections; what was held back is lost."""
        for writer in self._connections:
            writer.transport.abort()
            self.resets += 1

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def accept(self, listener: socket.socket) -> None:
        """Takes one connection, if there is one. An asyncio server loses what comes while it is
        closed.
        """
        with suppress(BlockingIOError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            task = asyncio.create_task(self._serve(connection))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
            # A task that is cancelled at once runs no line
            task.add_done_callback(lambda _: connection.close())

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        async with closing_abruptly(writer):
            host, _, port = (await self.target).rpartition(":")
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
            ends = {writer, up_writer}
            self._connections |= ends
            ways = [
                asyncio.create_task(self._pass(reader, up_writer, "up")),
                asyncio.create_task(self._pass(up_reader, writer, "down")),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                # First, since a second cancellation would end this block.
                for end in ends:
                    end.transport.abort()
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
                self._connections -= ends
                for end in ends:
                    await close_abruptly(end)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        while data := await reader.read(2**16):
            if way in self.loses:
                self.lost += len(data)
                continue
            if way == "up" and self.limit is not None:
                passing, data = data[: self.limit], data[self.limit :]
                self.limit -= len(passing)
                writer.write(passing)
                if data:
                    self.passes["up"].clear()
            if not self.passes[way].is_set():
                self.held_back += len(data)
            await self.passes[way].wait()
            self.limit = None if way == "up" and data else self.limit
            writer.write(data)
            await writer.drain()


async def close_abruptly(writer: asyncio.StreamWriter) -> None:
    """Returns when the socket is closed, which the loop does a turn after it was told to."""
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()


@asynccontextmanager
async def closing_abruptly(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        with suppress(ConnectionError):
            yield
    finally:
        await close_abruptly(writer)


@asynccontextmanager
async def proxy_to(address: str | None = None) -> AsyncIterator[TcpProxy]:
    """Without an address, its `target` has to be set."""
    target = asyncio.get_running_loop().create_future()
    if address is not None:
        target.set_result(address)
    proxy = TcpProxy(target)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        host, port = listener.getsockname()
        proxy.address = f"{host}:{port}"
        loop = asyncio.get_running_loop()
        loop.add_reader(listener, proxy.accept, listener)
        try:
            yield proxy
        finally:
            loop.remove_reader(listener)
            await proxy.close()
