"""Workers that are replaced, told to end, or lost with their controller: no request notices."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest
from running_cluster import RunningCluster

from kvrelay.client import Completion
from kvrelay.types import POOLS

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
PROMPTS = [[(7 * i + 13 * n + i * i) % 300 for i in range(100 + 60 * n)] for n in range(4)]


async def answer(cluster: RunningCluster, prompt: list[int], max_tokens: int = 120) -> Completion:
    return await cluster.client.generate(
        token_ids=prompt, max_tokens=max_tokens, ignore_eos=True, temperature=0.0
    ).result()


async def test_a_restart_and_a_sigterm_under_load_cost_no_request_and_no_token(cluster: RunningCluster) -> None:
    """A prefill worker is restarted by the operator while whoever runs its machine ends a decode worker."""
    await cluster.settled()
    expected = [(await answer(cluster, prompt)).token_ids for prompt in PROMPTS]
    restarted = (await cluster.workers("prefill"))[0]
    ended = (await cluster.workers("decode"))[0]
    enough = asyncio.Event()
    served = 0

    async def keep_asking(number: int) -> None:
        nonlocal served
        while not enough.is_set():
            completion = await answer(cluster, PROMPTS[number])
            assert completion.token_ids == expected[number]
            assert completion.ledger is not None
            assert len(completion.ledger.attempts) == 1, "it stayed where it was, to its end"
            served += 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(len(PROMPTS)):
            tasks.create_task(keep_asking(number))
        await cluster.until(lambda _: served > 8, "load")
        os.kill(ended.pid, signal.SIGTERM)
        command = (sys.executable, "-m", "kvrelay.cli.main", "restart", restarted.worker_id)
        restart = await asyncio.create_subprocess_exec(
            *command, "--admin", cluster.local.endpoints.admin, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await restart.communicate()
        await cluster.until(
            lambda status: ended.worker_id not in {one.worker_id for one in status.pools[1].workers}, "it has ended"
        )
        enough.set()
    assert restart.returncode == 0
    assert said.decode().splitlines()[-1] == f"{restarted.worker_id}: replaced, 1 of 1"
    status = await cluster.settled()
    assert restarted.worker_id not in {one.worker_id for one in status.pools[0].workers}


async def test_a_stream_outlives_the_controller_and_all_its_workers(cluster: RunningCluster) -> None:
    await cluster.settled()
    expected = await answer(cluster, PROMPTS[0], 1600)
    before = {one.worker_id: one.epoch for pool in POOLS for one in await cluster.workers(pool)}
    controller = cluster.local._controller
    assert controller is not None
    running = cluster.client.generate(token_ids=PROMPTS[0], max_tokens=1600, ignore_eos=True, temperature=0.0)
    async with running as stream:
        await anext(stream)
        controller.kill()
        completion = await stream.result()
    assert completion.token_ids == expected.token_ids
    assert completion.ledger is not None
    assert len(completion.ledger.attempts) > 1, "the fault happened"
    status = await cluster.settled()
    after = {one.worker_id: one.epoch for pool in status.pools for one in pool.workers}
    assert not before.keys() & after.keys(), "no name comes twice"
    assert min(after.values()) > max(before.values()), "nor an epoch"
