"""The router's measurements: Prometheus series, and the percentiles that the autoscaler reads."""

from __future__ import annotations

import math
from collections import Counter as Counts
from collections import defaultdict, deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.types import ScalingDecision
from router.driver import Driver
from router.stream import Stream

WINDOW_S = 10.0
MAX_SAMPLES = 4096
_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 60.0)
_WORKER_LABELS = ("pool", "worker", "model_name")


class Window:
    """The samples of the last WINDOW_S seconds, MAX_SAMPLES of them at most."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)

    def add(self, now: float, value: float) -> None:
        self._samples.append((now, value))

    def p95(self, now: float) -> float | None:
        """The nearest-rank percentile; None without samples."""
        recent = sorted(value for at, value in self._samples if now - at <= WINDOW_S)
        return recent[math.ceil(0.95 * len(recent)) - 1] if recent else None


class Metrics:
    """An Observer of the driver. `registry` holds the series, for exposition."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.finished = 0
        self.failed = 0
        self.ttft = Window()
        self.itl = Window()
        self._model = model
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens streamed.")
        self._cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in prefix caches.")
        self._cache_hits = self._counter("prefix_cache_hits", "Prompt tokens that a prefix cache held.")
        self._fetched = self._counter("prefix_fetched", "Of the hits, those fetched from another worker's cache.")
        self._handoff_bytes = self._counter("handoff_bytes", "KV bytes handed off.")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.")
        self._itl = self._histogram("inter_token_latency_seconds", "Token to next token.")
        self._tpot = self._histogram("request_time_per_output_token_seconds", "(E2E - TTFT) / (tokens - 1).")
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to the end of the answer.")
        self._second_gap = self._histogram("second_token_gap_seconds", "First token to second.")
        self._handoff = self._histogram("handoff_seconds", "First KV frame to acknowledged commit.")
        self._queue = self._histogram("request_queue_time_seconds", "Waiting for workers with room.")
        self._prefill = self._histogram("request_prefill_time_seconds", "Queue and compute on the prefilling worker.")
        self._exposed = self._histogram("request_handoff_time_seconds", "End of prefill to acknowledged commit.")
        self._decode = self._histogram("request_decode_time_seconds", "First token to last.")
        self._success = self._labelled("request_success", "Requests that ended, by how.", "finished_reason")
        self._path = self._labelled("path_decision", "Requests by path taken and why.", "path", "why")
        self._scaling = self._labelled("scaling_decision", "Changes of a pool's size.", "pool", "direction")

    def tokens(self, stream: Stream, count: int, previous: float | None, now: float) -> None:
        self._generation_tokens.inc(count)
        if previous is None:
            seconds = now - stream.request.arrival
            usage = stream.usage()
            self.ttft.add(now, seconds)
            self._ttft.observe(seconds)
            self._prompt_tokens.inc(usage.prompt_tokens)
            self._cache_queries.inc(usage.prompt_tokens)
            self._cache_hits.inc(usage.cached_tokens)
            self._fetched.inc(stream.fetched_tokens)
            return
        for _ in range(count):
            self.itl.add(now, (now - previous) / count)
            self._itl.observe((now - previous) / count)

    def ended(self, stream: Stream) -> None:
        assert stream.ended is not None
        self._success.labels(self._model, stream.ended.finish_reason).inc()
        if stream.assignment is not None:
            self._path.labels(self._model, stream.assignment.path, stream.assignment.reason).inc()
        if stream.ended.error is not None:
            self.failed += stream.ended.finish_reason == "error"
            return
        self.finished += 1
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
            self._handoff_bytes.inc(ledger.handoff.bytes)
            self._exposed.observe(ledger.handoff.exposed_seconds)

    def scaled(self, decision: ScalingDecision) -> None:
        self._scaling.labels(self._model, decision.pool, "up" if decision.after > decision.before else "down").inc()

    def _labelled(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvrelay_{name}", text, ("model_name", *labels), registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return self._labelled(name, text).labels(self._model)

    def _histogram(self, name: str, text: str) -> Histogram:
        series = Histogram(f"kvrelay_{name}", text, ("model_name",), registry=self.registry, buckets=_SECONDS)
        return series.labels(self._model)


class ClusterCollector(Collector):
    """Gauges of the workers, read from the last snapshot of the registry when they are asked for."""

    def __init__(self, model: str, driver: Driver) -> None:
        self._model = model
        self._driver = driver

    def collect(self) -> Iterator[Metric]:
        workers = self._driver.known
        dispatcher = self._driver.dispatcher
        running = self._gauge("num_requests_running", "Requests with a worker; pool router: of this router.")
        waiting = self._gauge("num_requests_waiting", "Requests without; pool router: of this router.")
        usage = self._gauge("kv_cache_usage_perc", "Held part of the KV blocks, 0 to 1.")
        preemptions = self._counter("num_preemptions", "Sequences whose KV was dropped for room.")
        drafts = self._counter("spec_decode_num_draft_tokens", "Tokens guessed by speculation.")
        accepted = self._counter("spec_decode_num_accepted_tokens", "Guessed tokens that were right.")
        running.add_metric(("router", "", self._model), dispatcher.running)
        waiting.add_metric(("router", "", self._model), dispatcher.waiting)
        for one in workers:
            labels = (one.pool, one.worker_id, self._model)
            running.add_metric(labels, one.load.running)
            waiting.add_metric(labels, one.load.waiting)
            usage.add_metric(labels, one.load.blocks_held / max(1, one.load.blocks_total))
            preemptions.add_metric(labels, one.load.preemptions)
            drafts.add_metric(labels, one.load.draft_tokens)
            accepted.add_metric(labels, one.load.accepted_tokens)
        replicas = GaugeMetricFamily("kvrelay_pool_replicas", "Workers by state.", labels=("pool", "state"))
        for (pool, state), number in Counts((one.pool, one.state) for one in workers).items():
            replicas.add_metric((pool, state), number)
        yield from (running, waiting, usage, preemptions, drafts, accepted, replicas)

    def _counter(self, name: str, text: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"kvrelay_{name}", text, labels=_WORKER_LABELS)

    def _gauge(self, name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"kvrelay_{name}", text, labels=_WORKER_LABELS)
