"""Real workers in this process, and a router's end of their sessions, for tests that look at each
message.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc

import decode_worker.main
import prefill_worker.main
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import Sampled
from kvrelay.engine.sequence_segment import Segment
from kvrelay.process.stop_request import StopRequest
from kvrelay.security.capability import FetchGrant, make_capability
from kvrelay.security.credentials import Credentials
from kvrelay.security.grpc_tls import worker_channel
from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry
from kvrelay.types.requests import SequenceSpec
from kvrelay.types.workers import PoolName, WorkerInfo, WorkerLoad
from kvrelay.wire.cluster import worker_status_from_proto
from kvrelay.wire.worker import (
    Hello,
    Welcome,
    WorkerServiceStub,
    command_to_proto,
    event_from_proto,
    pb,
)
from kvrelay.worker.runtime.settings import WorkerSettings
from kvrelay.worker_messages import (
    CacheUpdate,
    Command,
    Event,
    PrefixSource,
    SequenceTokens,
    TokenBatch,
)

SERVE = {"prefill": prefill_worker.main.serve, "decode": decode_worker.main.serve}


class Session:
    """The router's end of one session."""

    def __init__(self, info: WorkerInfo, credentials: Credentials | None = None) -> None:
        self.info = info
        self._channel = worker_channel(info.address, credentials)
        self._call = WorkerServiceStub(self._channel).Session()
        self._writing = asyncio.Lock()

    async def open(self) -> Session:
        await self.send(Hello("test"))
        welcome = await self._next()
        assert isinstance(welcome, Welcome)
        self._grant_key = welcome.lending_key
        return self

    def source(self, one: SequenceSpec, cached_tokens: int, borrower: WorkerInfo) -> PrefixSource:
        """This worker, with leave for another to fetch so much from it."""
        info = self.info
        grant = FetchGrant(
            *one.key,
            borrower.worker_id,
            borrower.address,
            info.worker_id,
            info.epoch,
            tokens=cached_tokens,
        )
        capability = make_capability(self._grant_key, grant)
        return PrefixSource(info.worker_id, info.address, cached_tokens, capability)

    async def send(self, command: Command | Hello) -> None:
        async with self._writing:  # gRPC takes one write at a time
            await self._call.write(command_to_proto(command))

    async def event(self) -> Event:
        """The next event; a token batch counts as its one sequence's."""
        event = await self._next()
        assert not isinstance(event, Welcome)
        return event

    async def tokens(self) -> SequenceTokens:
        event = await self.event()
        assert isinstance(event, TokenBatch), event
        (tokens,) = event.sequences
        return tokens

    async def answer(self) -> list[int]:
        """Token ids up to the finish."""
        token_ids: list[int] = []
        while True:
            tokens = await self.tokens()
            token_ids += tokens.token_ids
            if tokens.finish_reason is not None:
                return token_ids

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    async def _next(self) -> Event | Welcome:
        """The next event that is not about the prefix cache; those come in between at any time."""
        while isinstance(event := await self.any_event(), CacheUpdate):
            pass
        return event

    async def any_event(self) -> Event | Welcome:
        async with asyncio.timeout(60):
            message = await self._call.read()
        assert message is not grpc.aio.EOF, "the worker ended the session"
        return event_from_proto(message)


async def load_of(info: WorkerInfo, credentials: Credentials | None = None) -> WorkerLoad:
    """What the worker says of itself when asked."""
    async with worker_channel(info.address, credentials) as channel:
        answer = await WorkerServiceStub(channel).GetWorkerStatus(
            pb.GetWorkerStatusRequest(), timeout=20
        )
    return worker_status_from_proto(answer.status).load


class Engine:
    """The steps of all workers of this process, each of which begins when the test lets it."""

    def __init__(self, run: Callable[..., list[list[Sampled]]]) -> None:
        self._run = run
        self.steps: list[list[int]] = []  # the first token of each sequence in it
        self.free = threading.Event()
        self.free.set()
        self._in_step = threading.Event()

    def start(self) -> None:
        """From now on steps are those of the test."""
        self.steps.clear()
        self._in_step.clear()

    def step(
        self, runner: ModelRunner, segments: list[Segment], *arguments: object
    ) -> list[list[Sampled]]:
        self.steps.append([segment.token_ids[0] for segment in segments])
        self._in_step.set()
        assert self.free.wait(60)
        return self._run(runner, segments, *arguments)

    async def held(self) -> None:
        """Until a step waits to begin, or has begun."""
        assert await asyncio.to_thread(self._in_step.wait, 60)


class Workers:
    """What `workers` yields."""

    def __init__(self, registry: Registry, credentials: Credentials | None) -> None:
        self.registry = registry
        self._credentials = credentials
        self._sessions: list[Session] = []

    async def session(self, worker_id: str) -> Session:
        info = next(info for info in await self.registry.workers() if info.worker_id == worker_id)
        session = await Session(info, self._credentials).open()
        self._sessions.append(session)
        return session

    async def settled(self) -> tuple[WorkerInfo, ...]:
        """The workers once all are empty and have checked their books; they are asked, since
        heartbeats are old.
        """
        async with asyncio.timeout(30):
            while True:
                infos = [
                    replace(info, load=await load_of(info, self._credentials))
                    for info in await self.registry.workers()
                ]
                loads = [info.load for info in infos]
                if all(
                    load.empty and not load.blocks_held and not load.step_age_s for load in loads
                ):
                    return tuple(infos)
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()


@asynccontextmanager
async def silent_peer() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """HOST:PORT of somebody who takes connections and never says a word, and whether one has
    come.
    """
    came = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        came.set()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}", came
    finally:
        server.close()
        for writer in writers:
            writer.close()


@asynccontextmanager
async def new_registry() -> AsyncIterator[tuple[str, Registry]]:
    """Starts a Redis; yields its URL and a connection."""
    async with EmbeddedRedis() as redis, await Registry.connect(redis.url) as registry:
        yield redis.url, registry


@asynccontextmanager
async def workers(
    model: Path, config: ClusterConfig, *names: str, pin: bool = False
) -> AsyncIterator[Workers]:
    """Runs workers named like `prefill-0` and `decode-1`, each with its own engine thread and gRPC
    server.
    """
    stop = StopRequest()
    async with new_registry() as (url, registry), asyncio.TaskGroup() as tasks:
        # One after the other: a process loads one model at a time
        for count, name in enumerate(names, 1):
            pool: PoolName = "prefill" if name.startswith("prefill") else "decode"
            settings = WorkerSettings(name, pool, str(model), url, config, pin)
            tasks.create_task(SERVE[pool](settings, stop))
            async with asyncio.timeout(60):
                while [info.state for info in await registry.workers()] != ["ready"] * count:
                    await asyncio.sleep(0.05)
        running = Workers(registry, Credentials.internal(config.security, "router"))
        try:
            yield running
        finally:
            await running.close()
            stop.now()
