"""Metric of the KV that models' thinking takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from kvrelay.types.workers import WorkerInfo
from router.runtime.stream import Stream

_NAME = "reasoning_kv_bytes"


def thinking_metric(model: str, workers: Iterable[WorkerInfo], streams: Iterable[Stream]) -> Metric:
    """Returns the KV of the thinking in unfinished answers, for each decode worker. streams: this
    router's unfinished requests.
    """
    tokens: Counter[str] = Counter()
    for stream in streams:
        if stream.assignment is not None:
            tokens[stream.assignment.decode] += stream.usage().reasoning_tokens
    held = GaugeMetricFamily(
        f"kvrelay_{_NAME}",
        "KV of tokens between the markers of the model's thinking, in unfinished answers.",
        labels=("pool", "worker", "model_name"),
    )
    for one in workers:
        if one.pool == "decode":
            size = tokens[one.worker_id] * one.block_bytes / one.block_size
            held.add_metric((one.pool, one.worker_id, model), size)
    return held
