"""A router on a core of its own, and its resource use."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from kvrelay.errors import Unavailable
from kvrelay.process.child import bound_to_parent, family, stop
from kvrelay.process.owned_folder import OwnedFolder

_READY_S = 60.0
_STOP_S = 20.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class RouterProcess:
    """A router process. `grpc` and `http` are HOST:PORT once the router is ready."""

    def __init__(self, process: asyncio.subprocess.Process, http: str = "") -> None:
        self.grpc = ""
        self.http = http
        self._process = process

    async def ready(self) -> None:
        """Waits until the router is ready. Raises Unavailable if the router ends or the wait times
        out.
        """
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), _READY_S)
        except TimeoutError:
            raise Unavailable(
                f"the router was not ready within {_READY_S:g} s; its log is above"
            ) from None
        if not line:
            raise Unavailable("the router ended before it was ready; its log is above")
        words = dict(word.split("=", 1) for word in line.decode().split()[2:])
        self.grpc, self.http = words["grpc"], words["http"].removeprefix("http://")

    def cpu_seconds(self) -> float:
        """Returns user and system time of the router, in seconds."""
        return sum(map(_cpu_seconds, family(self._process.pid)))

    async def end(self, timeout_s: float) -> int | None:
        """Sends SIGTERM. Returns the exit code, or None if the process is still running after
        `timeout_s`.
        """
        self._process.terminate()
        try:
            return await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            return None

    def resident_bytes(self) -> int:
        """Returns the resident memory of all processes that serve, in bytes."""
        pids = family(self._process.pid)
        serving = [pid for pid in pids if b"--sibling" in _words(pid)] or pids[:1]
        return sum(map(_resident_bytes, serving))


def _words(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def _cpu_seconds(pid: int) -> float:
    """Returns user and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@asynccontextmanager
async def starting_router(
    redis_url: str,
    model: str,
    prefill: int,
    decode: int,
    max_batch: int,
    core: int,
    tokens_file: Path | None = None,
    processes: int = 1,
) -> AsyncIterator[RouterProcess]:
    """Starts a router. The router becomes ready when `prefill` and `decode` workers are in the
    registry.
    """
    config = {
        "model": {"path": model},
        "listen": {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "admin": "127.0.0.1:0"},
        "prefill": {"replicas": prefill},
        "decode": {"replicas": decode, "max_batch": max_batch},
        "router": {"processes": processes},
        "redis": {"url": redis_url},
        "security": {"tokens_file": tokens_file and str(tokens_file)},
    }
    with OwnedFolder("bench") as folder:
        process = await _start(_write(folder.path, config), core)
        try:
            yield RouterProcess(process)
        finally:
            await stop(process, _STOP_S)


def _write(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "router.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


async def _start(config: Path, core: int) -> asyncio.subprocess.Process:
    return await start_on_core(
        core,
        *(sys.executable, "-m", "kvrelay.cli.main", "router", "-c", str(config)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "KVRELAY_LOG_LEVEL": "warning"},
    )


async def start_on_core(core: int, *command: str, **options: Any) -> asyncio.subprocess.Process:
    """Starts a program on one core. It ends with this process. `options`: those of
    asyncio.create_subprocess_exec.
    """
    allowed = os.sched_getaffinity(0)
    # The child inherits the affinity.
    os.sched_setaffinity(0, {core})
    try:
        return await asyncio.create_subprocess_exec(*bound_to_parent(*command), **options)
    finally:
        os.sched_setaffinity(0, allowed)
