"""Workers that are replaced, told to end, or lost with their controller: no request notices."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import grpc
import pytest
from faults.checkers import Invariant, check
from faults.client import Asking
from faults.history import Case, Evidence, FaultRecord, RequestHistory
from support.running_cluster import RunningCluster

from kvrelay.client import Completion
from kvrelay.process.child import command_of, family
from kvrelay.types.workers import POOLS
from kvrelay.wire.cluster import ClusterStatus, pb
from kvrelay.wire.inference import GenerateRequest, SamplingOptions

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
PROMPTS = [[(7 * i + 13 * n + i * i) % 300 for i in range(100 + 60 * n)] for n in range(4)]


async def answer(cluster: RunningCluster, prompt: list[int], max_tokens: int = 120) -> Completion:
    return await cluster.client.generate(
        token_ids=prompt, max_tokens=max_tokens, ignore_eos=True, temperature=0.0
    ).result()


async def test_a_restart_and_a_sigterm_under_load_cost_no_request_and_no_token(
    cluster: RunningCluster,
) -> None:
    """A prefill worker is restarted by the operator while whoever runs its machine ends a decode
    worker.
    """
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
            # It was on its way to a worker that had just ended
            if len(completion.ledger.attempts) > 1:
                assert "failed_attempt" in dict(completion.ledger.phases), (
                    "who streams stays where it is, to its end"
                )
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
            lambda status: (
                ended.worker_id not in {one.worker_id for one in status.pools[1].workers}
            ),
            "it has ended",
        )
        enough.set()
    assert restart.returncode == 0
    assert said.decode().splitlines()[-1] == f"{restarted.worker_id}: replaced, 1 of 1"
    status = await cluster.settled()
    assert restarted.worker_id not in {one.worker_id for one in status.pools[0].workers}


@pytest.mark.long
async def test_a_stream_outlives_the_controller_and_all_its_workers(
    cluster: RunningCluster,
) -> None:
    await cluster.settled()
    expected = await answer(cluster, PROMPTS[0], 1600)
    before = {one.worker_id: one.epoch for pool in POOLS for one in await cluster.workers(pool)}
    controller = cluster.local._controller.child
    assert controller is not None
    running = cluster.client.generate(
        token_ids=PROMPTS[0], max_tokens=1600, ignore_eos=True, temperature=0.0
    )
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


@pytest.mark.long
async def test_row_18_rays_head_is_killed(cluster: RunningCluster) -> None:
    """Its GCS. The stream goes on, and a request for more workers waits. Then Ray ends the raylet,
    the workers and the controller, and those that come instead bring the pools to the wanted
    sizes, once.
    """
    await cluster.settled()
    expected = (await answer(cluster, PROMPTS[0], 1600)).token_ids
    controller = cluster.local._controller.child
    assert controller is not None
    (head,) = [one for one in family(controller.process.pid) if command_of(one) == "gcs_server"]
    before = {one.worker_id: one.epoch for pool in POOLS for one in await cluster.workers(pool)}
    case = Case(cluster.local.config.transfer.lease_s)
    fault = FaultRecord("SIGKILL to Ray's head")
    case.faults.append(fault)

    def ask() -> Asking:
        history = RequestHistory(f"row-18-{len(case.requests)}", expected)
        case.requests.append(history)
        sampling = SamplingOptions(temperature=0.0, max_tokens=1600, ignore_eos=True)
        request = GenerateRequest(
            request_id=history.request_id, token_ids=tuple(PROMPTS[0]), sampling=sampling
        )
        return Asking(history, request, channel, timeout=200.0)

    def ended(status: ClusterStatus) -> bool:
        if controller.process.returncode is not None:
            return True
        there = {one.worker_id for pool in status.pools for one in pool.workers}
        assert there <= before.keys(), "scaling pauses"
        return False

    async with grpc.aio.insecure_channel(cluster.local.endpoints.grpc) as channel:
        asked = ask()
        await asked.tokens(5)
        os.kill(head, signal.SIGKILL)
        await cluster.until(lambda _: not command_of(head), "the head is gone")
        fault.evidence.append(Evidence(time.monotonic(), f"gcs_server {head} is gone"))
        await cluster.admin.SetPoolSize(pb.SetPoolSizeRequest(decode=3))
        first, _ = await asyncio.gather(
            asked.ended(), cluster.until(ended, "the controller has ended", 120.0)
        )
        assert first.end.status == "length"
        moved = await ask().ended()
        status = await cluster.settled(decode=3, seconds=120.0)
    assert moved.end.status == "length"
    check(case, Invariant.TOKENS, Invariant.ANSWER)
    after = {one.worker_id: one.epoch for pool in status.pools for one in pool.workers}
    assert not before.keys() & after.keys(), "no name comes twice"
    assert len(set(after.values()) | set(before.values())) == len(after) + len(before), (
        "nor an epoch"
    )
    await cluster.admin.SetPoolSize(pb.SetPoolSizeRequest(decode=2))
    await cluster.settled()
