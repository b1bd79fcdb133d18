"""A controller's process in the control plane's simulation, and the workers that it started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulation.virtual_loop import Process

from autoscaler.lease import Lease
from kvrelay.types.workers import PoolName

if TYPE_CHECKING:
    from simulation.control import ControlSimulation


@dataclass(eq=False)
class ControlWorker:
    worker_id: str
    pool: PoolName
    process: Process
    controller: Controller
    registered: bool = False
    draining: bool = False
    unseen_until: float = 0.0  # it was cut off from Redis


@dataclass(eq=False)
class Controller:
    """One incarnation, and `autoscaler.launcher.Launcher` of its workers."""

    name: str
    process: Process
    simulation: ControlSimulation
    lease: Lease | None = None
    workers: dict[str, ControlWorker] = field(default_factory=dict)

    async def start(self, pool: PoolName, worker_id: str) -> None:
        assert self.lease is not None
        claim = self.lease.claim()
        self.simulation.act(claim.owner, claim.term, "start")
        self.simulation.names.append(worker_id)
        process = self.simulation.process(worker_id)
        worker = self.workers[worker_id] = ControlWorker(worker_id, pool, process, self)
        process.spawn(self.simulation.run_worker(worker, claim))

    async def stop(self, worker_id: str) -> None:
        self.simulation.kill_worker(self.workers[worker_id])

    drain = stop

    async def turn(self, worker_id: str, pool: PoolName) -> None:
        raise AssertionError("no pool has more use for it")

    def cause_of_death(self, worker_id: str) -> str:
        return "its process ended"

    def alive(self) -> Mapping[str, PoolName]:
        return {name: one.pool for name, one in self.workers.items() if one.process.alive}

    async def ended(self) -> None:
        await asyncio.Event().wait()  # the actuator looks at intervals

    def pending(self) -> Mapping[str, str]:
        return {}
