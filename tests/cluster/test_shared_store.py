"""A cluster whose workers share stores: hits after a restart, and no request notices a store that
is killed.
"""

from __future__ import annotations

import asyncio

import pytest
from support.running_cluster import ANY_PORT, RunningCluster, running_on
from support.stores import StoreProcess

from kvrelay.client import Completion
from kvrelay.config.schema import ClusterConfig
from kvrelay.wire.cluster import ClusterStatus, pb

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

PROMPTS = [[(7 * i + 13 * n + i * i * (n + 1)) % 300 for i in range(900)] for n in range(12)]


async def answer(cluster: RunningCluster, prompt: list[int]) -> Completion:
    return await cluster.client.generate(
        token_ids=prompt, max_tokens=12, ignore_eos=True, temperature=0.0
    ).result()


def opened(status: ClusterStatus) -> bool:
    tiers = [tier for one in status.pools[1].workers for tier in one.load.tiers]
    return bool(tiers) and not any(tier.skipped for tier in tiers)


async def test_workers_share_stores_across_a_restart_and_the_loss_of_a_store() -> None:
    stores = [StoreProcess("--size", "256MiB") for _ in range(2)]
    # Memory for a quarter of the prompts.
    made = ClusterConfig.model_validate(
        {
            "model": {"path": "demo", "dtype": "float32", "max_model_len": 1024},
            "kv": {
                "memory": "16MiB",
                "tiers": [{"kind": "remote", "addresses": [one.address for one in stores]}],
            },
            "prefill": {"replicas": 0},
            "decode": {"replicas": 2},
            "listen": ANY_PORT,
        }
    )
    try:
        async with running_on(made) as cluster:
            await cluster.until(opened, "all workers have found the stores")
            expected = [(await answer(cluster, prompt)).token_ids for prompt in PROMPTS]
            await cluster.until(
                lambda status: any(
                    tier.stored for one in status.pools[1].workers for tier in one.load.tiers
                ),
                "something is stored",
            )
            before = {one.worker_id for one in await cluster.workers("decode")}
            await cluster.admin.RestartWorkers(pb.RestartWorkersRequest(names=["decode"]))
            await cluster.until(
                lambda status: not before & {one.worker_id for one in status.pools[1].workers},
                "the workers are replaced",
                240,
            )
            await cluster.settled(0, 2, 240)
            await cluster.until(opened, "the new workers have found the stores")
            done = [await answer(cluster, prompt) for prompt in PROMPTS]
            assert [one.token_ids for one in done] == expected
            fetched = [one.ledger.fetch for one in done if one.ledger and one.ledger.fetch]
            assert {one.source for one in fetched} == {"remote"}

            async def keep_asking(number: int) -> None:
                for _ in range(4):
                    assert (await answer(cluster, PROMPTS[number])).token_ids == expected[number]

            async with asyncio.TaskGroup() as tasks:
                asking = [tasks.create_task(keep_asking(number)) for number in range(len(PROMPTS))]
                await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.to_thread(stores[0].kill)
            await cluster.until(
                lambda status: all(
                    tier.skipped == 1 for one in status.pools[1].workers for tier in one.load.tiers
                ),
                "the workers have noticed the loss",
            )
            status = await cluster.settled(0, 2)
            assert status.router.failed == 0
    finally:
        for one in stores:
            one.close()
