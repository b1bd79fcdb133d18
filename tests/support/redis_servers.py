"""Real redis-servers on loopback: primaries, replicas and a Sentinel, each a process."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import redis.asyncio
import redis.exceptions

from kvrelay.process.child import bound_to_parent, stop
from kvrelay.state.embedded_redis import find_redis_server

TRIES = 3


class RedisServer:
    def __init__(self, port: int, process: asyncio.subprocess.Process) -> None:
        self.port = port
        self.process = process

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def call(self, *words: str | int) -> object:
        async with redis.asyncio.Redis(port=self.port) as client:
            return await client.execute_command(*words)  # type: ignore[no-untyped-call]

    async def info(self, name: str) -> str:
        """A field of INFO, empty if it is not there."""
        async with redis.asyncio.Redis(port=self.port) as client:
            return str((await client.info("replication")).get(name, ""))

    async def is_replicated(self) -> None:
        """Returns once a replica has all that was written."""
        async with asyncio.timeout(60):
            while await self.info("connected_slaves") != "1" or not await self.call("WAIT", 1, 100):
                await asyncio.sleep(0.05)


@asynccontextmanager
async def redis_server(*arguments: str, config: str = "") -> AsyncIterator[RedisServer]:
    """One server; `arguments` are redis-server's, `config` the lines of its file."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-test-redis-") as folder:
        server = await _started(Path(folder), arguments, config)
        try:
            yield server
        finally:
            await stop(server.process, 5.0)


async def _started(folder: Path, arguments: tuple[str, ...], config: str) -> RedisServer:
    """Starts a server on a free port. Another process may take the port first: then the server
    ends, and another port is tried.
    """
    for _ in range(TRIES):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        file = _write(folder, f'port {port}\nbind 127.0.0.1\ndir "{folder}"\n{config}')
        process = await asyncio.create_subprocess_exec(
            *bound_to_parent(str(find_redis_server()), str(file), *arguments),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        server = RedisServer(port, process)
        if await _answers(server):
            return server
    raise AssertionError(f"redis-server ended {TRIES} times")


@asynccontextmanager
async def data_server(replica_of: str = "") -> AsyncIterator[RedisServer]:
    """`replica_of`: HOST:PORT of the primary, or of a proxy to it."""
    config = (
        'save ""\nappendonly no\nrepl-diskless-sync yes\nrepl-diskless-sync-delay 0\nrepl-timeout '
        "60\n"
    )
    if replica_of:
        config += f"replicaof {replica_of.replace(':', ' ')}\n"
    async with redis_server(config=config) as server:
        yield server


@asynccontextmanager
async def sentinel(
    service: str, primary: RedisServer, down_after_ms: int = 500
) -> AsyncIterator[RedisServer]:
    config = (
        f"sentinel monitor {service} 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds {service} {down_after_ms}\n"
        f"sentinel failover-timeout {service} 2000\n"
    )
    async with redis_server("--sentinel", config=config) as server:
        yield server


def _write(folder: Path, config: str) -> Path:
    file = folder / "redis.conf"
    file.write_text(config)
    return file


async def _answers(server: RedisServer) -> bool:
    """Waits until this server answers on its port. Returns False if it has ended."""
    async with asyncio.timeout(60), redis.asyncio.Redis(port=server.port) as client:
        while server.process.returncode is None:
            with suppress(redis.exceptions.ConnectionError):
                if (await client.info("server"))["process_id"] == server.process.pid:
                    return True
            await asyncio.sleep(0.05)
    return False
