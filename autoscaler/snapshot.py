"""From the registry's entries to a pool's metrics."""

from __future__ import annotations

from collections.abc import Sequence

from autoscaler.policy import PoolSnapshot
from kvrelay.config import MetricName
from kvrelay.types import PoolName, RouterLoad, WorkerInfo


def snapshot(pool: PoolName, size: int, workers: Sequence[WorkerInfo], routers: Sequence[RouterLoad]) -> PoolSnapshot:
    """The pool `pool` of wanted size `size`, given all live workers and routers. What nobody reports is left out."""
    members = [worker for worker in workers if worker.pool == pool]
    ready = [worker for worker in members if worker.state == "ready"]
    metrics: dict[MetricName, float] = {}
    if pool == "prefill" and members:
        metrics["queue_depth"] = sum(worker.load.waiting for worker in members)
        metrics["queue_tokens"] = sum(worker.load.waiting_tokens for worker in members)
    elif routers and (members or size == 0):
        # Requests without blocks wait in the router. What an empty prefill pool would do waits with the decode pool.
        queued = [worker for worker in workers if worker.pool == "decode"]
        metrics["queue_depth"] = sum(one.load.waiting for one in queued) + sum(one.waiting for one in routers)
        metrics["queue_tokens"] = sum(one.load.waiting_tokens for one in queued) + sum(
            one.waiting_tokens for one in routers
        )
    if ready:
        metrics["queue_wait_p95_ms"] = max(worker.load.queue_wait_p95_ms for worker in ready)
    if blocks := sum(worker.load.blocks_total for worker in ready):
        metrics["kv_occupancy"] = sum(worker.load.blocks_held for worker in ready) / blocks
    if (ttft := _worst([router.ttft_p95_ms for router in routers], routers)) is not None:
        metrics["ttft_p95_ms"] = ttft
    if (itl := _worst([router.itl_p95_ms for router in routers], routers)) is not None:
        metrics["itl_p95_ms"] = itl
    return PoolSnapshot(size, len(ready), metrics)


def _worst(latencies: Sequence[float | None], routers: Sequence[RouterLoad]) -> float | None:
    """The worst router's: percentiles have no mean. 0 when nobody asks for anything; None when it is not known."""
    measured = [latency for latency in latencies if latency is not None]
    if measured:
        return max(measured)
    idle = routers and not any(router.running or router.waiting for router in routers)
    return 0.0 if idle else None
