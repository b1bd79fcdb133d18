"""A prefill pool in virtual time that serves prompts one by one, in the order of their random
arrival.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

from kvrelay.percentiles import percentile
from kvrelay.types.control_plane import RouterLoad
from kvrelay.types.workers import WorkerInfo, WorkerLoad
from kvrelay.worker.steps.busy_share import BusyTime

LATENCY_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Prompts:
    """A constant load: prompts at random times, of random lengths."""

    rate: float  # per second
    tokens: float  # mean
    spread: float  # standard deviation over mean
    seconds: float  # mean time on a worker


@dataclass(slots=True)
class _Worker:
    starts_at: float
    busy: BusyTime
    free_at: float = field(init=False)
    running: bool = False

    def __post_init__(self) -> None:
        self.free_at = self.starts_at

    def serve(self, began: float, seconds: float) -> None:
        self.finish(began)
        self.busy.began(began)
        self.free_at, self.running = began + seconds, True

    def finish(self, now: float) -> None:
        if self.running and self.free_at <= now:
            self.busy.ended(self.free_at)
            self.running = False


class PromptPool:
    """Owns the workers and the queue, which is at the router."""

    def __init__(self, load: Prompts, workers: int, start_s: float, seed: int) -> None:
        self.now = 0.0
        self._load = load
        self._start_s = start_s
        self._random = random.Random(seed)
        self._workers = [_Worker(0.0, BusyTime(0.0)) for _ in range(workers)]
        # (arrival, tokens)
        self._queue: deque[tuple[float, float]] = deque()
        self._next = self._random.expovariate(load.rate)
        # (end, TTFT in seconds)
        self._served: deque[tuple[float, float]] = deque()

    def resize(self, size: int) -> None:
        """New workers serve after their start; those that start leave first, then the idle."""
        at = self.now + self._start_s
        self._workers += [_Worker(at, BusyTime(at)) for _ in range(size - len(self._workers))]
        ready = [one for one in self._workers if one.starts_at <= self.now]
        starting = [one for one in self._workers if one.starts_at > self.now]
        self._workers = [*sorted(ready, key=lambda one: -one.free_at), *starting][:size]

    def advance(self, seconds: float) -> None:
        """All prompts that can begin before then begin."""
        self.now += seconds
        while self._next < self.now:
            self._queue.append((self._next, self._tokens()))
            self._next += self._random.expovariate(self._load.rate)
        while self._queue:
            arrived, tokens = self._queue[0]
            worker = min(self._workers, key=lambda one: one.free_at)
            began = max(arrived, worker.free_at)
            if began >= self.now:
                break
            self._queue.popleft()
            worker.serve(began, self._load.seconds * tokens / self._load.tokens)
            self._served.append((worker.free_at, worker.free_at - arrived))
        for worker in self._workers:
            worker.finish(self.now)

    def _tokens(self) -> float:
        if not self._load.spread:
            return self._load.tokens
        variance = math.log(1 + self._load.spread**2)
        return self._load.tokens * math.exp(self._random.gauss(-variance / 2, math.sqrt(variance)))

    def infos(self) -> list[WorkerInfo]:
        """The ready workers, as the registry has them."""
        speed = self._load.tokens / self._load.seconds
        return [
            WorkerInfo(
                f"prefill-{number}",
                "prefill",
                1,
                "ready",
                "127.0.0.1:1",
                "demo",
                "00",
                16,
                64,
                "host",
                4096,
                WorkerLoad(busy_share=share, tokens_per_second=share * speed),
            )
            for number, share in enumerate(
                worker.busy.share(self.now)
                for worker in self._workers
                if worker.starts_at <= self.now
            )
        ]

    def router(self) -> RouterLoad:
        """The router's entry, with the queue."""
        while self._served and self._served[0][0] <= self.now - LATENCY_WINDOW_S:
            self._served.popleft()
        recent = sorted(ttft for at, ttft in self._served if at <= self.now)
        return RouterLoad(
            "router-0",
            running=sum(one.running for one in self._workers),
            waiting=len(self._queue),
            waiting_for_prefill=len(self._queue),
            waiting_prefill_tokens=round(sum(tokens for _, tokens in self._queue)),
            ttft_p95_ms=1000 * percentile(recent, 95) if recent else None,
        )
