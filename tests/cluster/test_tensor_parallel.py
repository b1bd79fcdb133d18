"""Real clusters in which one pool's worker has two ranks; one of a decode worker's is killed in
mid-stream.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.one_process import answer_of
from support.running_cluster import ANY_PORT, RunningCluster, running_on

from kvrelay.client import Completion
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.runner import ModelRunner
from kvrelay.process.child import family
from kvrelay.types.requests import SamplingParams
from kvrelay.wire.cluster import ClusterStatus, WorkerStatus

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
PROMPT = [(7 * i) % 300 for i in range(200)]
LONG = 120  # tokens, so that there is a middle
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=LONG),
    SamplingParams(temperature=1.1, top_p=0.95, seed=11),
)


def alone(params: SamplingParams, count: int) -> list[int]:
    """One process's answer."""
    demo = Path(__file__).parents[2] / "kvrelay" / "models" / "demo"
    runner = ModelRunner.load(str(demo), dtype="float32", kv_bytes=64 << 20)
    return answer_of(runner, PROMPT, params, count)


async def ask(cluster: RunningCluster, params: SamplingParams, count: int) -> Completion:
    return await cluster.client.generate(
        token_ids=PROMPT,
        max_tokens=count,
        temperature=params.temperature,
        top_p=params.top_p,
        seed=params.seed,
        ignore_eos=True,
    ).result()


def ranks_of(pid: int) -> list[int]:
    """Processes that a worker's process has started to share its model."""
    return [
        one
        for one in family(pid)
        if b"kvrelay.engine.parallel.rank" in Path(f"/proc/{one}/cmdline").read_bytes()
    ]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def while_a_rank_dies(cluster: RunningCluster, worker: WorkerStatus) -> Completion:
    (rank,) = ranks_of(worker.pid)
    async with cluster.client.generate(
        token_ids=PROMPT, max_tokens=LONG, temperature=0.0, ignore_eos=True
    ) as running:
        await anext(running)
        await anext(running)
        os.kill(rank, signal.SIGKILL)
        completion = await running.result()
    assert completion.ledger is not None
    assert len(completion.ledger.attempts) > 1, "the fault happened"
    return completion


async def successor_of(cluster: RunningCluster, worker: WorkerStatus) -> WorkerStatus:
    def replaced(status: ClusterStatus) -> bool:
        ready = all([one.state for one in pool.workers] == ["ready"] for pool in status.pools)
        return ready and not is_running(worker.pid)

    status = await cluster.until(
        replaced, "the worker whose rank was killed is replaced", seconds=120
    )
    successor = next(
        one for pool in status.pools for one in pool.workers if one.pool == worker.pool
    )
    assert successor.worker_id != worker.worker_id
    return successor


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)], ids=["2-1", "1-2"])
async def test_unlike_degrees_and_the_death_of_a_rank(prefill: int, decode: int) -> None:
    config = ClusterConfig.model_validate(
        {
            "model": {"path": "demo", "dtype": "float32"},
            "kv": {"memory": "128MiB"},
            "prefill": {"tensor_parallel": prefill, "chunk_tokens": 64},
            "decode": {"tensor_parallel": decode},
            "slo": None,
            "listen": ANY_PORT,
        }
    )
    greedy, sampled = (
        alone(params, count) for params, count in zip(SAMPLINGS, (LONG, 24), strict=True)
    )
    async with running_on(config) as cluster:
        status = await cluster.settled(1, 1, seconds=120)
        workers = {pool.name: pool.workers[0] for pool in status.pools}
        assert {name: worker.tensor_parallel for name, worker in workers.items()} == {
            "prefill": prefill,
            "decode": decode,
        }
        completion = await ask(cluster, SAMPLINGS[1], 24)
        assert (list(completion.token_ids), completion.path) == (sampled, "disaggregated")

        shared = workers["prefill" if prefill > 1 else "decode"]
        if decode > 1:
            completion = await while_a_rank_dies(cluster, shared)
            assert list(completion.token_ids) == greedy
            shared = await successor_of(cluster, shared)
            completion = await ask(cluster, SAMPLINGS[1], 24)
            assert list(completion.token_ids) == sampled
        (rank,) = ranks_of(shared.pid)
        await cluster.settled(1, 1)
    assert not is_running(rank)
