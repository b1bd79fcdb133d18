"""Two pools as a fluid that load flows through: for what a policy would do with a load that no
cluster has seen.

Requests wait for a batch slot on a decode worker, then for the prefill pool, then decode, as in
kvrelay; but they are amounts and not individuals, so times are means where a cluster measures
percentiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoscaler.scaling_policy import PoolSnapshot
from autoscaler.snapshot import awaited_pool
from kvrelay.config.schema import MetricName
from kvrelay.types import POOLS, PoolName

_STEP_S = 1.0  # at most: a batch slot that comes free is taken with the next step
_SMOOTH_S = 10.0  # over which the rate at which requests leave is measured


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """What one worker can do, as `kvrelay bench engine` measures it."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float  # of a full batch
    itl_s: float  # of one sequence alone
    max_batch: int
    kv_tokens: int  # that a decode worker's blocks hold
    start_s: float  # from the decision until a new worker serves

    def inter_token_s(self, batch: float) -> float:
        """On one worker with so many sequences: a straight line from one sequence to a full
        batch.
        """
        full = self.max_batch / self.decode_tokens_per_s
        return self.itl_s + max(0.0, full - self.itl_s) * max(0.0, batch - 1) / max(
            1, self.max_batch - 1
        )


@dataclass(slots=True)
class Requests:
    """An amount of requests; tokens are of all of them together."""

    number: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0  # yet to come

    def add(self, other: Requests) -> None:
        self.number += other.number
        self.prompt_tokens += other.prompt_tokens
        self.output_tokens += other.output_tokens

    def take(self, share: float) -> Requests:
        taken = Requests(
            self.number * share, self.prompt_tokens * share, self.output_tokens * share
        )
        self.add(Requests(-taken.number, -taken.prompt_tokens, -taken.output_tokens))
        return taken


@dataclass(slots=True)
class _Pool:
    size: int
    starting: list[float] = field(default_factory=list)  # when each will serve

    def ready(self, now: float) -> int:
        self.starting = [at for at in self.starting if at > now]
        return self.size - len(self.starting)


class FluidCluster:
    """Owns the load that is in the pools, and the pools' sizes."""

    def __init__(self, speed: WorkerSpeed, prefill: int, decode: int) -> None:
        self._speed = speed
        self._pools: dict[PoolName, _Pool] = {"prefill": _Pool(prefill), "decode": _Pool(decode)}
        self._now = 0.0
        self._waiting = Requests()  # for a batch slot
        self._prefilling = Requests()
        self._decoding = Requests()
        self._generated = 0.0  # tokens of the answers that are under way
        self._prompt = 0.0  # tokens of one, in the mean of those that came last
        self._leaving = 0.0  # requests per second, of late
        self._batch = 0.0  # sequences that decoded on one worker, in the last step
        self._occupied = 0.0  # tokens of answers' KV on decode workers, in the last step
        self._prefill_busy = 0.0  # share of the prefill workers' time, in the last step

    @property
    def unfinished(self) -> float:
        return self._waiting.number + self._prefilling.number + self._decoding.number

    def resize(self, pool: PoolName, size: int) -> None:
        """New workers serve after their start; those that go, go at once, the starting ones
        first.
        """
        one = self._pools[pool]
        one.starting += [self._now + self._speed.start_s] * (size - one.size)
        del one.starting[max(0, len(one.starting) - max(0, one.size - size)) :]
        one.size = size

    def step(self, arrived: Requests, seconds: float) -> dict[PoolName, PoolSnapshot]:
        """What is there after `seconds` more, during which `arrived` came, evenly."""
        steps = math.ceil(seconds / _STEP_S)
        for left in range(steps, 0, -1):
            pools = self._step(arrived.take(1 / left), seconds / steps)
        return pools

    def _step(self, arrived: Requests, seconds: float) -> dict[PoolName, PoolSnapshot]:
        self._now += seconds
        ready = {pool: self._pools[pool].ready(self._now) for pool in POOLS}
        if arrived.number:
            self._prompt = arrived.prompt_tokens / arrived.number
        self._waiting.add(arrived)
        self._slot(ready["decode"])
        busy = self._prefill(ready, seconds)
        self._decode(ready["decode"], seconds, seconds * (1 - busy))
        idle = arrived.number <= 0 and self.unfinished <= 0
        latency = self._latencies(ready, idle)
        pools: dict[PoolName, dict[MetricName, float]] = {
            "prefill": self._prefill_metrics(ready) | latency,
            "decode": self._decode_metrics(ready) | latency,
        }
        if self._waiting.number > 0 and not self._before_slots("prefill", ready).number:
            # It counts the wait for a batch slot, which no prefill worker shortens.
            pools["prefill"].pop("ttft_p95_ms", None)
        # As a decode worker tells it
        slots = math.sqrt(min(1.0, self._batch / self._speed.max_batch))
        shares: dict[PoolName, float] = {
            "prefill": self._prefill_busy,
            "decode": max(slots, pools["decode"].get("kv_occupancy", 0.0)),
        }
        return {
            pool: PoolSnapshot(
                self._pools[pool].size,
                ready[pool],
                pools[pool],
                shares[pool] if ready[pool] else None,
            )
            for pool in POOLS
        }

    @property
    def _held_tokens(self) -> float:
        """Of KV on decode workers. Blocks are reserved before the prefill."""
        return self._prefilling.prompt_tokens + self._decoding.prompt_tokens + self._generated

    def _slot(self, workers: int) -> None:
        waiting = self._waiting
        if waiting.number <= 0:
            return
        slots = workers * self._speed.max_batch - self._prefilling.number - self._decoding.number
        room = workers * self._speed.kv_tokens - self._held_tokens
        fit = min(
            slots, room * waiting.number / waiting.prompt_tokens if waiting.prompt_tokens else slots
        )
        self._prefilling.add(waiting.take(min(1.0, max(0.0, fit) / waiting.number)))

    def _prefill(self, ready: Mapping[PoolName, int], seconds: float) -> float:
        """Returns the share of the decode workers' time that prompts took, where there is no
        prefill worker.
        """
        capacity = self._prefill_rate(ready) * seconds
        self._prefill_busy = 0.0
        if self._prefilling.prompt_tokens <= 0 or not capacity:
            return 0.0
        done = self._prefilling.take(min(1.0, capacity / self._prefilling.prompt_tokens))
        self._decoding.add(done)
        busy = done.prompt_tokens / capacity
        if ready["prefill"]:
            self._prefill_busy = busy
            return 0.0
        return busy

    def _prefill_rate(self, ready: Mapping[PoolName, int]) -> float:
        """Tokens per second; decode workers prefill where there is no other."""
        return (ready["prefill"] or ready["decode"]) * self._speed.prefill_tokens_per_s

    def _decode(self, workers: int, seconds: float, decoding_s: float) -> None:
        decoding, left = self._decoding, 0.0
        self._batch = decoding.number / workers if workers else 0.0
        self._occupied = self._decoding.prompt_tokens + self._generated
        if self._batch > 0:
            tokens = decoding.number * decoding_s / self._speed.inter_token_s(self._batch)
            if tokens > decoding.output_tokens:  # they leave before the step is over
                self._occupied *= decoding.output_tokens / tokens
            share = min(1.0, tokens / decoding.output_tokens) if decoding.output_tokens > 0 else 1.0
            self._generated = (self._generated + decoding.output_tokens * share) * (1 - share)
            left = decoding.take(share).number
        self._leaving += (left / seconds - self._leaving) * min(1.0, seconds / _SMOOTH_S)

    def _prefill_metrics(self, ready: Mapping[PoolName, int]) -> dict[MetricName, float]:
        # What an empty pool would do waits with the decode pool
        if not self._pools["prefill"].size:
            return {
                "queue_depth": self._waiting.number,
                "queue_tokens": self._waiting.prompt_tokens,
            }
        crowd, before = self._prefilling, self._before_slots("prefill", ready)
        # One prompt a worker is under way and does not wait.
        share = max(0.0, 1 - ready["prefill"] / crowd.number) if crowd.number > 0 else 0.0
        found: dict[MetricName, float] = {
            "queue_depth": crowd.number * share + before.number,
            "queue_tokens": crowd.prompt_tokens * share + before.prompt_tokens,
        }
        if rate := self._prefill_rate(ready):
            found["queue_wait_p95_ms"] = 1000 * crowd.prompt_tokens * share / rate
        return found

    def _decode_metrics(self, ready: Mapping[PoolName, int]) -> dict[MetricName, float]:
        before = self._before_slots("decode", ready)
        found: dict[MetricName, float] = {
            "queue_depth": before.number,
            "queue_tokens": before.prompt_tokens,
        }
        if ready["decode"]:
            found["kv_occupancy"] = min(
                1.0, self._occupied / (ready["decode"] * self._speed.kv_tokens)
            )
        return found

    def _before_slots(self, pool: PoolName, ready: Mapping[PoolName, int]) -> Requests:
        """Requests without a batch slot, if it is this pool that they wait for."""
        prompts = (
            max(0.0, self._prefilling.number - ready["prefill"])
            if self._pools["prefill"].size
            else 0.0
        )
        return self._waiting if awaited_pool(prompts, self._decoding.number) == pool else Requests()

    def _latencies(self, ready: Mapping[PoolName, int], idle: bool) -> dict[MetricName, float]:
        """As the routers measure them; left out where nothing moves, so that nobody knows."""
        found: dict[MetricName, float] = {}
        if ready["decode"]:
            found["itl_p95_ms"] = (
                1000 * self._speed.inter_token_s(self._batch) if self._batch > 0 else 0.0
            )
        rate = self._prefill_rate(ready)
        if idle:
            found["ttft_p95_ms"] = 0.0
        elif rate and (self._waiting.number <= 0 or self._leaving > 0):
            slot_s = self._waiting.number / self._leaving if self._waiting.number > 0 else 0.0
            prompt_s = self._prompt / self._speed.prefill_tokens_per_s
            found["ttft_p95_ms"] = 1000 * (
                slot_s + self._prefilling.prompt_tokens / rate + prompt_s
            )
        return found
