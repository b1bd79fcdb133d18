"""What a cluster did while a test ran, by its own account."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from kvrelay.client.admin import AdminClient
from kvrelay.errors import KvRelayError
from kvrelay.types import ScalingDecision
from kvrelay.wire.cluster import ClusterStatus, PoolStatus

INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class PoolSample:
    workers: int  # ready
    desired: int
    running: int  # requests
    waiting: int
    waiting_tokens: int
    kv_share: float  # held part of the pool's KV blocks
    tokens_per_second: float
    busy_share: float = 0.0  # mean of the ready workers
    # Part of the pool's KV blocks that waits for prompts' KV; within kv_share
    leased_share: float = 0.0

    @classmethod
    def of(cls, pool: PoolStatus) -> PoolSample:
        loads = [worker.load for worker in pool.workers]
        ready = [worker.load for worker in pool.workers if worker.state == "ready"]
        blocks = max(1, sum(load.blocks_total for load in loads))
        return cls(
            workers=len(ready),
            desired=pool.desired,
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            waiting_tokens=sum(load.waiting_tokens for load in loads),
            kv_share=sum(load.blocks_held for load in loads) / blocks,
            tokens_per_second=sum(load.tokens_per_second for load in loads),
            busy_share=sum(load.busy_share for load in ready) / max(1, len(ready)),
            leased_share=sum(load.blocks_leased for load in loads) / blocks,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float  # after the test's start
    running: int  # requests, by the router
    waiting: int  # without workers
    pools: dict[str, PoolSample]


@dataclass(frozen=True, slots=True)
class Scaling:
    at_s: float
    pool: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class Timeline:
    samples: tuple[Sample, ...] = ()
    decisions: tuple[Scaling, ...] = ()
    missed: int = 0  # looks that got no answer


class Watch:
    """Looks at a cluster's status at intervals. One that does not answer in time is missed, not
    waited for.
    """

    def __init__(self, client: AdminClient, interval_s: float = INTERVAL_S) -> None:
        self._client = client
        self._interval_s = interval_s
        self._start, self._unix_start = time.perf_counter(), time.time()
        self._samples: list[Sample] = []
        self._decisions: dict[ScalingDecision, None] = {}  # a set that keeps its order
        self._missed = 0

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            due = time.perf_counter() + self._interval_s
            try:
                self._take(await asyncio.to_thread(self._client.status))
            except KvRelayError:
                self._missed += 1
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    def timeline(self) -> Timeline:
        decisions = sorted(self._decisions, key=lambda one: one.unix_time)
        return Timeline(
            samples=tuple(self._samples),
            decisions=tuple(
                Scaling(
                    one.unix_time - self._unix_start, one.pool, one.before, one.after, one.reason
                )
                for one in decisions
            ),
            missed=self._missed,
        )

    def _take(self, status: ClusterStatus) -> None:
        now = time.perf_counter() - self._start
        pools: dict[str, PoolSample] = {pool.name: PoolSample.of(pool) for pool in status.pools}
        self._samples.append(Sample(now, status.router.running, status.router.waiting, pools))
        self._decisions |= dict.fromkeys(
            one for one in status.decisions if one.unix_time >= self._unix_start
        )
