"""Prometheus series that only one event loop writes. They need no lock, which keeps the cost of a
token low.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = dict[str, str]


class Total(Collector):
    """A counter. Add to `value`."""

    def __init__(self, name: str, text: str, labels: Labels) -> None:
        self.value = 0
        self._name = name
        self._text = text
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yields the counter's metric family."""
        family = CounterMetricFamily(self._name, self._text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), self.value)
        yield family


class Histogram(Collector):
    """Counts observations by bucket. `bounds` are the buckets' inclusive upper bounds, ascending,
    without infinity.
    """

    def __init__(self, name: str, text: str, labels: Labels, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds `count` observations of the same value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        """Yields the histogram's metric family."""
        ends = map(floatToGoString, (*self._bounds, float("inf")))
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        family.add_metric(
            tuple(self._labels.values()),
            list(zip(ends, accumulate(self._counts), strict=True)),
            self._sum,
        )
        yield family
