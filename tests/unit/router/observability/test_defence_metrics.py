from __future__ import annotations

from prometheus_client import CollectorRegistry
from support.router_cluster import VirtualCluster

from kvrelay.errors import Code
from kvrelay.types.requests import SamplingParams
from router.core.request import Request
from router.observability.defence_metrics import DefenceCollector


def test_what_is_done_against_overload_and_sick_workers_can_be_seen() -> None:
    cluster = VirtualCluster(0, 2, max_queue=1)
    registry = CollectorRegistry()
    registry.register(DefenceCollector("demo", cluster.dispatcher))

    def read(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvrelay_{name}", {"model_name": "demo", **labels})

    assert read("requests_rejected_total", reason="queue_full") == 0
    assert read("retries_total", state="made") == 0
    assert read("quarantined_requests") == 0
    assert read("worker_ejected", pool="decode", worker="d0", reason="failing") is None

    cluster.workers["d0"].fail = Code.INTERNAL
    for number in range(40):
        sampling = SamplingParams(max_tokens=400, seed=1)
        cluster.submit(Request(str(number), (1, 2, 3), sampling, cluster.now, cluster.now + 600.0))
        cluster.run(0.5)
    assert read("requests_rejected_total", reason="queue_full") == len(cluster.refused) > 0
    assert read("retries_total", state="made") == cluster.dispatcher.retries.made > 0
    assert read("worker_ejected", pool="decode", worker="d0", reason="failing") == 1
