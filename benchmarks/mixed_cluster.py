"""A cluster whose parts are of unlike builds: real processes, each with the source tree that it
runs.

Redis is of the tree that this module is in. `previous_tree` takes a build out of git's history.
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
# The last build before processes told each other the version of the protocol that they speak:
# version 0.
PREVIOUS = "34beee8e40d3180bb5c2835ea4e37d4174e52030"
READY_S = 180.0  # for a part to serve: a worker may have to compile kernels on a busy machine
STOP_S = 90.0
_READY = re.compile(r"^kvrelay ready grpc=(\S+) http=(\S+) admin=(\S+)$")

CONFIG: dict[str, Any] = {
    "model": {"path": "demo", "dtype": "float32", "max_model_len": 1024},
    "kv": {"memory": "24MiB"},
    "prefill": {"replicas": 1, "chunk_tokens": 64},
    "decode": {"replicas": 1, "max_batch": 16},
    "router": {"local_below_tokens": 16, "default_deadline_s": 300},
    "transfer": {"transport": "auto", "lease_s": 10},
}


class NoHistory(Exception):
    """Git has no such build here; says why."""


def previous_tree(folder: Path, revision: str = PREVIOUS) -> Path:
    """The source tree of a build, written to `folder`. Raises NoHistory."""
    command = ["git", "-C", str(PRESENT), "archive", "--format=tar", revision]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        raise NoHistory("git is not installed") from None
    if done.returncode:
        raise NoHistory(f"git archive {revision[:7]}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@dataclass
class Part:
    """A router or a controller, and its log."""

    process: asyncio.subprocess.Process
    log: Path

    async def stop(self) -> int:
        """SIGTERM; returns its exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                return await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
            raise AssertionError(
                f"it did not end within {STOP_S:g} s; its log is {self.log}"
            ) from None


@dataclass
class MixedCluster:
    """Use `mixed_cluster`. `ports` are (gRPC, HTTP, admin) of the routers that may come."""

    redis: EmbeddedRedis
    registry: Registry
    folder: Path
    config: dict[str, Any]
    exits: AsyncExitStack
    ports: list[tuple[int, int, int]] = field(default_factory=list)
    _count: int = 0

    async def router(self, tree: Path, slot: int = 0) -> Part:
        """Returns once it serves, which is when there are as many workers as configured."""
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
        """Returns at once; its workers are of these trees."""
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
        """Those that are ready, besides `but`, as soon as there are so many."""
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
    """Redis, and whatever is started in it; all ends with it. With CONFIG, but for some keys of
    some sections.
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
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3 * routers)]
    numbers = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return [(numbers[i], numbers[i + 1], numbers[i + 2]) for i in range(0, len(numbers), 3)]
