"""Workers that die in the middle of things."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from support.running_cluster import RunningCluster, until_a_fault_hits

from kvrelay.client import AsyncStream, Completion

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]
PROMPT = [(7 * i) % 300 for i in range(200)]
SAMPLED = {"temperature": 1.1, "top_p": 0.95, "seed": 11, "presence_penalty": 0.4}


def stream(cluster: RunningCluster, prompt: list[int] = PROMPT, **options: object) -> AsyncStream:
    return cluster.client.generate(
        token_ids=prompt, **{"max_tokens": 1600, "ignore_eos": True, **options}
    )  # type: ignore[arg-type]


def used(completion: Completion) -> list[tuple[str, str]]:
    assert completion.ledger is not None
    return [(one.prefill_worker, one.decode_worker) for one in completion.ledger.attempts]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"temperature": 0.0}, marks=pytest.mark.long, id="greedy"),
        pytest.param(SAMPLED, id="sampled"),
    ],
)
async def test_a_stream_outlives_its_decode_worker(
    cluster: RunningCluster, sampling: dict[str, object]
) -> None:
    await cluster.settled()
    expected = await stream(cluster, **sampling).result()
    await cluster.settled()

    async def attempts() -> int:
        async with stream(cluster, **sampling) as running:
            await anext(running)
            await cluster.kill_a_busy_decode_worker()
            completion = await running.result()
        assert completion.token_ids == expected.token_ids
        await cluster.settled()
        return len(used(completion))

    await until_a_fault_hits(attempts)


@pytest.mark.long
async def test_when_all_prefill_workers_die_the_local_path_serves(cluster: RunningCluster) -> None:
    await cluster.settled()
    prompts = [[(11 * i + 13 * n + i * i) % 300 for i in range(4000)] for n in range(12)]
    running = [
        asyncio.ensure_future(stream(cluster, prompt, max_tokens=8, temperature=0.0).result())
        for prompt in prompts
    ]
    await cluster.until(
        lambda status: any(worker.load.running for worker in status.pools[0].workers),
        "a prefill worker is busy",
    )
    for worker in await cluster.workers("prefill"):
        os.kill(worker.pid, signal.SIGKILL)
    completions = await asyncio.gather(*running)
    assert any(len(used(completion)) > 1 for completion in completions), "the fault happened"
    await cluster.settled()
    for prompt, completion in zip(prompts, completions, strict=True):
        again = await stream(cluster, prompt, max_tokens=8, temperature=0.0).result()
        assert completion.token_ids == again.token_ids
