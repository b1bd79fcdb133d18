"""Conversion of registry entries to a pool's metrics."""

from __future__ import annotations

from collections.abc import Sequence

from autoscaler.scaling_policy import Foreseen, PoolSnapshot
from kvrelay.config.autoscaling_policy import MetricName
from kvrelay.types.control_plane import RouterLoad
from kvrelay.types.workers import PoolName, WorkerInfo


def snapshot(
    pool: PoolName,
    size: int,
    workers: Sequence[WorkerInfo],
    routers: Sequence[RouterLoad],
    foreseen: Foreseen | None = None,
) -> PoolSnapshot:
    """Returns the snapshot of the pool, whose wanted size is `size`, from all live workers and
    routers. Metrics without a report are left out. `foreseen`: the answer of the metric slo.
    """
    members = [worker for worker in workers if worker.pool == pool]
    ready = [worker.load for worker in members if worker.state == "ready"]
    metrics = _queue(pool, size, workers, routers)
    if ready:
        metrics["queue_wait_p95_ms"] = max(load.queue_wait_p95_ms for load in ready)
        # Prompts also wait in the routers' queues, at most as long as the pool takes for them when
        # it is busy all the time.
        rate = sum(load.tokens_per_second / load.busy_share for load in ready if load.busy_share)
        if pool == "prefill" and rate:
            tokens = sum(router.waiting_prefill_tokens for router in routers)
            metrics["queue_wait_p95_ms"] += 1000 * tokens / rate
    if blocks := sum(load.blocks_total for load in ready):
        # Blocks leased for incoming KV are not counted: more decode workers would only reserve more
        # of them.
        metrics["kv_occupancy"] = (
            sum(load.blocks_held - load.blocks_leased for load in ready) / blocks
        )
    # TTFT includes the wait for a batch slot or for a tenant's limit, which no prefill worker
    # shortens.
    slots_are_short = pool == "prefill" and any(
        router.waiting_at_limit or router.waiting > 2 * router.waiting_for_prefill
        for router in routers
    )
    ttft = _worst([router.ttft_p95_ms for router in routers], routers)
    if ttft is not None and not slots_are_short:
        metrics["ttft_p95_ms"] = ttft
    if (itl := _worst([router.itl_p95_ms for router in routers], routers)) is not None:
        metrics["itl_p95_ms"] = itl
    busy_share = sum(load.busy_share for load in ready) / len(ready) if ready else None
    # A decode worker can serve every request, and no other worker can.
    is_needed = pool == "decode"
    return PoolSnapshot(size, len(ready), metrics, busy_share, foreseen, is_needed)


def _queue(
    pool: PoolName, size: int, workers: Sequence[WorkerInfo], routers: Sequence[RouterLoad]
) -> dict[MetricName, float]:
    """Returns the pool's waiting requests and their prompt tokens. Empty if no process reports
    them.
    """
    loads = [worker.load for worker in workers if worker.pool == pool]
    prompts = tokens = 0
    if any(worker.pool == "prefill" for worker in workers):
        prompts = sum(router.waiting_for_prefill for router in routers)
        tokens = sum(router.waiting_prefill_tokens for router in routers)
    if pool == "prefill" and loads:
        return {
            "queue_depth": sum(one.waiting for one in loads) + prompts,
            "queue_tokens": sum(one.waiting_tokens for one in loads) + tokens,
        }
    if not routers or (size and not loads):
        return {}
    # The requests of an empty prefill pool wait with the decode pool.
    decoding = [worker.load for worker in workers if worker.pool == "decode"]
    waiting = sum(one.waiting for one in decoding)
    waiting_tokens = sum(one.waiting_tokens for one in decoding)
    for one in routers:
        # No worker serves a tenant at its limit sooner.
        waiting += one.waiting - one.waiting_at_limit
        waiting_tokens += one.waiting_tokens - one.waiting_tokens_at_limit
    return {"queue_depth": waiting - prompts, "queue_tokens": waiting_tokens - tokens}


def _worst(latencies: Sequence[float | None], routers: Sequence[RouterLoad]) -> float | None:
    """Returns the worst router's latency, since percentiles have no mean. Returns 0 if no router
    has requests, and None if the latency is unknown.
    """
    measured = [latency for latency in latencies if latency is not None]
    if measured:
        return max(measured)
    idle = routers and not any(router.running or router.waiting for router in routers)
    return 0.0 if idle else None
