from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidArgument
from kvrelay.types.control_plane import ControllerInfo, RouterLoad, ScalingDecision
from kvrelay.types.workers import (
    PendingWorker,
    PoolName,
    TierLoad,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
)
from kvrelay.wire import cluster
from kvrelay.wire.cluster import (
    ClusterStatus,
    PoolStatus,
    WorkerStatus,
    cluster_status_from_proto,
    cluster_status_to_proto,
    worker_status_from_proto,
    worker_status_to_proto,
)

counts = st.integers(0, 2**31 - 1)
sizes = st.integers(0, 2**63 - 1)
seconds = st.floats(0, 1e12)
names = st.text(st.characters(codec="utf-8"), max_size=20)
pools = st.sampled_from(get_args(PoolName))
states = st.sampled_from(get_args(WorkerState))
tiers = st.builds(
    TierLoad, names, sizes, sizes, sizes, sizes, sizes, sizes, sizes, sizes, sizes, names, seconds
)
loads = st.builds(
    WorkerLoad,
    running=counts,
    waiting=counts,
    waiting_tokens=sizes,
    blocks_total=counts,
    blocks_held=counts,
    blocks_cached=counts,
    leases=counts,
    tokens_per_second=seconds,
    weight_bytes=sizes,
    kv_bytes=sizes,
    rss_bytes=sizes,
    shared_bytes=sizes,
    integrity_ok=st.booleans(),
    integrity_error=names,
    preemptions=sizes,
    draft_tokens=sizes,
    accepted_tokens=sizes,
    queue_wait_p95_ms=seconds,
    step_age_s=seconds,
    tiers=st.lists(tiers, max_size=2).map(tuple),
)
workers = st.builds(WorkerStatus, names, pools, sizes, states, names, loads, counts, names)
routers = st.builds(
    RouterLoad,
    router_id=names,
    running=counts,
    waiting=counts,
    waiting_tokens=sizes,
    finished=sizes,
    failed=sizes,
    rss_bytes=sizes,
    ttft_p95_ms=st.none() | seconds,
    itl_p95_ms=st.none() | seconds,
)
controllers = st.builds(
    ControllerInfo, names, st.sampled_from(("standby", "claiming", "leading")), counts
)
statuses = st.builds(
    ClusterStatus,
    model=names,
    state=states,
    pools=st.lists(
        st.builds(PoolStatus, pools, counts, st.lists(workers, max_size=2).map(tuple)), max_size=2
    ).map(tuple),
    decisions=st.lists(
        st.builds(ScalingDecision, seconds, pools, counts, counts, names), max_size=2
    ).map(tuple),
    router=routers,
    block_bytes=sizes,
    block_size=counts,
    registry=names,
    restarting=st.lists(names, max_size=2).map(tuple),
    pending=st.lists(st.builds(PendingWorker, names, pools, names), max_size=2).map(tuple),
    controllers=st.lists(controllers, max_size=2).map(tuple),
    delayed=st.lists(
        st.builds(ScalingDecision, seconds, pools, counts, counts, names), max_size=2
    ).map(tuple),
)


@given(statuses)
def test_a_status_survives_the_wire(status: ClusterStatus) -> None:
    raw = cluster_status_to_proto(status).SerializeToString()
    assert cluster_status_from_proto(cluster.pb.ClusterStatus.FromString(raw)) == status


def test_a_workers_status_is_taken_from_its_registry_entry() -> None:
    load = WorkerLoad(running=3, blocks_held=7)
    info = WorkerInfo(
        "decode-0", "decode", 4, "ready", "127.0.0.1:1", "demo", "00", 16, 64, "host", 4096, load
    )
    status = WorkerStatus.of(info)
    assert status == WorkerStatus(
        "decode-0", "decode", 4, "ready", "127.0.0.1:1", load, model_id="demo"
    )
    assert worker_status_from_proto(worker_status_to_proto(status)) == status


def test_an_unknown_pool_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="pool") as caught:
        worker_status_from_proto(cluster.pb.WorkerStatus(pool="encode", state="ready"))
    assert caught.value.field == "pool"


def test_a_newer_routers_words_leave_the_rest_of_its_status_readable() -> None:
    future, known = (
        "encode",
        cluster.pb.WorkerStatus(worker_id="decode-0", pool="decode", state="dreaming\x1b"),
    )
    status = cluster_status_from_proto(
        cluster.pb.ClusterStatus(
            state="asleep",
            pools=[
                cluster.pb.PoolStatus(name=future),
                cluster.pb.PoolStatus(
                    name="decode", workers=[known, cluster.pb.WorkerStatus(pool=future)]
                ),
            ],
            decisions=[
                cluster.pb.ScalingDecision(pool=future),
                cluster.pb.ScalingDecision(pool="decode", after=2),
            ],
            pending=[cluster.pb.PendingWorker(pool=future)],
            delayed=[cluster.pb.ScalingDecision(pool=future)],
        )
    )
    assert status.state == "asleep"
    assert [(pool.name, [one.state for one in pool.workers]) for pool in status.pools] == [
        ("decode", ["dreaming "])
    ]
    assert [one.after for one in status.decisions] == [2]
    assert not status.pending
    assert not status.delayed
