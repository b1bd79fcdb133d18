from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, replace

import grpc
from support.scripted_router import serving

from kvrelay.client.admin import AdminClient
from kvrelay.errors import Unavailable
from kvrelay.loadtest.report.timeline import PoolSample, Timeline, Watch
from kvrelay.loadtest.report.typed_json import read
from kvrelay.types.control_plane import RouterLoad, ScalingDecision
from kvrelay.types.workers import WorkerLoad
from kvrelay.wire import cluster as wire
from kvrelay.wire.status import abort

LOAD = WorkerLoad(
    running=2, waiting=1, waiting_tokens=40, blocks_total=10, blocks_held=4, tokens_per_second=7.5
)
STATUS = wire.ClusterStatus(
    model="demo",
    state="ready",
    pools=(
        wire.PoolStatus(
            "prefill",
            3,
            (
                wire.WorkerStatus("prefill-0", "prefill", 1, "ready", "h:1", LOAD),
                wire.WorkerStatus(
                    "prefill-1", "prefill", 2, "starting", "h:2", replace(LOAD, blocks_held=0)
                ),
            ),
        ),
        wire.PoolStatus("decode", 1, ()),
    ),
    decisions=(),
    router=RouterLoad("router", running=4, waiting=5),
    block_bytes=1,
    block_size=8,
    registry="ok",
)


class ScriptedCluster(wire.ClusterServiceServicer):
    def __init__(self) -> None:
        self.status = STATUS
        self.looks = 0
        self.down = False

    async def GetStatus(
        self, request: wire.pb.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> object:
        self.looks += 1
        if self.down:
            await abort(context, Unavailable("restarting"))
        return wire.cluster_status_to_proto(self.status)


def test_a_pool_is_the_sum_of_its_workers() -> None:
    assert PoolSample.of(STATUS.pools[0]) == PoolSample(1, 3, 4, 2, 80, 0.2, 15.0)
    assert PoolSample.of(STATUS.pools[1]) == PoolSample(0, 1, 0, 0, 0, 0.0, 0.0)


async def test_the_cluster_is_looked_at_until_the_end() -> None:
    cluster = ScriptedCluster()
    old = ScalingDecision(time.time() - 60, "decode", 1, 2, "before the test")
    with serving(cluster) as address, AdminClient(address) as client:
        watch = Watch(client, interval_s=0.01)
        cluster.status = replace(STATUS, decisions=(old,))
        task = asyncio.create_task(watch.run())
        while len(watch.timeline().samples) < 2:
            await asyncio.sleep(0.01)
        new = ScalingDecision(time.time(), "prefill", 2, 3, "queue_depth 9 is above 4")
        cluster.status = replace(STATUS, decisions=(new, old))
        while not watch.timeline().decisions:
            await asyncio.sleep(0.01)
        cluster.down = True
        while not watch.timeline().missed:
            await asyncio.sleep(0.01)
        task.cancel()
    found = watch.timeline()
    assert (found.samples[0].running, found.samples[0].waiting) == (4, 5)
    assert [one.at_s for one in found.samples] == sorted(one.at_s for one in found.samples)
    (decision,) = found.decisions  # seen many times, kept once; the old one is not of this test
    assert (decision.pool, decision.before, decision.after, decision.reason) == (
        "prefill",
        2,
        3,
        new.reason,
    )
    assert 0 <= decision.at_s <= found.samples[-1].at_s + 1
    assert read(Timeline, json.loads(json.dumps(asdict(found)))) == found
