"""Damaged KV, a router gone, and no room left: rows 8, 19 and 25."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from faults.checkers import Invariant
from faults.fleet import ENGINE, Fleet, record, running_fleet
from faults.fleet_worker import Forks
from faults.history import BrokeOff, Evidence
from faults.prompts import OTHER, PROMPT, tokens

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

LENGTH = 200  # tokens


DAMAGES = {
    "flip": "arrived with digest",
    "truncate": "are not a hand-off frame",
    "twice": "received frame 0, and expected frame 1",
    "reorder": "received frame 1, and expected frame 0",
}


async def test_row_08_damaged_kv(fleet: Fleet) -> None:
    """Four at once, since a pair of workers whose hand-off failed is left alone for a while. They
    have two chunks each, so that each prefill worker takes two of them at once.
    """
    prompts = [tokens(200, 80 + number) for number in range(len(DAMAGES))]
    await fleet.learn(OTHER, *prompts)
    async with fleet.case(Invariant.ANSWER, Invariant.BLOCKS, Invariant.OWN_KV) as case:
        asked = {
            damage: fleet.ask(case, f"row-08!{damage}@frames!tell@refused", prompt)
            for damage, prompt in zip(DAMAGES, prompts, strict=True)
        }
        fleet.ask(case, "beside", OTHER, bystander=True)
        for damage, one in asked.items():
            fault = record(case, f"the first blocks: {damage}")
            worker = await fleet.reached(one.history.request_id, "frames")
            fault.evidence.append(
                Evidence(time.monotonic(), f"{worker.worker_id} was given them so")
            )
            history = await one.ended()
            (refused,) = [
                at.said
                for at in worker.reached
                if (at.request_id, at.point) == (history.request_id, "refused")
            ]
            assert DAMAGES[damage] in refused, "of this damage, and nothing else"
            assert len(history.attempts) > 1


async def test_row_19_router_killed_and_client_resumes(fleet: Fleet) -> None:
    await fleet.learn(PROMPT, max_tokens=LENGTH)
    first = fleet.router
    second = await fleet.add_router()
    await fleet.complete()
    async with fleet.case(Invariant.TOKENS, Invariant.ANSWER, Invariant.BLOCKS) as case:
        asked = fleet.ask(
            case, "row-19!hold@sampled:15", PROMPT, max_tokens=LENGTH, routers=(first, second)
        )
        worker = await fleet.reached(asked.history.request_id, "sampled:15")
        await asked.tokens(10)
        fault = record(case, "SIGKILL to the router")
        first.child.kill()
        code = await first.child.process.wait()
        fault.evidence.append(Evidence(time.monotonic(), f"exit code {code}"))
        fleet.let_go(worker)
        history = await asked.ended()
    assert code == -signal.SIGKILL
    assert [type(one) for one in history.events].count(BrokeOff) == 1


@pytest_asyncio.fixture(loop_scope="session")
async def tight(fleet: Fleet, forks: Forks) -> AsyncIterator[Fleet]:
    """Decode workers with less than 108 blocks for sequences. Those on vLLM have 239, because their
    hand-offs need room for the longest sequence; so their sequences are shorter here.
    """
    if ENGINE != "vllm":
        yield fleet
        return
    model, kv = {"max_model_len": 1024}, {"memory": "20MiB"}
    async with running_fleet(forks, model=model, kv=kv) as shorter:
        yield shorter


async def test_row_25_kv_pool_full_in_mid_decode(tight: Fleet) -> None:
    """Eight answers of 27 blocks each: one worker has four or more, and no room for four that begin
    together.
    """
    prompts = [tokens(150, 250 + n) for n in range(8)]
    await tight.learn(*prompts, max_tokens=700)
    async with tight.case(Invariant.ANSWER, Invariant.BLOCKS) as case:
        before = await tight.preemptions()
        asked = [
            tight.ask(case, "row-25!hold@joined", prompt, max_tokens=700) for prompt in prompts
        ]
        for one in asked:
            await tight.reached(one.history.request_id, "joined")
        for worker in tight.pool("decode"):
            tight.let_go(worker)
        for one in asked:
            await one.ended()
        fault = record(case, "the decode workers' blocks do not suffice")
        if (count := await tight.preemptions() - before) > 0:
            fault.evidence.append(Evidence(time.monotonic(), f"{count} preemptions"))
