"""Pools that are set to random sizes under load; `python benchmarks/chaos.py scale --events 50` is
the long version.
"""

from __future__ import annotations

import grpc
import pytest
from chaos import Load, judged, rescaled
from support.running_cluster import RunningCluster

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


async def test_no_request_notices_how_large_the_pools_are(
    cluster: RunningCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    async with grpc.aio.insecure_channel(cluster.local.endpoints.grpc) as channel:
        load = Load(channel, seed=11, kinds=6, length=80)
        await load.learn()
        assert await judged(cluster, load, rescaled(5, every=5.0, seed=3)), capsys.readouterr().out
        assert len(load.asked) >= 5
