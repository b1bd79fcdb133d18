"""An actuator with a real registry and real gRPC servers for workers, and no engine in them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc

from autoscaler.actuator import Actuator
from autoscaler.lease import Lease
from kvrelay.clock import ManualClock
from kvrelay.errors import Unavailable
from kvrelay.state.registry import Registry
from kvrelay.types.control_plane import Claim
from kvrelay.types.workers import PoolName, Role, StandbyWorker, WorkerInfo, WorkerLoad, WorkerState
from kvrelay.wire.worker import WorkerServiceServicer, add_WorkerServiceServicer_to_server, pb


class FakeWorker(WorkerServiceServicer):
    """A worker's gRPC server and registry entry, without an engine."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.drain_calls = 0
        self.grace_s = 0.0
        self.refuses_drain = False

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainResponse:
        self.drain_calls += 1
        self.grace_s = request.grace_seconds
        if self.refuses_drain:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        self.info = dataclasses.replace(self.info, state="draining")
        return pb.DrainResponse()

    def is_now(self, state: WorkerState) -> None:
        self.info = dataclasses.replace(self.info, state=state)

    def holds(self, **load: int) -> None:
        self.info = dataclasses.replace(self.info, load=WorkerLoad(**load))


@dataclass
class Fleet:
    """Launcher of workers in this process. They serve once `beat` is called, which is their
    heartbeat.
    """

    registry: Registry
    pools: dict[str, Role] = field(default_factory=dict)
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    servers: dict[str, grpc.aio.Server] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    causes: dict[str, str] = field(default_factory=dict)
    drained: list[str] = field(default_factory=list)
    turned: list[str] = field(default_factory=list)
    broken: bool = False
    lease: Lease | None = None
    claims: dict[str, Claim | None] = field(default_factory=dict)
    first_state: WorkerState = "ready"
    without_room: set[str] = field(default_factory=set)
    loading: set[str] = field(default_factory=set)  # standby workers that are not ready yet

    async def start(self, pool: Role, worker_id: str) -> None:
        if self.broken:
            raise Unavailable("no room")
        self.claims[worker_id] = None if self.lease is None else self.lease.claim()
        self.pools[worker_id] = pool

    async def stop(self, worker_id: str) -> None:
        self.stopped.append(worker_id)
        await self.die(worker_id)

    async def turn(self, worker_id: str, pool: PoolName) -> None:
        self.turned.append(worker_id)
        self.pools[worker_id] = pool
        if worker_id in self.workers:
            del self.workers[worker_id]
            await self.servers.pop(worker_id).stop(None)

    async def drain(self, worker_id: str) -> None:
        self.drained.append(worker_id)
        await self.die(worker_id)

    def cause_of_death(self, worker_id: str) -> str:
        return self.causes.get(worker_id, "its process ended")

    def alive(self) -> Mapping[str, Role]:
        return dict(self.pools)

    async def ended(self) -> None:
        await asyncio.Event().wait()  # the actuator looks at intervals

    def pending(self) -> Mapping[str, str]:
        return dict.fromkeys(self.without_room & set(self.pools), "no Ray node has room for CPU 1")

    async def die(self, worker_id: str) -> None:
        del self.pools[worker_id]
        self.workers.pop(worker_id, None)
        if worker_id in self.servers:
            await self.servers.pop(worker_id).stop(None)

    async def beat(self, *, but: tuple[str, ...] = ()) -> None:
        for worker_id, pool in self.pools.items():
            if pool == "standby":
                state: Literal["starting", "ready"] = (
                    "starting" if worker_id in self.loading else "ready"
                )
                if worker_id not in but:
                    await self.registry.publish_standby(
                        StandbyWorker(worker_id, state, "host", 1, 0, 0), ttl_s=600
                    )
                continue
            if worker_id not in self.workers and worker_id not in but:
                await self._serve(worker_id, pool)
            if worker_id not in but:
                await self.registry.publish_worker(self.workers[worker_id].info, ttl_s=600)

    async def _serve(self, worker_id: str, pool: PoolName) -> None:
        server = grpc.aio.server()
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        claim = self.claims.get(worker_id)
        epoch = await self.registry.next_epoch(0, claim)
        info = WorkerInfo(
            worker_id, pool, epoch, self.first_state, address, "demo", "00", 16, 64, "host", 4096
        )
        if claim is not None:
            info = dataclasses.replace(info, started_by=claim.owner, term=claim.term)
        worker = FakeWorker(info)
        add_WorkerServiceServicer_to_server(worker, server)
        await server.start()
        self.workers[worker_id], self.servers[worker_id] = worker, server


@dataclass
class Cluster:
    registry: Registry
    fleet: Fleet
    clock: ManualClock
    actuator: Actuator

    @property
    def running(self) -> list[str]:
        return sorted(self.fleet.pools)

    async def tick(self, times: int = 1, *, but: tuple[str, ...] = ()) -> list[str]:
        for _ in range(times):
            await self.actuator.tick()
            await self.fleet.beat(but=but)
        return self.running


@asynccontextmanager
async def running_cluster(
    registry: Registry, sizes: dict[PoolName, int], **options: Any
) -> AsyncIterator[Cluster]:
    """`options` are the actuator's."""
    fleet, clock = Fleet(registry), ManualClock()
    yield Cluster(registry, fleet, clock, Actuator(registry, fleet, sizes, clock=clock, **options))
    for worker_id in list(fleet.pools):
        await fleet.die(worker_id)
