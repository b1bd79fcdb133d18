"""Prometheus metrics of the router's queue, and of the workers and pools."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.types.workers import POOLS, WorkerState
from router.observability.metrics import Metrics
from router.observability.thinking_metrics import thinking_metric
from router.observability.tier_metrics import tier_metrics
from router.runtime.driver import Driver

_LABELS = ("pool", "worker", "model_name")


class QueueCollector(Collector):
    """Reads the router's queue on each scrape."""

    def __init__(self, model: str, driver: Driver) -> None:
        self._model = model
        self._driver = driver

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of the queue, and of thinking in unfinished answers."""
        dispatcher = self._driver.dispatcher
        families = (
            (_running(), dispatcher.running),
            (_waiting(), dispatcher.waiting),
            (
                _gauge(
                    "num_requests_waiting_for_prefill",
                    "Requests in the router's queue that wait for a prefill worker.",
                ),
                dispatcher.waiting_for_prefill[0],
            ),
            (
                _gauge(
                    "num_requests_waiting_at_limit",
                    "Requests in the router's queue whose tenant has reached max_running.",
                ),
                dispatcher.waiting_at_limit[0],
            ),
            (_preemptions(), dispatcher.preemptions),
        )
        for family, value in families:
            family.add_metric(("router", "", self._model), value)
            yield family
        yield thinking_metric(self._model, self._driver.known, self._driver.newest())


class WorkerCollector(Collector):
    """Reads the last registry snapshot of the workers on each scrape."""

    def __init__(self, model: str, driver: Driver, metrics: Metrics) -> None:
        self._model = model
        self._driver = driver
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of workers and pools."""
        workers = self._driver.known
        running, waiting = _running(), _waiting()
        usage = _gauge("kv_cache_usage_perc", "Share of KV blocks that sequences hold, 0 to 1.")
        blocks = _gauge(
            "kv_blocks", "KV blocks of a worker by state: held, cached or free.", "state"
        )
        leases = _gauge(
            "handoff_leases", "Hand-offs for which a worker has reserved or not yet released KV."
        )
        rate = _gauge("worker_tokens_per_second", "Tokens per second, measured by the worker.")
        resident = _gauge(
            "worker_resident_memory_bytes", "Resident memory of the worker's process."
        )
        integrity = _gauge(
            "worker_integrity_ok", "1, or 0 after the worker found its block counts inconsistent."
        )
        preemptions = _preemptions()
        drafts = _counter("spec_decode_num_draft_tokens", "Draft tokens of speculation.")
        accepted = _counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        dropped = _counter("kv_num_dropped_tokens", "Tokens whose KV sequences dropped.")
        for one in workers:
            labels = (one.pool, one.worker_id, self._model)
            load = one.load
            running.add_metric(labels, load.running)
            waiting.add_metric(labels, load.waiting)
            usage.add_metric(labels, load.blocks_held / max(1, load.blocks_total))
            for state, number in (("held", load.blocks_held), ("cached", load.blocks_cached)):
                blocks.add_metric((*labels, state), number)
            blocks.add_metric(
                (*labels, "free"), load.blocks_total - load.blocks_held - load.blocks_cached
            )
            leases.add_metric(labels, load.leases)
            rate.add_metric(labels, load.tokens_per_second)
            resident.add_metric(labels, load.rss_bytes)
            integrity.add_metric(labels, load.integrity_ok)
            preemptions.add_metric(labels, load.preemptions)
            drafts.add_metric(labels, load.draft_tokens)
            accepted.add_metric(labels, load.accepted_tokens)
            dropped.add_metric(labels, load.dropped_tokens)
        yield from (running, waiting, usage, blocks, leases, rate, resident, integrity)
        yield from (preemptions, drafts, accepted, dropped, self._replicas())
        yield from tier_metrics(self._model, workers)

    def _replicas(self) -> Metric:
        """Returns the number of workers by state. A state without workers is 0 instead of absent,
        so that the loss of a pool's last worker is visible.
        """
        replicas = GaugeMetricFamily(
            "kvrelay_pool_replicas",
            "Workers by state, and the desired number of workers.",
            labels=("pool", "state", "model_name"),
        )
        numbers = Counts((one.pool, one.state) for one in self._driver.known)
        for pool in POOLS:
            for state in get_args(WorkerState):
                replicas.add_metric((pool, state, self._model), numbers[pool, state])
            if pool in self._metrics.desired:
                replicas.add_metric((pool, "desired", self._model), self._metrics.desired[pool])
        serving = {one.worker_id for one in self._driver.known}
        standbys: Counts[str] = Counts(
            one.state for one in self._metrics.standbys if one.worker_id not in serving
        )
        for state in ("starting", "ready"):
            replicas.add_metric(("standby", state, self._model), standbys[state])
        return replicas


def _running() -> GaugeMetricFamily:
    return _gauge(
        "num_requests_running", "Requests assigned to workers; pool router: of this router."
    )


def _waiting() -> GaugeMetricFamily:
    return _gauge(
        "num_requests_waiting", "Requests waiting for a worker; pool router: of this router."
    )


def _preemptions() -> CounterMetricFamily:
    return _counter(
        "num_preemptions",
        "Sequences whose KV was evicted to make room; pool router: requests that gave up a batch "
        "slot.",
    )


def _counter(name: str, text: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvrelay_{name}", text, labels=_LABELS)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvrelay_{name}", text, labels=(*_LABELS, *labels))
