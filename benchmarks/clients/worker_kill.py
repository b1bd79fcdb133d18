"""Runs a case while the decode worker of its answer is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
from client_process import CaseResult, ClientProcess

from kvrelay.wire.cluster import (
    ClusterServiceStub,
    WorkerStatus,
    cluster_status_from_proto,
    pb,
)

# Between two looks at the number of generated tokens.
_POLL_S = 0.005
_STATUS_S = 0.25
_READY_S = 120.0
_GENERATED = re.compile(r"^kvrelay_generation_tokens_total\S* (\S+)$", re.MULTILINE)
_RETRIES = re.compile(r'^kvrelay_retries_total\S*state="made"\S* (\S+)$', re.MULTILINE)


class ClusterWatch:
    """What a cluster has generated, and its decode workers."""

    def __init__(self, http: httpx.AsyncClient, admin: ClusterServiceStub) -> None:
        self._http = http
        self._admin = admin

    async def tokens(self) -> int:
        """Returns the number of tokens that the router has passed on."""
        return await self._sum(_GENERATED)

    async def retries(self) -> int:
        """Returns the number of times that a request went on on another worker."""
        return await self._sum(_RETRIES)

    async def idle(self, decode: int) -> tuple[WorkerStatus, ...]:
        """Returns the decode workers when there are `decode` of them and all workers are ready and
        idle. Raises TimeoutError.
        """
        async with asyncio.timeout(_READY_S):
            while True:
                status = cluster_status_from_proto(
                    await self._admin.GetStatus(pb.GetStatusRequest())
                )
                pools = {pool.name: pool.workers for pool in status.pools}
                workers = [one for pool in pools.values() for one in pool]
                at_rest = all(one.state == "ready" and one.load.empty for one in workers)
                if at_rest and len(pools["decode"]) == decode:
                    return pools["decode"]
                await asyncio.sleep(_STATUS_S)

    async def _sum(self, pattern: re.Pattern[str]) -> int:
        text = (await self._http.get("/metrics")).text
        return int(sum(float(value) for value in pattern.findall(text)))


async def run_with_kill(
    client: ClientProcess,
    case: str,
    watch: ClusterWatch,
    workers: tuple[WorkerStatus, ...],
    after_tokens: int,
    within_s: float,
) -> tuple[CaseResult, int]:
    """Runs a case. When the cluster has generated `after_tokens` for it, kills the decode worker
    that computed most of them. Returns the result and the number of requests that moved to another
    worker, 0 if the answer ended first.
    """
    before, moved = await watch.tokens(), await watch.retries()
    busiest = _busiest(workers)
    running = asyncio.create_task(client.run(case, within_s))
    while not running.done():
        if await watch.tokens() - before >= after_tokens:
            os.kill(busiest(), signal.SIGKILL)
            break
        await asyncio.sleep(_POLL_S)
    result = await running
    return result, await watch.retries() - moved


def _busiest(workers: tuple[WorkerStatus, ...]) -> Callable[[], int]:
    """Returns a function that returns the process id of the worker that has computed longest since.
    The heartbeats of the workers would tell too late.
    """
    begun = {one.pid: _ticks(one.pid) for one in workers}
    return lambda: max(begun, key=lambda pid: _ticks(pid) - begun[pid])


def _ticks(pid: int) -> int:
    """Returns the processor time of a process, in clock ticks."""
    # The name of the process may contain spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # proc(5): utime and stime are fields 14 and 15.
    return int(fields[11]) + int(fields[12])
