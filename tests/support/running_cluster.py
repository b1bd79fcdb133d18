"""A running cluster as tests see it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
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

    async def kill_a_busy_decode_worker(self) -> None:
        """One that runs something by the last report. None, if none says so for three seconds: what
        it ran has ended.
        """
        try:
            status = await self.until(
                lambda status: any(worker.load.running for worker in status.pools[1].workers),
                "a decode worker runs something",
                seconds=3.0,
            )
        except AssertionError:
            return
        doomed = next(worker for worker in status.pools[1].workers if worker.load.running)
        os.kill(doomed.pid, signal.SIGKILL)

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


async def until_a_fault_hits(attempts: Callable[[], Awaitable[int]], tries: int = 5) -> None:
    """Calls it until an answer took more than one attempt. A report of who runs what is older than
    the truth, so an answer may end just before the worker that gave it dies.
    """
    for _ in range(tries):
        if await attempts() > 1:
            return
    raise AssertionError(f"no fault hit an answer in {tries} tries")


@asynccontextmanager
async def running_on(config: ClusterConfig) -> AsyncIterator[RunningCluster]:
    """As `kvrelay serve` runs it, with a client of each of its endpoints in the clear."""
    async with (
        LocalCluster(config, quiet=True) as local,
        AsyncClient(local.endpoints.grpc) as client,
        grpc.aio.insecure_channel(local.endpoints.admin) as admin,
    ):
        yield RunningCluster(local, client, ClusterServiceStub(admin))
