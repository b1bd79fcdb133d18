"""Sizes of a prefill pool and a decode pool that meet an SLO. Pure.

Prefill: one prompt at a time per worker, a common queue, so M/G/c. Decode: each worker generates
for a batch, so its slots are the servers. See `queueing` for the sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from kvrelay.planning.quantity import plain
from kvrelay.planning.sizing.demand import LINK_SHARE, MAX_WORKERS, Demand
from kvrelay.planning.sizing.queueing import Wait, square_root_servers
from kvrelay.planning.sizing.worker_kind import MAX_BATCH, WorkerKind, slot_wait, smallest

# Parts of the requests that may miss the SLO which each pool may cause.
_PREFILL_PART = 0.95
_DECODE_PART = 0.05


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of one pool, and how much of it the workload takes."""

    workers: int
    # Devices of one worker.
    degree: int
    # Mean share of the pool that is busy: of the workers' time, or of the batch slots.
    utilisation: float
    # Share of the requests that miss the SLO because of this pool.
    missed: float
    # Share of the network of one worker.
    link_utilisation: float
    # Workers that square-root staffing gives for the same load.
    square_root: int
    # What keeps the pool from being smaller.
    limit: str
    # Mean wait in seconds.
    wait_s: float = 0.0
    # Mean and largest batch of a decode worker.
    batch: float = 0.0
    max_batch: int = 0
    # Seconds of a step at the mean and at the largest batch.
    step_s: float = 0.0
    max_step_s: float = 0.0

    @property
    def devices(self) -> int:
        """Devices of the whole pool."""
        return self.workers * self.degree


def prefill_pool(demand: Demand, kind: WorkerKind) -> PoolSize | str:
    """Returns the smallest prefill pool, or the reason why none meets the SLO."""
    slo, work = demand.slo, demand.workload
    services = demand.services(kind)
    allowed = _PREFILL_PART * (1 - slo.attainment)
    slow = fsum(weight for seconds, weight in services if seconds > slo.ttft_s)
    if slow > allowed:
        return (
            f"{slow:.1%} of the prompts take longer than the TTFT of {plain(slo.ttft_s * 1000)} ms "
            f"on an idle worker of {kind.degree} devices; the mean prompt takes "
            f"{plain(demand.mean(services) * 1000, 4)} ms"
        )
    mean_s, scv = demand.mean(services), demand.scv(services)
    offered = work.rate * mean_s
    link = _link_load(demand, kind)
    by_link = max(1, math.ceil(link / LINK_SHARE))

    def missed(workers: int) -> float:
        wait = Wait(workers, work.rate, mean_s, work.arrival_scv, scv)
        return missed_ttft(wait, services, slo.ttft_s)

    least = max(1, math.floor(offered) + 1)
    by_queue = smallest(lambda workers: missed(workers) <= allowed, least, MAX_WORKERS)
    if by_queue is None or max(by_queue, by_link) > MAX_WORKERS:
        return f"more than {MAX_WORKERS:,} prefill workers would be needed"
    workers = max(by_queue, by_link)
    wait = Wait(workers, work.rate, mean_s, work.arrival_scv, scv)
    limit = "hand-off link" if by_link > by_queue else "compute" if workers == least else "TTFT"
    return PoolSize(
        workers=workers,
        degree=kind.degree,
        utilisation=offered / workers,
        missed=missed(workers),
        link_utilisation=link / workers,
        square_root=square_root_servers(offered, max(1e-9, allowed)),
        limit=limit,
        wait_s=wait.mean_s,
    )


def decode_pool(demand: Demand, kind: WorkerKind, slots: int = MAX_BATCH) -> PoolSize | str:
    """Returns the smallest decode pool, or the reason why none meets the SLO. slots: most sequences
    of a worker.
    """
    slo, work = demand.slo, demand.workload
    mean, spread = work.context()
    by_memory = kind.memory_batch(mean, spread)
    by_latency = kind.latency_batch(mean, slo.itl_s)
    most = min(by_memory, by_latency, slots)
    if most < 1:
        alone = kind.costs.decode_s(1, mean)
        if by_latency < 1:
            return (
                f"a decode step of one sequence takes {plain(alone * 1000, 4)} ms on {kind.degree} "
                f"devices, above the ITL of {plain(slo.itl_s * 1000)} ms"
            )
        return f"{kind.degree} devices do not hold the KV of one sequence of {mean:,.0f} tokens"
    allowed = _DECODE_PART * (1 - slo.attainment)
    tokens_per_s = work.rate * work.decoded
    link = _link_load(demand, kind)
    by_link = max(1, math.ceil(link / LINK_SHARE))

    def missed(workers: int) -> float:
        batch = kind.batch_at(tokens_per_s / workers, mean, most)
        return (
            1.0 if batch is None else slot_wait(workers * most, workers * batch, work.arrival_scv)
        )

    by_slots = smallest(lambda workers: missed(workers) <= allowed, 1, MAX_WORKERS)
    if by_slots is None or max(by_slots, by_link) > MAX_WORKERS:
        return f"more than {MAX_WORKERS:,} decode workers would be needed"
    workers = max(by_slots, by_link)
    batch = kind.batch_at(tokens_per_s / workers, mean, most) or 0.0
    limit = "ITL" if by_latency <= by_memory else "KV memory"
    if slots < min(by_memory, by_latency):
        limit = "batch slots"
    if by_link > by_slots:
        limit = "hand-off link"
    elif workers == 1:
        limit = "one worker suffices"
    busy = workers * batch
    return PoolSize(
        workers=workers,
        degree=kind.degree,
        utilisation=batch / most,
        missed=missed(workers),
        link_utilisation=link / workers,
        square_root=math.ceil(square_root_servers(busy, max(1e-9, allowed)) / most),
        limit=limit,
        batch=batch,
        max_batch=most,
        step_s=kind.costs.decode_s(batch, batch * mean),
        max_step_s=kind.costs.decode_s(most, most * mean),
    )


def _link_load(demand: Demand, kind: WorkerKind) -> float:
    """Returns the workers whose links the hand-offs of all requests would keep busy. Copies of KV
    within a worker are not sent.
    """
    link_s = kind.costs.handoff_s(demand.handoff_bytes(kind.kv.on(1)))
    return demand.workload.rate * link_s


def missed_ttft(wait: Wait, services: Sequence[tuple[float, float]], ttft_s: float) -> float:
    """Returns the share of the requests whose wait and service take longer than `ttft_s`.
    services: (seconds, share of the requests).
    """
    return fsum(weight * wait.beyond(ttft_s - seconds) for seconds, weight in services)
