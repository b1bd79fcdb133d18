"""The state of a cluster during a test, as the cluster reports it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from kvrelay.client.admin import AdminClient
from kvrelay.errors import KvRelayError
from kvrelay.types.control_plane import ScalingDecision
from kvrelay.wire.cluster import ClusterStatus, PoolStatus

INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class PoolSample:
    """The state of a pool at one moment."""

    # Ready workers.
    workers: int
    desired: int
    # Requests.
    running: int
    waiting: int
    waiting_tokens: int
    # Held share of the pool's KV blocks.
    kv_share: float
    tokens_per_second: float
    # Mean over the ready workers.
    busy_share: float = 0.0
    # Share of the pool's KV blocks that is leased to hand-offs in progress. Included in kv_share.
    leased_share: float = 0.0

    @classmethod
    def of(cls, pool: PoolStatus) -> PoolSample:
        """Sums up the loads of a pool's workers."""
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
    """The state of a cluster at one moment."""

    # Seconds after the start of the test.
    at_s: float
    # Requests with workers, as the router counts them.
    running: int
    # Requests without workers.
    waiting: int
    pools: dict[str, PoolSample]
    # Waiting requests that wait for a prefill worker.
    waiting_for_prefill: int = 0


@dataclass(frozen=True, slots=True)
class Scaling:
    """One scaling decision. `at_s` is in seconds after the start of the test."""

    at_s: float
    pool: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The samples and the scaling decisions of one test."""

    samples: tuple[Sample, ...] = ()
    decisions: tuple[Scaling, ...] = ()
    # Number of polls without an answer.
    missed: int = 0


class Watch:
    """Polls the status of a cluster. A poll without a timely answer is counted as missed."""

    def __init__(self, client: AdminClient, interval_s: float = INTERVAL_S) -> None:
        self._client = client
        self._interval_s = interval_s
        self._start, self._unix_start = time.perf_counter(), time.time()
        self._samples: list[Sample] = []
        # A dict serves as an ordered set.
        self._decisions: dict[ScalingDecision, None] = {}
        self._missed = 0

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            due = time.perf_counter() + self._interval_s
            try:
                self._take(await asyncio.to_thread(self._client.status))
            except KvRelayError:
                self._missed += 1
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    def timeline(self) -> Timeline:
        """Returns the samples and decisions collected so far."""
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
        router = status.router
        self._samples.append(
            Sample(now, router.running, router.waiting, pools, router.waiting_for_prefill)
        )
        self._decisions |= dict.fromkeys(
            one for one in status.decisions if one.unix_time >= self._unix_start
        )
