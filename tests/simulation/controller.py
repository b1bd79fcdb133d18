"""A controller's process in the simulated cluster, and the workers that it started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulation.history import Act
from simulation.virtual_loop import Process

from autoscaler.lease import Lease
from kvrelay.process.stop_request import DRAIN_GRACE_S, StopRequest
from kvrelay.types.control_plane import Claim
from kvrelay.types.workers import PoolName, Role
from kvrelay.worker.worker import Worker

if TYPE_CHECKING:
    from simulation.cluster import Cluster

STOP_TIMEOUT_S = 5.0  # for a worker that was told to end at once


@dataclass(slots=True)
class Member:
    """A worker and its process, alive or not."""

    worker_id: str
    pool: Role
    process: Process
    stop: StopRequest = field(default_factory=StopRequest)
    turns_to: PoolName | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    worker: Worker | None = None  # once it serves
    # By block and generation: of who had it first
    salts: dict[tuple[int, int], str] = field(default_factory=dict)
    last_epoch: int = 0
    claim: Claim | None = None  # under which it was started
    version: int = 0  # of the model that its process has loaded


@dataclass(eq=False)
class Controller:
    """One controller's process, and `autoscaler.launcher.Launcher` of its workers."""

    cluster: Cluster
    process: Process
    lease: Lease | None = None
    members: dict[str, Member] = field(default_factory=dict)

    async def start(self, role: Role, worker_id: str) -> None:
        assert self.lease is not None
        claim = self.lease.claim()
        cluster = self.cluster
        cluster.redis.store.acts.append(Act(cluster.loop.time(), claim.owner, claim.term, "start"))
        self.members[worker_id] = cluster.start_worker(role, worker_id, claim)

    async def stop(self, worker_id: str) -> None:
        """As kvrelay.launch.RayLauncher does: asks, and kills what does not end in time."""
        self.members[worker_id].stop.now()
        await self.cluster.until_ended(self.members[worker_id], STOP_TIMEOUT_S)

    async def drain(self, worker_id: str) -> None:
        self.members[worker_id].stop()
        await self.cluster.until_ended(self.members[worker_id], DRAIN_GRACE_S + STOP_TIMEOUT_S)

    async def turn(self, worker_id: str, pool: PoolName) -> None:
        """As kvrelay.launch.pool_switch.Roles does."""
        member = self.members[worker_id]
        if not member.stop.drain.is_set():
            said = (
                "a standby worker joined a pool"
                if member.pool == "standby"
                else "a worker changed its pool"
            )
            self.cluster.network.faults[said] += 1
            member.turns_to = pool
            member.stop.now()

    async def ended(self) -> None:
        await self.cluster.worker_ended()

    def pending(self) -> Mapping[str, str]:
        return {}

    def cause_of_death(self, worker_id: str) -> str:
        return "its process ended"

    def alive(self) -> Mapping[str, Role]:
        return {name: member.pool for name, member in self.members.items() if member.process.alive}
