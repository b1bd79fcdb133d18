"""The production actuator over a fleet's processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from faults.fleet import Fleet
from faults.fleet_worker import FleetWorker

from autoscaler.actuator import Actuator
from kvrelay.types.workers import POOLS, PoolName
from kvrelay.wire.cluster import ClusterServiceStub
from kvrelay.wire.cluster import pb as cluster_pb

INTERVAL_S = 0.1
STOP_S = 2.0  # for a worker to end that was told to


class FleetLauncher:
    """Forks workers where Ray would start actors: all that stands in for something."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.hangs = False  # the next one that is started
        self.most: dict[PoolName, int] = dict.fromkeys(POOLS, 0)  # that lived at one time
        self._started: dict[str, FleetWorker] = {}

    @property
    def started(self) -> int:
        """How many workers were."""
        return len(self._started)

    async def start(self, pool: PoolName, worker_id: str) -> None:
        oddity = {"hangs": True} if self.hangs else {}
        self.hangs = False
        self._started[worker_id] = worker = await self.fleet.add(pool, worker_id, **oddity)
        await self.fleet.until(lambda: worker.pid, f"{worker_id} has a process")
        self.most[pool] = max(self.most[pool], len(self.fleet.pool(pool)))

    async def stop(self, worker_id: str) -> None:
        worker = self._started[worker_id]
        self._send(worker, signal.SIGTERM)
        # The second word; another SIGTERM might be taken for the first
        self._send(worker, signal.SIGINT)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._ended(worker)
        self._send(worker, signal.SIGKILL)
        await self._ended(worker)

    async def drain(self, worker_id: str) -> None:
        self._send(self._started[worker_id], signal.SIGTERM)
        await self._ended(self._started[worker_id])

    async def turn(self, worker_id: str, pool: PoolName) -> None:
        raise NotImplementedError("without `rebalance` nobody changes over")

    async def ended(self) -> None:
        await asyncio.Event().wait()  # the actuator looks at intervals

    def pending(self) -> Mapping[str, str]:
        return {}

    def alive(self) -> Mapping[str, PoolName]:
        return {worker_id: one.pool for worker_id, one in self._started.items() if one.alive}

    def _send(self, worker: FleetWorker, number: int) -> None:
        if worker.alive:
            os.kill(worker.pid, number)

    async def _ended(self, worker: FleetWorker) -> None:
        while worker.alive:
            await asyncio.sleep(0.01)

    async def resize(self, **sizes: int) -> None:
        """As an operator does; returns when the pools are so and every worker is found."""
        await ClusterServiceStub(self.fleet.router.admin).SetPoolSize(
            cluster_pb.SetPoolSizeRequest(**sizes)
        )
        await self.are(**sizes)

    async def are(self, **sizes: int) -> None:
        """Until the pools have so many workers, all of which the router finds."""
        for pool in POOLS:
            if pool in sizes:
                what = f"{pool} has {sizes[pool]} workers"
                await self.fleet.until(lambda: len(self.fleet.pool(pool)) == sizes[pool], what)  # noqa: B023
        await self.fleet.complete()


@asynccontextmanager
async def actuated(fleet: Fleet) -> AsyncIterator[FleetLauncher]:
    """All workers that there are are the actuator's. Afterwards they are the fleet's again."""
    for worker in fleet.alive:
        os.kill(worker.pid, signal.SIGKILL)
    await fleet.until(lambda: not fleet.alive, "the fleet's own workers are gone")
    launcher = FleetLauncher(fleet)
    sizes: dict[PoolName, int] = {
        "prefill": fleet.config.prefill.replicas,
        "decode": fleet.config.decode.replicas,
    }
    await fleet.registry.set_desired(sizes)
    running = asyncio.create_task(
        Actuator(fleet.registry, launcher, sizes, interval_s=INTERVAL_S).run()
    )
    try:
        await launcher.are(**sizes)
        yield launcher
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
