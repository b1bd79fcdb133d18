from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry
from support.router_cluster import VirtualCluster

from kvrelay.protocol_version import ours
from kvrelay.types.block_keys import block_key, pack_keys
from kvrelay.worker_messages import CacheUpdate, ResyncCache
from router.core.effects import Send
from router.observability.index_metrics import IndexCollector


def test_what_the_router_knows_of_caches_can_be_seen() -> None:
    cluster = VirtualCluster(1, 1)
    dispatcher = cluster.dispatcher
    registry = CollectorRegistry()
    registry.register(IndexCollector("demo", dispatcher))

    def read(name: str, **labels: str) -> float | None:
        labels = {"model_name": "demo", **labels}
        return registry.get_sample_value(f"kvrelay_prefix_index_{name}", labels)

    assert read("blocks", pool="decode", worker="d0") is None, "an older worker tells nothing"
    (info,) = [one for one in dispatcher.workers if one.worker_id == "d0"]
    dispatcher.worker_found(replace(info, protocol=ours()), 0.0)
    of = {"pool": "decode", "worker": "d0"}
    assert (read("blocks", **of), read("exact", **of)) == (0, 0)
    hashes = [b"one".ljust(16), b"two".ljust(16)]
    checksum = block_key(hashes[0]) ^ block_key(hashes[1])
    update = CacheUpdate(1, begins=True, stored=pack_keys(hashes), blocks=2, checksum=checksum)
    assert dispatcher.on_event("d0", update, 0.0) == []
    assert (read("blocks", **of), read("exact", **of)) == (2, 1)
    assert (read("snapshots_total"), read("gaps_total")) == (1, 0)
    effects = dispatcher.on_event("d0", replace(update, number=3, begins=False), 0.0)
    assert effects == [Send("d0", ResyncCache())]
    assert (read("exact", **of), read("gaps_total")) == (0, 1)
