"""The router's metrics: Prometheus series, and the percentiles for the autoscaler."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, ProcessCollector

from kvrelay.errors import Code
from kvrelay.types.control_plane import ScalingDecision
from kvrelay.types.requests import FinishReason
from kvrelay.types.workers import POOLS, PoolName, StandbyWorker
from router.observability.series import Histogram, Total
from router.observability.traffic import Latencies, percentiles
from router.runtime.stream import Stream

WINDOW_S = 10.0
MAX_SAMPLES = 4096
# Upper bounds of buckets in seconds. Each includes the round numbers of common objectives.
_FIRST = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.0,
    3.0,
    5.0,
    10.0,
    20.0,
    60.0,
)
_GAP = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.0,
    5.0,
)
_PHASE = (
    0.001,
    0.003,
    0.01,
    0.03,
    0.1,
    0.2,
    0.3,
    0.5,
    1.0,
    2.0,
    3.0,
    5.0,
    10.0,
    20.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
_HANDOFF = (
    0.0001,
    0.0003,
    0.001,
    0.002,
    0.003,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    3.0,
    10.0,
)


class Window:
    """The samples of the last WINDOW_S seconds, at most MAX_SAMPLES."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)

    def add(self, now: float, value: float, count: int = 1) -> None:
        """Adds `count` samples of the same value."""
        self._samples.extend(((now, value),) * count)

    def p95(self, now: float) -> float | None:
        """Returns the 95th percentile, or None without samples."""
        return percentiles((self.latencies(now),), 95)[0]

    def latencies(self, now: float) -> Latencies:
        """Returns the samples of the last WINDOW_S seconds."""
        return Latencies(
            tuple(sorted(value for at, value in self._samples if now - at <= WINDOW_S))
        )


class Metrics:
    """The router's metrics of requests, an Observer of the driver. `registry` holds the series of
    this process for exposition, and `cluster` those that all processes of a router count alike.
    """

    def __init__(self, model: str, *, of_process: bool = True) -> None:
        """of_process: includes the metrics of this process, once in a router of several models."""
        self.registry = CollectorRegistry()
        self.cluster = CollectorRegistry()
        self.finished = 0
        self.failed = 0
        self.ttft = Window()
        self.itl = Window()
        # Wanted pool sizes, by the last heartbeat.
        self.desired: Mapping[PoolName, int] = {}
        # Standby workers by the last heartbeat.
        self.standbys: tuple[StandbyWorker, ...] = ()
        self._model = model
        if of_process:
            ProcessCollector(registry=self.registry)
        self._prompt_tokens = self._total(
            "prompt_tokens", "Prompt tokens of requests that got a first token."
        )
        self._generation_tokens = self._total("generation_tokens", "Tokens streamed to clients.")
        self._reasoning_tokens = self._total(
            "reasoning_tokens",
            "Tokens of finished answers between the markers of the model's thinking.",
        )
        self._cache_queries = self._total(
            "prefix_cache_queries", "Prompt tokens looked up in prefix caches."
        )
        self._cache_hits = self._total("prefix_cache_hits", "Prompt tokens found in prefix caches.")
        self._fetched = self._total(
            "prefix_fetched", "Prefix cache hits fetched from another worker or from a tier."
        )
        self._handoff_bytes = self._total(
            "handoff_bytes", "Bytes of KV handed off to decode workers."
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", _FIRST
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Time between two consecutive tokens.", _GAP
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first: (E2E - TTFT) / (tokens - 1).",
            _GAP,
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end of the answer.", _PHASE
        )
        self._second_gap = self._histogram(
            "second_token_gap_seconds", "Time from the first token to the second.", _GAP
        )
        self._handoff = self._histogram(
            "handoff_seconds", "Time from the first KV frame to the acknowledged commit.", _HANDOFF
        )
        self._queue = self._histogram(
            "request_queue_time_seconds",
            "Time in the queue until workers accept the request.",
            _PHASE,
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds",
            "Time in the queue and in computation on the prefilling worker.",
            _PHASE,
        )
        self._exposed = self._histogram(
            "request_handoff_time_seconds",
            "Time from the end of prefill to the acknowledged commit.",
            _HANDOFF,
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "Time from the first token to the last.", _PHASE
        )
        self._success = self._labelled(
            "request_success", "Requests that ended, by finish reason.", "finished_reason"
        )
        self._errors = self._labelled(
            "request_errors", "Requests that ended with an error, by code.", "code"
        )
        self._path = self._labelled(
            "path_decision", "Requests by path and by the reason for the path.", "path", "why"
        )
        self._scaling = self._labelled(
            "scaling_decision",
            "Changes of the desired size of a pool.",
            "pool",
            "direction",
            registry=self.cluster,
        )
        # A rate needs the zero before the first event.
        for reason in get_args(FinishReason):
            self._success.labels(model, reason)
        for code in Code:
            self._errors.labels(model, code.name)
        for pool in POOLS:
            for direction in ("up", "down"):
                self._scaling.labels(model, pool, direction)

    def tokens(self, stream: Stream, count: int, previous: float | None, now: float) -> None:
        """Records `count` new tokens; `previous` is the time of the tokens before them. The driver
        calls this method for each message of a worker.
        """
        self._generation_tokens.value += count
        if previous is None:
            self._first_tokens(stream, now)
        elif count:
            gap = (now - previous) / count
            self.itl.add(now, gap, count)
            self._itl.observe(gap, count)

    def _first_tokens(self, stream: Stream, now: float) -> None:
        seconds = now - stream.request.arrival
        usage = stream.usage()
        self.ttft.add(now, seconds)
        self._ttft.observe(seconds)
        self._prompt_tokens.value += usage.prompt_tokens
        self._cache_queries.value += usage.prompt_tokens
        self._cache_hits.value += usage.cached_tokens
        self._fetched.value += stream.fetched_tokens

    def ended(self, stream: Stream) -> None:
        """Records the end of a request."""
        assert stream.ended is not None
        self._success.labels(self._model, stream.ended.finish_reason).inc()
        if stream.assignment is not None:
            self._path.labels(self._model, stream.assignment.path, stream.assignment.reason).inc()
        if stream.ended.error is not None:
            self._errors.labels(self._model, stream.ended.error.code.name).inc()
            self.failed += stream.ended.finish_reason == "error"
            return
        self.finished += 1
        self._reasoning_tokens.value += stream.usage().reasoning_tokens
        ledger = stream.ledger()
        phases = defaultdict(float, ledger.phases)
        self._e2e.observe(ledger.e2e_seconds)
        self._queue.observe(phases["queue"] + phases["reserve"])
        self._prefill.observe(phases["fetch"] + phases["prefill_queue"] + phases["prefill"])
        self._decode.observe(ledger.decode_seconds)
        new_tokens = stream.num_tokens - len(stream.request.resume)
        if new_tokens > 1:
            self._tpot.observe(ledger.decode_seconds / (new_tokens - 1))
            self._second_gap.observe(ledger.second_token_gap_seconds)
        if ledger.handoff is not None:
            self._handoff.observe(ledger.handoff.seconds)
            self._handoff_bytes.value += ledger.handoff.bytes
            self._exposed.observe(ledger.handoff.exposed_seconds)

    @property
    def totals(self) -> dict[str, int]:
        """Counts since the router's start."""
        return {
            "finished": self.finished,
            "failed": self.failed,
            "prompt_tokens": self._prompt_tokens.value,
            "cached_tokens": self._cache_hits.value,
            "generated_tokens": self._generation_tokens.value,
            "handoff_bytes": self._handoff_bytes.value,
        }

    def scaled(self, decision: ScalingDecision) -> None:
        """Counts a scaling decision."""
        self._scaling.labels(
            self._model, decision.pool, "up" if decision.after > decision.before else "down"
        ).inc()

    def _labelled(
        self, name: str, text: str, *labels: str, registry: CollectorRegistry | None = None
    ) -> Counter:
        return Counter(
            f"kvrelay_{name}", text, ("model_name", *labels), registry=registry or self.registry
        )

    def _total(self, name: str, text: str) -> Total:
        series = Total(f"kvrelay_{name}", text, {"model_name": self._model})
        self.registry.register(series)
        return series

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        series = Histogram(f"kvrelay_{name}", text, {"model_name": self._model}, bounds)
        self.registry.register(series)
        return series
