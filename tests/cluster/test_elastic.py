"""The prefill pool follows its queue, up and down, and no request notices."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import pytest
from running_cluster import ANY_PORT, RunningCluster

from kvrelay.client import AsyncClient, Completion
from kvrelay.config import ClusterConfig
from kvrelay.local_cluster import LocalCluster
from kvrelay.wire.cluster import ClusterServiceStub

POLICY = """
interval_s: 0.25
prefill:
  min_replicas: 1
  max_replicas: 2
  metrics: [{name: queue_depth, target: 4}]
  upscale_delay_s: 0.5
  downscale_delay_s: 3
decode:
  min_replicas: 1
  max_replicas: 2
  metrics: [{name: kv_occupancy, target: 0.9}]
"""

pytestmark = pytest.mark.timeout(300)


async def test_ten_times_the_prompts_grow_the_prefill_pool_alone(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    config = ClusterConfig.model_validate(
        {
            "model": {"path": "demo", "dtype": "float32"},
            "kv": {"memory": "256MiB"},
            "autoscaling": str(policy),
            "router": {"local_below_tokens": 1},
            "listen": ANY_PORT,
        }
    )
    draw = random.Random(3)

    async with (
        LocalCluster(config, quiet=True) as local,
        AsyncClient(local.endpoints.grpc) as client,
        grpc.aio.insecure_channel(local.endpoints.admin) as channel,
    ):
        cluster = RunningCluster(local, client, ClusterServiceStub(channel))

        async def ask() -> Completion:
            prompt = [draw.randrange(300) for _ in range(1200)]
            return await client.generate(token_ids=prompt, max_tokens=4, ignore_eos=True).result()

        async def keep_asking(enough: asyncio.Event) -> list[Completion]:
            completions = []
            while not enough.is_set():
                completions.append(await ask())
            return completions

        def sizes() -> tuple[int, ...]:
            return tuple(len([one for one in pool.workers if one.state == "ready"]) for pool in status.pools)

        status = await cluster.settled(prefill=1, decode=1)
        calm = asyncio.Event()
        one_client = asyncio.create_task(keep_asking(calm))
        await asyncio.wait({one_client}, timeout=3)
        status = await cluster.status()
        assert (sizes(), status.decisions) == ((1, 1), ()), "one client at a time leaves no queue"

        grown = asyncio.Event()
        ten_more = [asyncio.create_task(keep_asking(grown)) for _ in range(10)]
        await cluster.until(lambda now: len(now.pools[0].workers) == 2, "the prefill pool grows", seconds=90)
        grown.set()
        calm.set()
        served = [done for task in (one_client, *ten_more) for done in await task]
        assert {one.finish_reason for one in served} == {"length"}
        used = {attempt.prefill_worker for one in served if one.ledger for attempt in one.ledger.attempts}
        assert used, "the prompts went through the prefill pool"

        status = await cluster.settled(prefill=1, decode=1)
        assert [one.pool for one in status.decisions] == ["prefill", "prefill"]
        down, up = status.decisions
        assert (up.before, up.after, down.before, down.after) == (1, 2, 2, 1)
        assert "queue_depth" in up.reason
        assert (await ask()).finish_reason == "length"
