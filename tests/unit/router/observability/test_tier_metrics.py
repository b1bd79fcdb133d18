from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from kvrelay.types.workers import TierLoad, WorkerInfo, WorkerLoad
from router.observability.tier_metrics import tier_metrics


def worker(*tiers: TierLoad) -> WorkerInfo:
    return WorkerInfo(
        "decode-0",
        "decode",
        1,
        "ready",
        "127.0.0.1:1",
        "m",
        "00",
        16,
        64,
        "host",
        64,
        WorkerLoad(tiers=tiers),
    )


def exposed(*workers: WorkerInfo) -> str:
    class Collector:
        def collect(self) -> list[Metric]:
            return list(tier_metrics("demo", workers))

    registry = CollectorRegistry()
    registry.register(Collector())
    return generate_latest(registry).decode()


def test_each_tier_has_its_series() -> None:
    text = exposed(
        worker(
            TierLoad("host", size_bytes=100, used_bytes=50, blocks=5, hits=3),
            TierLoad("disk", misses=7, stored=8, evicted=9, dropped=10, errors=11),
        )
    )
    labels = 'model_name="demo",pool="decode",tier="{}",worker="decode-0"'
    for name, tier, value in (
        ("size_bytes", "host", 100),
        ("used_bytes", "host", 50),
        ("blocks", "host", 5),
        ("hits_total", "host", 3),
        ("misses_total", "disk", 7),
        ("stored_total", "disk", 8),
        ("evicted_total", "disk", 9),
        ("dropped_total", "disk", 10),
        ("errors_total", "disk", 11),
    ):
        assert f"kvrelay_kv_tier_{name}{{{labels.format(tier)}}} {value}.0\n" in text


def test_without_tiers_there_are_no_series() -> None:
    assert exposed(worker()) == ""
