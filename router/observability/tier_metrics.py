"""Metrics of the tiers behind the workers' KV caches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvrelay.types.workers import WorkerInfo

_LABELS = ("pool", "worker", "model_name", "tier")
_GAUGES = (
    ("kv_tier_size_bytes", "size_bytes", "Bytes that a tier of the KV cache may take."),
    ("kv_tier_used_bytes", "used_bytes", "Bytes that a tier of the KV cache takes."),
    ("kv_tier_blocks", "blocks", "KV blocks in a tier."),
    ("kv_tier_read_bytes_per_second", "read_rate", "Measured rate of reading from a tier."),
    ("kv_tier_write_bytes_per_second", "write_rate", "Measured rate of writing to a tier."),
    ("kv_tier_stores_skipped", "skipped", "Stores that failed or did not answer, and are skipped."),
)
_COUNTERS = (
    ("kv_tier_hits", "hits", "KV blocks that came back from a tier."),
    ("kv_tier_misses", "misses", "KV blocks of prompts that neither the cache nor a tier had."),
    ("kv_tier_stored", "stored", "KV blocks that a tier stored."),
    ("kv_tier_evicted", "evicted", "KV blocks that a tier evicted."),
    (
        "kv_tier_dropped",
        "dropped",
        "KV blocks that were lost because a tier was too slow or failed.",
    ),
    ("kv_tier_errors", "errors", "Errors of a tier: of the disk or a store, or damaged blocks."),
)


def tier_metrics(model: str, workers: Iterable[WorkerInfo]) -> Iterator[Metric]:
    """Yields the metric families of all tiers; none without tiers."""
    tiers = [
        ((one.pool, one.worker_id, model, tier.kind), tier)
        for one in workers
        for tier in one.load.tiers
    ]
    if not tiers:
        return
    for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, field, text in table:
            family = kind(f"kvrelay_{name}", text, labels=_LABELS)
            for labels, tier in tiers:
                family.add_metric(labels, getattr(tier, field))
            yield family
