"""Prometheus metrics of event loop stalls."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvrelay.process.loop_stall import BUCKETS, StallCounts

_LABELS = ("model_name", "process")


class LoopStallCollector(Collector):
    """Reads the stall counts on each scrape."""

    def __init__(self, model: str, process: str, counts: StallCounts) -> None:
        self._labels = (model, process)
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yields the stall histogram, the gauges of the worst stall, and the wait for a core."""
        text = (
            "Delay of an event loop callback that is due every 20 ms, without waiting for a core."
        )
        stalls = HistogramMetricFamily("kvrelay_event_loop_stall_seconds", text, labels=_LABELS)
        ends = (*map(str, BUCKETS), "+Inf")
        buckets = list(zip(ends, map(float, accumulate(self._counts.buckets)), strict=True))
        stalls.add_metric(self._labels, buckets=buckets, sum_value=self._counts.total_s)
        yield stalls
        worst = (
            ("stall", "Longest of these delays since the start.", self._counts.worst_s),
            (
                "cpu",
                "Most CPU time of the event loop between two such callbacks.",
                self._counts.worst_cpu_s,
            ),
        )
        for name, says, value in worst:
            family = GaugeMetricFamily(
                f"kvrelay_event_loop_worst_{name}_seconds", says, labels=_LABELS
            )
            family.add_metric(self._labels, value)
            yield family
        waited = CounterMetricFamily(
            "kvrelay_event_loop_core_wait_seconds",
            "Time that the thread of the event loop waited for a core although it could run.",
            labels=_LABELS,
        )
        waited.add_metric(self._labels, self._counts.waited_s)
        yield waited
