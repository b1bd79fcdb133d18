"""A router process of a fleet."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvrelay.launch.child_command import ChildCommand
from kvrelay.launch.endpoints import Endpoints
from kvrelay.wire.cluster import ClusterServiceStub, ClusterStatus, cluster_status_from_proto
from kvrelay.wire.cluster import pb as cluster_pb

# So that nothing hangs; a busy machine takes its time, and vLLM much of it to start
WAIT_S = 600.0 if os.environ.get("KVRELAY_FAULTS_ENGINE") == "vllm" else 90.0


@dataclass(frozen=True, eq=False)
class FleetRouter:
    child: ChildCommand
    endpoints: Endpoints
    channel: grpc.aio.Channel  # of a client
    admin: grpc.aio.Channel
    log: Path

    @property
    def alive(self) -> bool:
        return self.child.process.returncode is None

    def finds(self, worker_id: str) -> bool:
        """Whether the last that it logged of the worker is that it was found."""
        news = [line for line in self.log.read_text().splitlines() if f'"{worker_id}"' in line]
        told = [line for line in news if '"worker_found"' in line or '"worker_lost"' in line]
        return bool(told) and '"worker_found"' in told[-1]

    async def status(self) -> ClusterStatus:
        answer = await ClusterServiceStub(self.admin).GetStatus(cluster_pb.GetStatusRequest())
        return cluster_status_from_proto(answer)

    async def waiting(self, count: int) -> None:
        """Until so many requests wait in its queue."""
        async with asyncio.timeout(WAIT_S):
            while (await self.status()).router.waiting < count:
                await asyncio.sleep(0.002)

    async def registry_is_away(self) -> None:
        """Until it says so."""
        async with asyncio.timeout(WAIT_S):
            while (await self.status()).registry == "ok":
                await asyncio.sleep(0.05)

    async def registered(self, worker_ids: set[str]) -> None:
        """Until it reads in the entries of all these that they are ready."""
        async with asyncio.timeout(WAIT_S):
            while True:
                status = await self.status()
                ready = {
                    one.worker_id
                    for pool in status.pools
                    for one in pool.workers
                    if one.state == "ready"
                }
                if status.registry == "ok" and ready >= worker_ids:
                    return
                await asyncio.sleep(0.05)
