"""Queueing model of two pools. It predicts the decisions of a policy for a load that no cluster has
served.

Requests wait until a prefill worker is about to need them and a decode worker has a batch slot, as
in kvrelay. The model handles amounts of requests instead of single requests (a fluid model), so it
yields means where a cluster measures percentiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoscaler.scaling_policy import PoolSnapshot
from kvrelay.config.autoscaling_policy import MetricName
from kvrelay.types.workers import POOLS, PoolName
from kvrelay.worker.steps.measured_step_cost import utilisation

# Prompt tokens that wait at a prefill worker; further prompts wait at the router.
_BACKLOG_TOKENS = 1024
# Upper bound of a step. A free batch slot is taken in the next step.
_STEP_S = 1.0
# Time constant for the measured rate of finished requests.
_SMOOTH_S = 10.0


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """Speed and capacity of one worker, as `kvrelay bench engine` measures them."""

    prefill_tokens_per_s: float
    # Of a full batch.
    decode_tokens_per_s: float
    # Of a single sequence.
    itl_s: float
    max_batch: int
    # Capacity of a decode worker's blocks.
    kv_tokens: int
    # From the decision until a new worker serves.
    start_s: float

    @property
    def sequence_s(self) -> float:
        """Seconds that each further sequence of a batch adds to a step."""
        full = self.max_batch / self.decode_tokens_per_s
        return max(0.0, full - self.itl_s) / max(1, self.max_batch - 1)

    def inter_token_s(self, batch: float) -> float:
        """Returns the inter-token latency in seconds on one worker with `batch` sequences. The
        latency is linear between one sequence and a full batch.
        """
        return self.itl_s + self.sequence_s * max(0.0, batch - 1)


@dataclass(slots=True)
class Requests:
    """An amount of requests. The token counts are totals over these requests."""

    number: float = 0.0
    prompt_tokens: float = 0.0
    # Tokens still to be generated.
    output_tokens: float = 0.0

    def add(self, other: Requests) -> None:
        """Adds the other amount to this one, in place."""
        self.number += other.number
        self.prompt_tokens += other.prompt_tokens
        self.output_tokens += other.output_tokens

    def take(self, share: float) -> Requests:
        """Removes the share (0 to 1) of each count and returns the removed amount."""
        taken = Requests(
            self.number * share, self.prompt_tokens * share, self.output_tokens * share
        )
        self.add(Requests(-taken.number, -taken.prompt_tokens, -taken.output_tokens))
        return taken


@dataclass(slots=True)
class _Pool:
    size: int
    # Times at which the starting workers will serve.
    starting: list[float] = field(default_factory=list)

    def ready(self, now: float) -> int:
        self.starting = [at for at in self.starting if at > now]
        return self.size - len(self.starting)


class QueueingModel:
    """Owns the load in the pools and the sizes of the pools."""

    def __init__(self, speed: WorkerSpeed, prefill: int, decode: int) -> None:
        self._speed = speed
        self._pools: dict[PoolName, _Pool] = {"prefill": _Pool(prefill), "decode": _Pool(decode)}
        self._now = 0.0
        # Waiting at the router, for the pool below.
        self._waiting = Requests()
        self._awaited: PoolName = "decode"
        self._prefilling = Requests()
        self._decoding = Requests()
        # Generated tokens of unfinished answers.
        self._generated = 0.0
        # Mean prompt tokens of the last arrivals.
        self._prompt = 0.0
        # Recent rate of finished requests, per second.
        self._leaving = 0.0
        # Sequences per decode worker in the last step.
        self._batch = 0.0
        # KV tokens of answers on decode workers in the last step.
        self._occupied = 0.0
        # Busy share of the prefill workers in the last step.
        self._prefill_busy = 0.0

    @property
    def unfinished(self) -> float:
        """Number of requests that have arrived and have not finished."""
        return self._waiting.number + self._prefilling.number + self._decoding.number

    def resize(self, pool: PoolName, size: int) -> None:
        """Sets the size of a pool. New workers serve after their start time. Removed workers leave
        at once, starting workers first.
        """
        one = self._pools[pool]
        one.starting += [self._now + self._speed.start_s] * (size - one.size)
        del one.starting[max(0, len(one.starting) - max(0, one.size - size)) :]
        one.size = size

    def step(self, arrived: Requests, seconds: float) -> dict[PoolName, PoolSnapshot]:
        """Advances the model by `seconds`, in which `arrived` comes evenly, and returns both pools'
        snapshots at the end.
        """
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
        self._bind(ready, seconds)
        busy = self._prefill(ready, seconds)
        self._decode(ready["decode"], seconds, seconds * (1 - busy))
        idle = arrived.number <= 0 and self.unfinished <= 0
        latency = self._latencies(ready, idle)
        pools: dict[PoolName, dict[MetricName, float]] = {
            "prefill": self._prefill_metrics(ready) | latency,
            "decode": self._decode_metrics(ready) | latency,
        }
        if self._waiting.number > 0 and self._awaited == "decode":
            # TTFT includes the wait for a batch slot, and no prefill worker shortens that wait.
            pools["prefill"].pop("ttft_p95_ms", None)
        slots = self._batch / self._speed.max_batch
        fill = max(slots, pools["decode"].get("kv_occupancy", 0.0))
        shares: dict[PoolName, float] = {
            "prefill": self._prefill_busy,
            "decode": utilisation(self._added(busy), fill),
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

    def _added(self, prompts: float) -> float:
        """Returns the share of the decode workers' time that tokens add to their steps. `prompts`
        is the share for prompts.
        """
        step_s = self._speed.inter_token_s(self._batch)
        fixed_s = self._speed.itl_s - self._speed.sequence_s
        return prompts + (1 - prompts) * min(1.0, self._batch) * max(0.0, 1 - fixed_s / step_s)

    @property
    def _held_tokens(self) -> float:
        """KV tokens on decode workers. Blocks are reserved before the prefill."""
        return self._prefilling.prompt_tokens + self._decoding.prompt_tokens + self._generated

    def _bind(self, ready: Mapping[PoolName, int], seconds: float) -> None:
        """Moves waiting requests to workers, as far as both pools have room for them."""
        waiting = self._waiting
        if waiting.number <= 0:
            return
        workers = ready["decode"]
        slots = workers * self._speed.max_batch - self._prefilling.number - self._decoding.number
        each = waiting.prompt_tokens / waiting.number
        room = workers * self._speed.kv_tokens - self._held_tokens
        fit = min(slots, room / each if each else slots)
        self._awaited = "decode"
        if ready["prefill"] and each:
            # What the pool computes in this step is needed in this step.
            backlog = ready["prefill"] * _BACKLOG_TOKENS + self._prefill_rate(ready) * seconds
            needed = (backlog - self._prefilling.prompt_tokens) / each
            if needed < fit:
                fit, self._awaited = needed, "prefill"
        self._prefilling.add(waiting.take(min(1.0, max(0.0, fit) / waiting.number)))

    def _prefill(self, ready: Mapping[PoolName, int], seconds: float) -> float:
        """Moves prefilled requests to decoding. Returns the share of the decode workers' time that
        prompts took, which is above 0 only without prefill workers.
        """
        capacity = self._prefill_rate(ready) * seconds
        self._prefill_busy = 0.0
        if self._prefilling.prompt_tokens <= 0 or not capacity:
            return 0.0
        done = self._prefilling.take(min(1.0, capacity / self._prefilling.prompt_tokens))
        self._decoding.add(done)
        # Rounding may bring the quotient above 1, and the time for decoding below 0.
        busy = min(1.0, done.prompt_tokens / capacity)
        if ready["prefill"]:
            self._prefill_busy = busy
            return 0.0
        return busy

    def _prefill_rate(self, ready: Mapping[PoolName, int]) -> float:
        """Returns tokens per second. Decode workers prefill if there is no prefill worker."""
        return (ready["prefill"] or ready["decode"]) * self._speed.prefill_tokens_per_s

    def _decode(self, workers: int, seconds: float, decoding_s: float) -> None:
        decoding, left = self._decoding, 0.0
        self._batch = decoding.number / workers if workers else 0.0
        self._occupied = self._decoding.prompt_tokens + self._generated
        if self._batch > 0:
            tokens = decoding.number * decoding_s / self._speed.inter_token_s(self._batch)
            # The sequences finish before the end of the step.
            if tokens > decoding.output_tokens:
                self._occupied *= decoding.output_tokens / tokens
            share = min(1.0, tokens / decoding.output_tokens) if decoding.output_tokens > 0 else 1.0
            self._generated = (self._generated + decoding.output_tokens * share) * (1 - share)
            left = decoding.take(share).number
        self._leaving += (left / seconds - self._leaving) * min(1.0, seconds / _SMOOTH_S)

    def _prefill_metrics(self, ready: Mapping[PoolName, int]) -> dict[MetricName, float]:
        # The requests of an empty prefill pool wait with the decode pool.
        if not self._pools["prefill"].size:
            return {
                "queue_depth": self._waiting.number,
                "queue_tokens": self._waiting.prompt_tokens,
            }
        queue, before = self._prefilling, self._waiting_for("prefill")
        # One prompt per worker is running and does not wait.
        share = max(0.0, 1 - ready["prefill"] / queue.number) if queue.number > 0 else 0.0
        found: dict[MetricName, float] = {
            "queue_depth": queue.number * share + before.number,
            "queue_tokens": queue.prompt_tokens * share + before.prompt_tokens,
        }
        if rate := self._prefill_rate(ready):
            tokens = queue.prompt_tokens * share + before.prompt_tokens
            found["queue_wait_p95_ms"] = 1000 * tokens / rate
        return found

    def _decode_metrics(self, ready: Mapping[PoolName, int]) -> dict[MetricName, float]:
        before = self._waiting_for("decode")
        found: dict[MetricName, float] = {
            "queue_depth": before.number,
            "queue_tokens": before.prompt_tokens,
        }
        if ready["decode"]:
            found["kv_occupancy"] = min(
                1.0, self._occupied / (ready["decode"] * self._speed.kv_tokens)
            )
        return found

    def _waiting_for(self, pool: PoolName) -> Requests:
        """Returns the requests at the router if they wait for this pool, else an empty amount."""
        return self._waiting if self._awaited == pool else Requests()

    def _latencies(self, ready: Mapping[PoolName, int], idle: bool) -> dict[MetricName, float]:
        """Returns latencies as the routers measure them. A latency is left out while no request
        moves, because then it is unknown.
        """
        found: dict[MetricName, float] = {}
        if ready["decode"]:
            found["itl_p95_ms"] = (
                1000 * self._speed.inter_token_s(self._batch) if self._batch > 0 else 0.0
            )
        rate = self._prefill_rate(ready)
        if idle:
            found["ttft_p95_ms"] = 0.0
        elif rate and (
            self._waiting.number <= 0 or self._awaited == "prefill" or self._leaving > 0
        ):
            slot_s = 0.0
            if self._waiting.number > 0 and self._awaited == "prefill":
                slot_s = self._waiting.prompt_tokens / rate
            elif self._waiting.number > 0:
                slot_s = self._waiting.number / self._leaving
            prompt_s = self._prompt / self._speed.prefill_tokens_per_s
            found["ttft_p95_ms"] = 1000 * (
                slot_s + self._prefilling.prompt_tokens / rate + prompt_s
            )
        return found
