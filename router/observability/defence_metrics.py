"""Prometheus metrics of the defences against overload, sick workers and poison requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.admission import Rejection
from router.core.dispatcher import Dispatcher


class DefenceCollector(Collector):
    """Reads the dispatcher's counters on each scrape."""

    def __init__(self, model: str, dispatcher: Dispatcher) -> None:
        self._model = model
        self._dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of rejections, retries, ejected workers and quarantined
        requests.
        """
        rejected = self._counter(
            "requests_rejected", "Requests rejected by admission, by reason.", "reason"
        )
        for reason in get_args(Rejection):
            rejected.add_metric((self._model, reason), self._dispatcher.admission.rejected[reason])
        yield rejected
        retries = self._counter(
            "retries", "Retries by state: made, or refused by the retry budget.", "state"
        )
        retries.add_metric((self._model, "made"), self._dispatcher.retries.made)
        retries.add_metric((self._model, "refused"), self._dispatcher.retries.refused)
        yield retries
        text = "1 for a worker that gets no new requests, or one probe at a time."
        ejected = self._gauge("worker_ejected", text, "pool", "worker", "reason")
        for one in self._dispatcher.sick:
            ejected.add_metric((self._model, one.pool, one.worker_id, one.cause), 1)
        yield ejected
        quarantined = self._gauge(
            "quarantined_requests",
            "Quarantined requests, which are rejected because they killed workers.",
        )
        quarantined.add_metric((self._model,), len(self._dispatcher.quarantine))
        yield quarantined

    def _counter(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"kvrelay_{name}", text, labels=("model_name", *labels))

    def _gauge(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"kvrelay_{name}", text, labels=("model_name", *labels))
