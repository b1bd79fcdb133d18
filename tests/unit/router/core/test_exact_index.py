"""Placement by what workers tell of their prefix caches."""

from __future__ import annotations

from dataclasses import replace

from support.router_cluster import VirtualCluster

from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.protocol_version import ours
from kvrelay.tenants import Tenant
from kvrelay.types.block_keys import block_key, pack_keys
from kvrelay.types.requests import SamplingParams
from kvrelay.types.workers import WorkerInfo
from kvrelay.worker_messages import CacheUpdate
from router.core.path_policy import Assignment
from router.core.request import Request

PROMPT = tuple(range(400))


def placed(cluster: VirtualCluster, name: str, tenant: Tenant | None = None) -> Assignment:
    sampling = SamplingParams(max_tokens=4, seed=1)
    now = cluster.now
    request = Request(name, PROMPT, sampling, now, now + 60, tenant=tenant or Tenant())
    life, _ = cluster.dispatcher.submit(request, now)
    assert life.assignment is not None
    return life.assignment


def telling(cluster: VirtualCluster) -> dict[str, WorkerInfo]:
    """The workers of the cluster, which from now on tell what they hold."""
    infos = {info.worker_id: replace(info, protocol=ours()) for info in cluster.dispatcher.workers}
    for info in infos.values():
        cluster.dispatcher.worker_found(info, cluster.now)
    return infos


def tell(cluster: VirtualCluster, info: WorkerInfo, salt: str) -> int:
    """The worker tells that it holds the prompt. Returns the tokens of its full blocks."""
    hasher = BlockHasher(info.block_size, salt, model=info.layout_hash)
    hashes = hasher.extend(PROMPT)
    checksum = 0
    for one in hashes:
        checksum ^= block_key(one)
    update = CacheUpdate(
        1, begins=True, stored=pack_keys(hashes), blocks=len(hashes), checksum=checksum
    )
    assert cluster.dispatcher.on_event(info.worker_id, update, cluster.now) == []
    return min(len(hashes), (len(PROMPT) - 1) // info.block_size) * info.block_size


def test_a_router_that_starts_knows_what_the_workers_hold() -> None:
    cluster = VirtualCluster(2, 1)
    infos = telling(cluster)
    held = tell(cluster, infos["p1"], "")
    found = placed(cluster, "first")
    assert found.prefill == "p1"
    assert found.why == f"p1 holds {held} of {len(PROMPT)} prompt tokens"
    assert found.cached_tokens == held


def test_an_equal_prompt_counts_on_the_one_before_it() -> None:
    cluster = VirtualCluster(1, 2)
    telling(cluster)
    first, second = placed(cluster, "first"), placed(cluster, "second")
    assert first.cached_tokens == 0
    assert second.why == f"p0 will hold {second.cached_tokens} of {len(PROMPT)} prompt tokens"
    assert second.cached_tokens > 0
    assert second.source is None


def test_another_tenant_learns_nothing_of_what_is_held() -> None:
    cluster = VirtualCluster(1, 1)
    infos = telling(cluster)
    tell(cluster, infos["p0"], "salt of ann")
    placed(cluster, "ann", Tenant("ann", salt="salt of ann"))
    cluster = VirtualCluster(1, 1)
    infos = telling(cluster)
    before = placed(cluster, "bob", Tenant("bob", salt="salt of bob"))
    cluster = VirtualCluster(1, 1)
    infos = telling(cluster)
    tell(cluster, infos["p0"], "salt of ann")
    after = placed(cluster, "bob", Tenant("bob", salt="salt of bob"))
    assert after == before
    assert after.cached_tokens == 0
