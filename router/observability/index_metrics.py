"""Prometheus metrics of the prefix index."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.dispatcher import Dispatcher


class IndexCollector(Collector):
    """Reads what the router knows of the workers' prefix caches on each scrape."""

    def __init__(self, model: str, dispatcher: Dispatcher) -> None:
        self._model = model
        self._dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of indexed blocks, snapshots and gaps."""
        index = self._dispatcher.index
        blocks = self._gauge(
            "prefix_index_blocks", "Blocks that the router knows in the worker's prefix cache."
        )
        exact = self._gauge(
            "prefix_index_exact",
            "1 if the router knew the worker's prefix cache exactly at the last update, else 0.",
        )
        for info in self._dispatcher.workers:
            replica = index.replica(info.worker_id)
            if replica is not None:
                values = (info.pool, info.worker_id, self._model)
                blocks.add_metric(values, len(replica))
                exact.add_metric(values, replica.exact)
        yield blocks
        yield exact
        yield self._counter(
            "prefix_index_snapshots", "Snapshots of prefix caches from workers.", index.snapshots
        )
        yield self._counter(
            "prefix_index_gaps",
            "Updates of prefix caches that were missing or did not fit.",
            index.gaps,
        )

    def _gauge(self, name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"kvrelay_{name}", text, labels=("pool", "worker", "model_name"))

    def _counter(self, name: str, text: str, value: int) -> Metric:
        family = CounterMetricFamily(f"kvrelay_{name}", text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family
