"""A router in this process, over real gRPC and fake workers."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import grpc
from support.fake_worker import FakeWorkerServer

import kvrelay.models
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.sampling.grammar_trial import GrammarTrial
from kvrelay.errors import Unavailable
from kvrelay.process.stop_request import StopRequest
from kvrelay.types.control_plane import AdapterEntry, ControllerInfo, RouterLoad, ScalingDecision
from kvrelay.types.workers import PendingWorker, PoolName, StandbyWorker, WorkerInfo
from kvrelay.wire.inference import InferenceServiceStub
from router.frontend import guidance_check
from router.frontend.model_card import ModelCard
from router.frontend.tokenization import Text
from router.main import run_router
from router.served_model import LoadedModel
from router.sibling_processes import Place, Siblings

DEMO = str(Path(kvrelay.models.__file__).parent / "demo")


class KeptTrial(GrammarTrial):
    """Serves all routers of the bundled model in this process, each of which would start a child
    process.
    """

    _demo: ClassVar[KeptTrial | None] = None

    @classmethod
    def of(cls, folder: str, vocab_size: int, eos_token_ids: frozenset[int]) -> GrammarTrial:
        if folder != DEMO:
            return GrammarTrial(folder, vocab_size, eos_token_ids)
        if cls._demo is None:
            cls._demo = cls(folder, vocab_size, eos_token_ids)
            atexit.register(super(KeptTrial, cls._demo).close)
        return cls._demo

    def close(self) -> None:
        """A router that ends leaves it to the next."""


@dataclass
class MemoryRegistry:
    """kvrelay.state.registry.Registry's twin in memory."""

    entries: dict[str, WorkerInfo] = field(default_factory=dict)
    sizes: dict[PoolName, int] = field(default_factory=dict)
    drains: list[str] = field(default_factory=list)
    restarting: set[str] = field(default_factory=set)
    without_room: tuple[PendingWorker, ...] = ()
    standing_by: tuple[StandbyWorker, ...] = ()
    announced: asyncio.Event = field(default_factory=asyncio.Event)
    published: list[RouterLoad] = field(default_factory=list)
    history: tuple[ScalingDecision, ...] = ()
    delays: tuple[ScalingDecision, ...] = ()
    listed: dict[str, AdapterEntry] = field(default_factory=dict)
    away: bool = False

    def _check(self) -> None:
        if self.away:
            raise Unavailable("Redis at memory: away")

    async def workers(self) -> tuple[WorkerInfo, ...]:
        self._check()
        return tuple(self.entries.values())

    async def pending(self) -> tuple[PendingWorker, ...]:
        self._check()
        return self.without_room

    async def standbys(self) -> tuple[StandbyWorker, ...]:
        self._check()
        return self.standing_by

    async def controllers(self) -> tuple[ControllerInfo, ...]:
        self._check()
        return ()

    async def changes(self) -> AsyncIterator[None]:
        while True:
            await self.announced.wait()
            self.announced.clear()
            yield

    async def desired(self) -> dict[PoolName, int]:
        self._check()
        return dict(self.sizes)

    async def set_desired(
        self, sizes: Mapping[PoolName, int], decisions: Iterable[ScalingDecision] = ()
    ) -> None:
        self._check()
        self.sizes |= sizes
        self.history = (*reversed(tuple(decisions)), *self.history)

    async def decisions(self, n: int) -> tuple[ScalingDecision, ...]:
        self._check()
        return self.history[:n]

    async def delayed(self) -> tuple[ScalingDecision, ...]:
        self._check()
        return self.delays

    async def request_drain(self, worker_id: str) -> None:
        self._check()
        self.drains.append(worker_id)

    async def request_restart(self, worker_ids: Iterable[str]) -> None:
        self._check()
        self.restarting.update(worker_ids)

    async def restarts(self) -> frozenset[str]:
        self._check()
        return frozenset(self.restarting)

    async def adapters(self) -> tuple[AdapterEntry, ...]:
        self._check()
        return tuple(self.listed.values())

    async def put_adapter(self, entry: AdapterEntry) -> bool:
        self._check()
        old = self.listed.get(entry.name)
        if _files(old or entry) != _files(entry) or (entry.served and old is None):
            return False
        if old is None or not old.served:
            self.listed[entry.name] = entry
            self.announced.set()
        return True

    async def withdraw_adapter(self, entry: AdapterEntry) -> None:
        self._check()
        old = self.listed.get(entry.name)
        if old is not None and _files(old) == _files(entry) and not old.served:
            del self.listed[entry.name]
            self.announced.set()

    async def remove_adapter(self, name: str) -> None:
        self._check()
        self.listed.pop(name, None)
        self.announced.set()

    async def publish_router(self, load: RouterLoad) -> None:
        self._check()
        self.published.append(load)

    async def remove_router(self, router_id: str) -> None:
        self._check()


def _files(entry: AdapterEntry) -> tuple[str, str]:
    return entry.adapter_id, entry.path


@dataclass
class RouterHarness:
    registry: MemoryRegistry
    workers: dict[str, FakeWorkerServer]
    stop: StopRequest
    task: asyncio.Task[None]
    grpc: str = ""
    http: str = ""
    admin: str = ""

    async def add(self, worker_id: str, pool: PoolName, epoch: int = 1) -> FakeWorkerServer:
        server = FakeWorkerServer(worker_id, pool, self.workers, epoch)
        await server.start()
        self.registry.entries[worker_id] = server.worker.info
        self.registry.announced.set()
        return server

    def say(self, token_ids: Iterable[int]) -> None:
        """All answers consist of these tokens from now on."""
        for server in self.workers.values():
            server.worker.says = tuple(token_ids)

    async def kill(self, worker_id: str) -> None:
        """The worker dies, and its heartbeat with it."""
        server = self.workers[worker_id]
        self.registry.entries.pop(worker_id, None)
        await server.kill()


def cluster_config(
    prefill: int = 1, decode: int = 1, tokens_file: Path | None = None, **router: object
) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "listen": {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "admin": "127.0.0.1:0"},
            "prefill": {"replicas": prefill},
            "decode": {"replicas": decode},
            "router": {"local_below_tokens": 8} | router,
            "security": {"tokens_file": tokens_file and str(tokens_file)},
        }
    )


@asynccontextmanager
async def running_router(
    prefill: int = 1,
    decode: int = 1,
    tokens_file: Path | None = None,
    folder: str = DEMO,
    place: Place | None = None,
    **router: object,
) -> AsyncIterator[RouterHarness]:
    """A router with workers prefill-0.. and decode-0.., which are all ready."""
    config = cluster_config(prefill, decode, tokens_file, **router)
    stop = StopRequest()
    line: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    registry = MemoryRegistry()
    text = Text.load(folder)
    card = ModelCard.load(folder, config.model)
    loaded = LoadedModel(config, registry, card, text)
    task = asyncio.create_task(_run(config, loaded, line, stop, place))
    harness = RouterHarness(registry, {}, stop, task)
    try:
        for number in range(prefill):
            await harness.add(f"prefill-{number}", "prefill")
        for number in range(decode):
            await harness.add(f"decode-{number}", "decode")
        task.add_done_callback(lambda _: line.done() or line.cancel())
        await line
        words = dict(word.split("=", 1) for word in line.result().split()[2:])
        harness.grpc, harness.http, harness.admin = words["grpc"], words["http"], words["admin"]
        yield harness
    finally:
        stop()
        stop()
        await asyncio.wait({task}, timeout=10)
        for server in list(harness.workers.values()):
            await server.kill()
        await text.close()
        assert task.done(), "the router did not stop"
        await task


async def _run(
    config: ClusterConfig,
    loaded: LoadedModel,
    line: asyncio.Future[str],
    stop: StopRequest,
    place: Place | None,
) -> None:
    with patch.object(guidance_check, "GrammarTrial", KeptTrial.of):
        await run_router(config, [loaded], line.set_result, stop, Siblings(place))


@asynccontextmanager
async def router_before(
    config: ClusterConfig, registry: Any, place: Place | None = None
) -> AsyncIterator[dict[str, str]]:
    """A router in this process for the workers of a registry; yields the addresses it tells: grpc,
    http, admin.
    """
    stop, text = StopRequest(), Text.load(config.model.path)
    line: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    card = ModelCard.load(config.model.path, config.model)
    loaded = LoadedModel(config, registry, card, text)
    siblings = Siblings(place)
    task = asyncio.create_task(run_router(config, [loaded], line.set_result, stop, siblings))
    task.add_done_callback(lambda _: line.done() or line.cancel())
    try:
        yield dict(word.split("=", 1) for word in (await line).split()[2:])
    finally:
        stop.now()
        await task
        await text.close()


@asynccontextmanager
async def inference_stub(target: str) -> AsyncIterator[InferenceServiceStub]:
    async with grpc.aio.insecure_channel(target) as channel:
        yield InferenceServiceStub(channel)
