"""Size of a cluster whose workers prefill and decode, with the same SLO. Pure.

Chunked prefill beside a decode batch, with chunks as large as the ITL allows: Agrawal et al.,
"Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (2024), section 4.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvrelay.planning.quantity import plain
from kvrelay.planning.sizing.demand import MAX_WORKERS, Demand
from kvrelay.planning.sizing.disaggregated import missed_ttft
from kvrelay.planning.sizing.queueing import Wait
from kvrelay.planning.sizing.worker_kind import SPARE, WorkerKind, largest, slot_wait, smallest

# Tokens of the smallest chunk, and the largest chunks that are tried: a large chunk delays the
# answers beside it, which then hold their KV for longer.
_LEAST_CHUNK = 16
_MOST_CHUNKS = (256, 512, 2048, 8192)
_ROUNDS = 30


@dataclass(frozen=True, slots=True)
class ColocatedSize:
    """The size of a colocated cluster."""

    workers: int
    degree: int
    # Share of the time in which a worker computes prompts.
    prompt_share: float
    # Tokens of a chunk that the ITL allows beside the decode batch.
    chunk_tokens: int
    batch: float
    max_batch: int
    missed: float
    wait_s: float
    # Mean seconds of a step.
    step_s: float

    @property
    def devices(self) -> int:
        """Devices of the cluster."""
        return self.workers * self.degree


def colocated(demand: Demand, kind: WorkerKind) -> ColocatedSize | str:
    """Returns the smallest colocated cluster, or the reason why none meets the SLO."""
    slo, work = demand.slo, demand.workload
    mean, spread = work.context()
    by_memory = kind.memory_batch(mean, spread)
    most = min(by_memory, kind.latency_batch(mean, slo.itl_s))
    if most < 1:
        return (
            f"a worker of {kind.degree} devices cannot decode one sequence within the ITL of "
            f"{plain(slo.itl_s * 1000)} ms and its memory"
        )
    allowed = 1 - slo.attainment
    found: dict[int, ColocatedSize | None] = {}

    def fits(workers: int) -> bool:
        size = found.setdefault(workers, _evaluate(demand, kind, workers, most, mean))
        return size is not None and size.missed <= allowed

    workers = smallest(fits, 1, MAX_WORKERS)
    if workers is None:
        alone = _evaluate(demand, kind, MAX_WORKERS, most, mean)
        if alone is None:
            return (
                f"the ITL of {plain(slo.itl_s * 1000)} ms leaves no time for prompts beside a "
                "decode batch"
            )
        return (
            f"with chunks of {alone.chunk_tokens:,} tokens, as the ITL of "
            f"{plain(slo.itl_s * 1000)} ms requires, {alone.missed:.1%} of the requests miss the "
            "SLO at any number of workers"
        )
    size = found[workers]
    assert size is not None
    return size


def _evaluate(
    demand: Demand, kind: WorkerKind, workers: int, most: int, mean: float
) -> ColocatedSize | None:
    """Returns how `workers` workers do with the best chunks; None if they cannot carry the load."""
    tried = [_with_chunks(demand, kind, workers, most, mean, cap) for cap in _MOST_CHUNKS]
    able = [one for one in tried if one is not None]
    return min(able, key=lambda one: one.missed, default=None)


def _with_chunks(
    demand: Demand, kind: WorkerKind, workers: int, most: int, mean: float, cap: int
) -> ColocatedSize | None:
    """Returns how `workers` workers do with chunks of at most `cap` tokens.

    Finds the batch at which the tokens that arrive equal those that leave. Steps with a chunk are
    as long as the ITL allows, and others as long as a decode step.
    """
    slo, work = demand.slo, demand.workload
    rate, batch = work.rate / workers, 1.0
    prompts = demand.prompts()
    half = sum(share * (cached + new / 2) for cached, new, share in prompts)
    for _ in range(_ROUNDS):
        # Room for the variation of the batch.
        peak = min(float(most), batch + SPARE * math.sqrt(batch))
        chunk = _chunk(kind, half, peak, mean, slo.itl_s, cap)
        if chunk < _LEAST_CHUNK:
            return None
        services = [
            (_prompt_s(kind, cached, new, chunk, batch, mean), share)
            for cached, new, share in prompts
        ]
        mean_s = demand.mean(services)
        share = rate * mean_s
        if share >= 1:
            return None
        mixed = kind.costs.mixed_s(chunk, half, batch, batch * mean)
        plain = kind.costs.decode_s(batch, batch * mean)
        # A step may cost nothing.
        step = 1 / (share / mixed + (1 - share) / plain) if plain and mixed else 0.0
        new_batch = rate * work.decoded * step
        if new_batch > most:
            return None
        if abs(new_batch - batch) < 1e-6 * max(1.0, batch):
            break
        batch = new_batch
    wait = Wait(workers, work.rate, mean_s, work.arrival_scv, demand.scv(services))
    missed = missed_ttft(wait, services, slo.ttft_s)
    missed += slot_wait(workers * most, workers * batch, work.arrival_scv)
    return ColocatedSize(
        workers, kind.degree, share, chunk, batch, most, min(1.0, missed), wait.mean_s, step
    )


def _chunk(
    kind: WorkerKind, before: float, batch: float, mean: float, itl_s: float, cap: int
) -> int:
    """Returns the tokens of the largest chunk beside a batch that the ITL allows."""
    return largest(lambda size: kind.costs.mixed_s(size, before, batch, batch * mean) <= itl_s, cap)


def _prompt_s(
    kind: WorkerKind, cached: int, new: int, chunk: int, batch: float, mean: float
) -> float:
    """Returns the seconds of a prompt in chunks beside a batch."""
    steps = math.ceil(new / chunk)
    size = new / steps
    return steps * kind.costs.mixed_s(size, cached + (new - size) / 2, batch, batch * mean)
