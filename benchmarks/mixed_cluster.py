"""Runs a cluster of real processes from different builds. Each process runs its own source tree.

Redis comes from the tree of this module. `previous_tree` extracts a build from the git history.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from kvrelay.models import resolve_model
from kvrelay.process.child import bound_to_parent
from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry
from kvrelay.types.workers import WorkerInfo

PRESENT = Path(__file__).resolve().parent.parent
# The last build in which processes did not exchange their protocol version. It has protocol
# version 0.
PREVIOUS = "34beee8e40d3180bb5c2835ea4e37d4174e52030"
# Timeout for the start of a process. A worker may compile kernels on a busy machine.
READY_S = 180.0
STOP_S = 90.0
_READY = re.compile(r"^kvrelay ready grpc=(\S+) http=(\S+) admin=(\S+)$")

CONFIG: dict[str, Any] = {
    # The builds may have other bundled models.
    "model": {"path": resolve_model("demo"), "dtype": "float32", "max_model_len": 1024},
    "kv": {"memory": "24MiB"},
    "prefill": {"replicas": 1, "chunk_tokens": 64},
    "decode": {"replicas": 1, "max_batch": 16},
    "router": {"local_below_tokens": 16, "default_deadline_s": 300},
    "transfer": {"transport": "auto", "lease_s": 10},
}


class NoHistory(Exception):
    """git does not have the build. The message gives the reason."""


def previous_tree(folder: Path, revision: str = PREVIOUS) -> Path:
    """Writes the source tree of a build to `folder` and returns `folder`. Raises NoHistory."""
    command = ["git", "-C", str(PRESENT), "archive", "--format=tar", revision]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        raise NoHistory("git is not installed") from None
    if done.returncode:
        raise NoHistory(f"git archive {revision[:7]}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        # The default of Python 3.14; the first versions of Python 3.11 do not have it.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    return folder


@dataclass
class Part:
    """A process of a router or a controller, and its log."""

    process: asyncio.subprocess.Process
    log: Path

    async def stop(self) -> int:
        """Sends SIGTERM; returns the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                return await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
            raise AssertionError(
                f"the process did not end within {STOP_S:g} s; its log is {self.log}"
            ) from None


@dataclass
class MixedCluster:
    """A running cluster; create it with `mixed_cluster`. `ports`: (gRPC, HTTP, admin) per
    router.
    """

    redis: EmbeddedRedis
    registry: Registry
    folder: Path
    config: dict[str, Any]
    exits: AsyncExitStack
    ports: list[tuple[int, int, int]] = field(default_factory=list)
    _count: int = 0

    async def router(self, tree: Path, slot: int = 0) -> Part:
        """Starts a router. Returns once it serves, which requires the configured number of
        workers.
        """
        grpc, http, admin = self.ports[slot]
        listen = {
            "grpc": f"127.0.0.1:{grpc}",
            "http": f"127.0.0.1:{http}",
            "admin": f"127.0.0.1:{admin}",
        }
        path = self.folder / f"router-{self._next()}.yaml"
        path.write_text(
            json.dumps(self.config | {"redis": {"url": self.redis.url}, "listen": listen})
        )
        part = await self._start(
            tree, path.stem, "-m", "kvrelay.cli.main", "router", "--config", str(path)
        )
        assert part.process.stdout is not None
        async with asyncio.timeout(READY_S):
            line = await part.process.stdout.readline()
        assert _READY.match(line.decode().strip()), f"{line!r}; its log is {part.log}"
        return part

    async def controller(self, tree: Path, prefill: Path, decode: Path) -> Part:
        """Starts a controller whose workers run these trees. Does not wait for the workers."""
        order = {
            "model": resolve_model(self.config["model"]["path"]),
            "redis": self.redis.url,
            "config": self.config | {"redis": {"url": self.redis.url}},
            "folder": str(self.folder),
            "trees": {"prefill": str(prefill), "decode": str(decode)},
        }
        script = str(Path(__file__).with_name("mixed_controller.py"))
        return await self._start(tree, f"controller-{self._next()}", script, json.dumps(order))

    async def workers(
        self, number: int, but: frozenset[str] = frozenset()
    ) -> tuple[WorkerInfo, ...]:
        """Waits for `number` ready workers, not counting `but`, and returns them."""
        async with asyncio.timeout(READY_S):
            while True:
                infos = [one for one in await self.registry.workers() if one.worker_id not in but]
                ready = [one for one in infos if one.state == "ready"]
                if len(ready) >= number:
                    return tuple(ready)
                await asyncio.sleep(0.1)

    def _next(self) -> int:
        self._count += 1
        return self._count

    async def _start(self, tree: Path, name: str, *arguments: str) -> Part:
        log = self.folder / f"{name}.log"
        process = await asyncio.create_subprocess_exec(
            *bound_to_parent(sys.executable, *arguments),
            cwd=tree,
            env=_environment(tree),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=self.exits.enter_context(log.open("wb")),
            start_new_session=True,
        )
        part = Part(process, log)
        self.exits.push_async_callback(_kill, process)
        return part


def _environment(tree: Path) -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree)}


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


@asynccontextmanager
async def mixed_cluster(
    folder: Path, routers: int = 2, **sections: dict[str, Any]
) -> AsyncIterator[MixedCluster]:
    """Starts Redis and yields a cluster without processes. Ends all its processes on exit.
    `sections` override keys of CONFIG.
    """
    config = {
        **CONFIG,
        **{name: {**CONFIG.get(name, {}), **keys} for name, keys in sections.items()},
    }
    async with AsyncExitStack() as exits:
        redis = await exits.enter_async_context(EmbeddedRedis())
        registry = await exits.enter_async_context(await Registry.connect(redis.url))
        yield MixedCluster(redis, registry, folder, config, exits, _free_ports(routers))


def _free_ports(routers: int) -> list[tuple[int, int, int]]:
    """Returns three unused ports for each router."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3 * routers)]
    numbers = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return [(numbers[i], numbers[i + 1], numbers[i + 2]) for i in range(0, len(numbers), 3)]
