"""Runs a case while the decode worker of its answer is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import deque
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
# Looks at the processor time of the workers that count: an agent's requests run on one worker after
# another.
_WINDOW = 32
# Looks for a request that moved, after its answer.
_LOOKS = 16
_READY_S = 180.0
# A worker that dies sooner after its start delays its replacement, as in a crash loop.
_SETTLED_S = 6.0
_GENERATED = re.compile(r"^kvrelay_generation_tokens_total\S* (\S+)$", re.MULTILINE)


class ClusterWatch:
    """What a cluster has generated, and its decode workers."""

    def __init__(self, http: httpx.AsyncClient, admin: ClusterServiceStub) -> None:
        self._http = http
        self._admin = admin
        # Process ids of killed workers. The status may show them for a moment.
        self._killed: set[int] = set()
        # Process id -> time when the worker was first seen ready.
        self._ready_since: dict[int, float] = {}

    def kill(self, pid: int) -> None:
        """Kills a worker."""
        self._killed.add(pid)
        os.kill(pid, signal.SIGKILL)

    async def tokens(self) -> int:
        """Returns the number of tokens that the router has passed on."""
        text = (await self._http.get("/metrics")).text
        return int(sum(float(value) for value in _GENERATED.findall(text)))

    async def moved(self) -> frozenset[str]:
        """Returns the ids of the last requests that had more than one attempt."""
        requests = (await self._http.get("/status.json")).json()["requests"]
        return frozenset(one["id"] for one in requests if len(one["ledger"]["attempts"]) > 1)

    async def idle(self, decode: int, settled: bool = False) -> tuple[WorkerStatus, ...]:
        """Returns the decode workers when there are `decode` of them and all workers are ready and
        idle. `settled`: and have been ready for long enough to be killed. Raises TimeoutError.
        """
        async with asyncio.timeout(_READY_S):
            while True:
                status = cluster_status_from_proto(
                    await self._admin.GetStatus(pb.GetStatusRequest())
                )
                pools = {pool.name: pool.workers for pool in status.pools}
                workers = [one for pool in pools.values() for one in pool]
                now = time.monotonic()
                for one in workers:
                    if one.state == "ready":
                        self._ready_since.setdefault(one.pid, now)
                age_s = _SETTLED_S if settled else 0.0
                at_rest = all(
                    one.load.empty
                    and one.pid not in self._killed
                    and now - self._ready_since.get(one.pid, now + 1) >= age_s
                    for one in workers
                )
                if at_rest and len(pools["decode"]) == decode:
                    return pools["decode"]
                await asyncio.sleep(_STATUS_S)


class BusyWorker:
    """Tells which worker computes. The heartbeats of the workers would tell too late."""

    def __init__(self, workers: tuple[WorkerStatus, ...]) -> None:
        # The last counts of processor time, oldest first, by process id.
        self._counts: deque[dict[int, int]] = deque(maxlen=_WINDOW)
        self._pids = [one.pid for one in workers]

    def look(self) -> None:
        """Reads the processor time of all workers."""
        self._counts.append({pid: _ticks(pid) for pid in self._pids})

    @property
    def pid(self) -> int:
        """Process id of the worker that has computed longest during the last looks."""
        first, last = self._counts[0], self._counts[-1]
        return max(self._pids, key=lambda pid: last[pid] - first[pid])


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
    before, moved = await watch.tokens(), await watch.moved()
    busy = BusyWorker(workers)
    running = asyncio.create_task(client.run(case, within_s))
    while not running.done():
        busy.look()
        if await watch.tokens() - before >= after_tokens:
            busy.look()
            watch.kill(busy.pid)
            break
        await asyncio.sleep(_POLL_S)
    result = await running
    # The status page is drawn anew every second or so.
    for _ in range(_LOOKS):
        if found := await watch.moved() - moved:
            return result, len(found)
        await asyncio.sleep(_STATUS_S)
    return result, 0


def _ticks(pid: int) -> int:
    """Returns the processor time of a process, in clock ticks."""
    # The name of the process may contain spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # proc(5): utime and stime are fields 14 and 15.
    return int(fields[11]) + int(fields[12])
