"""A running cluster as tests see it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from support.cluster_status import first_status

from kvrelay.client import AsyncClient
from kvrelay.config.schema import ClusterConfig
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.wire.cluster import (
    ClusterServiceStub,
    ClusterStatus,
    WorkerStatus,
    cluster_status_from_proto,
    pb,
)

ANY_PORT = dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0")


@dataclass(frozen=True)
class RunningCluster:
    local: LocalCluster
    client: AsyncClient
    admin: ClusterServiceStub

    async def status(self) -> ClusterStatus:
        return cluster_status_from_proto(await self.admin.GetStatus(pb.GetStatusRequest()))

    async def workers(self, pool: str) -> tuple[WorkerStatus, ...]:
        return next(one.workers for one in (await self.status()).pools if one.name == pool)

    async def until(
        self, holds: Callable[[ClusterStatus], bool], what: str, seconds: float = 60.0
    ) -> ClusterStatus:
        return await first_status(self.status, holds, what, seconds)

    async def settled(
        self, prefill: int = 2, decode: int = 2, seconds: float = 60.0
    ) -> ClusterStatus:
        """The status once that many workers are ready and hold nothing."""
        wanted = {"prefill": prefill, "decode": decode}

        def at_rest(status: ClusterStatus) -> bool:
            return all(
                len(pool.workers) == wanted[pool.name]
                and all(
                    one.state == "ready" and one.load.empty and one.load.blocks_held == 0
                    for one in pool.workers
                )
                for pool in status.pools
            )

        return await self.until(at_rest, f"{wanted} workers, all idle, all blocks back", seconds)


@asynccontextmanager
async def running_on(config: ClusterConfig) -> AsyncIterator[RunningCluster]:
    """As `kvrelay serve` runs it, with a client of each of its endpoints in the clear."""
    async with (
        LocalCluster(config, quiet=True) as local,
        AsyncClient(local.endpoints.grpc) as client,
        grpc.aio.insecure_channel(local.endpoints.admin) as admin,
    ):
        yield RunningCluster(local, client, ClusterServiceStub(admin))
