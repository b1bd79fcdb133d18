"""Prometheus metric of the KV that models' thinking takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.types.workers import WorkerInfo
from router.runtime.stream import Stream


class ThinkingCollector(Collector):
    """Counts the thinking in unfinished answers on each scrape, by the worker that decodes them."""

    def __init__(
        self,
        model: str,
        streams: Callable[[], Iterable[Stream]],
        workers: Callable[[], Iterable[WorkerInfo]],
    ) -> None:
        """`streams` gives this router's unfinished requests, `workers` the known workers."""
        self._model = model
        self._streams = streams
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        """Yields one gauge, with a series for each decode worker."""
        tokens: Counter[str] = Counter()
        for stream in self._streams():
            if stream.assignment is not None:
                tokens[stream.assignment.decode] += stream.usage().reasoning_tokens
        held = self._gauge(
            "reasoning_kv_bytes",
            "KV of tokens between the markers of the model's thinking, in unfinished answers.",
        )
        for info in self._workers():
            if info.pool == "decode":
                size = tokens[info.worker_id] * info.block_bytes / info.block_size
                held.add_metric((info.pool, info.worker_id, self._model), size)
        yield held

    def _gauge(self, name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"kvrelay_{name}", text, labels=("pool", "worker", "model_name"))
