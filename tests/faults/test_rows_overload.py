"""More is asked for than can be served, and a client that does not read: row 23.

Counts, no times: benchmarks/overload.py measures how soon a refusal comes.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from faults.checkers import Invariant
from faults.client import Asking, whole
from faults.fleet import Fleet, record
from faults.history import Evidence
from faults.prompts import OTHER, PROMPT, tokens
from support.tcp_proxy import proxy_to

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

SLOTS = 6  # of prompts of SIZE tokens, on two decode workers
SIZE = 700
QUEUE = 6
LOAD = 3
LENGTH = 1000  # tokens of the answer that is not read
# Some hundred bytes for a token, more than a connection buffers
VERBOSE = {"max_tokens": LENGTH, "logprobs": 20}


async def test_row_23_three_times_as_many_requests_as_can_be_taken(fleet: Fleet) -> None:
    """Those beyond batch slots and queue are told at once, while nobody else has moved: nothing is
    computed for them, and all that were taken are served.
    """
    prompts = [tokens(SIZE, 230 + number) for number in range(SLOTS + QUEUE)]
    await fleet.learn(*prompts)
    router = await fleet.add_router(max_queue=QUEUE)
    async with fleet.case(
        Invariant.TOKENS, Invariant.ANSWER, Invariant.DEADLINE, Invariant.BLOCKS
    ) as case:
        fault = record(case, f"{LOAD} times what can be taken")
        for worker in fleet.pool("decode"):
            worker.handoffs.part()  # so that nobody leaves a batch slot
        asked: list[Asking] = []
        load = prompts * LOAD
        # Those that fill the batch slots do not wait for a prefill worker when the others come.
        for part in (load[:SLOTS], load[SLOTS:]):
            asked += [
                fleet.ask(case, "row-23", prompt, routers=(router,), deadline_s=60.0)
                for prompt in part
            ]
            async with asyncio.timeout(60):
                while (await router.status()).router.running < SLOTS:
                    await asyncio.sleep(0.02)
        refused = await ended(fleet, asked, len(asked) - SLOTS - QUEUE)
        seen = (await router.status()).router
        assert (seen.running, seen.waiting) == (SLOTS, QUEUE)
        fault.evidence.append(
            Evidence(
                time.monotonic(),
                f"{len(refused)} refused, {seen.running} run, all batch slots are held",
            )
        )
        for worker in fleet.pool("decode"):
            worker.handoffs.heal()
        served = [await one.ended() for one in asked if one not in refused]
    assert all(map(whole, served))
    for one in refused:
        assert (one.history.end.status, one.num_tokens) == ("RESOURCE_EXHAUSTED", 0)
        assert one.history.end.retry_after_s
    await router.child.stop(10.0)


async def test_row_23_goodput_stays_flat(fleet: Fleet) -> None:
    """As many clients as are served at once, and three times as many, each asking again when it has
    its answer or is refused: of what is computed, nothing is for an answer that does not become
    whole.
    """
    prompts = [tokens(SIZE, 230 + number) for number in range(SLOTS + QUEUE)]
    await fleet.learn(*prompts)
    router = await fleet.add_router(max_queue=QUEUE)
    async with fleet.case(
        Invariant.TOKENS, Invariant.ANSWER, Invariant.DEADLINE, Invariant.BLOCKS
    ) as case:
        fault = record(case, f"{LOAD} times as many clients")
        served = 0

        async def client(number: int) -> None:
            nonlocal served
            while served < 2 * len(prompts):
                asked = fleet.ask(
                    case, "row-23", prompts[number], routers=(router,), deadline_s=60.0
                )
                history = await asked.ended()
                served += whole(history)
                await asyncio.sleep(history.end.retry_after_s or 0.0)

        async with asyncio.TaskGroup() as clients:
            for number in range(LOAD * len(prompts)):
                clients.create_task(client(number % len(prompts)))
        refusals = [one for one in case.requests if one.end.status == "RESOURCE_EXHAUSTED"]
        fault.evidence += [Evidence(one.end.at, one.end.message) for one in refusals]
    assert len(refusals) >= (LOAD - 1) * len(prompts), "of all who came first"
    assert {one.end.status for one in case.requests} == {"length", "RESOURCE_EXHAUSTED"}
    assert not any(one.token_ids for one in refusals)
    await router.child.stop(10.0)


async def ended(fleet: Fleet, asked: list[Asking], count: int) -> list[Asking]:
    """The first so many of them."""
    await fleet.until(
        lambda: sum(bool(one.history.ends) for one in asked) >= count, f"{count} have ended"
    )
    return [one for one in asked if one.history.ends]


async def test_row_23_a_slow_reader(fleet: Fleet) -> None:
    """Its connection stops in mid-answer. The worker goes on to the end, and what was not read
    comes in the largest responses: 64 tokens with logprobs.
    """
    await fleet.learn(PROMPT, **VERBOSE)
    await fleet.learn(OTHER)
    async with (
        proxy_to(fleet.router.endpoints.grpc) as way,
        # Takes 64 KiB unread, and no more
        fleet.client_channel(way.address, ("grpc.http2.bdp_probe", 0)) as channel,
        fleet.case(Invariant.TOKENS, Invariant.ANSWER, Invariant.BLOCKS) as case,
    ):
        fault = record(case, "a client that does not read")
        asked = fleet.ask(
            case, "row-23", PROMPT, routers=(replace(fleet.router, channel=channel),), **VERBOSE
        )
        await asked.tokens(5)
        way.passes["down"].clear()
        fleet.ask(case, "beside", OTHER, bystander=True)
        async with asyncio.timeout(60):
            while not all([(await one.sample()).at_rest for one in fleet.alive]):
                await asyncio.sleep(0.02)
        assert not asked.history.ends
        read = f"{asked.num_tokens} of {LENGTH} tokens were read when all were computed"
        fault.evidence.append(Evidence(time.monotonic(), read))
        way.heal()
        history = await asked.ended()
    assert max(len(one.token_ids) for one in history.received) == 64
