"""Networks that stop, are cut one way, come back and reset: rows 10, 11, 12 and 13."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from faults.checkers import Invariant
from faults.fleet import Fleet, record
from faults.history import Case, Evidence
from faults.prompts import LONG, OTHER, PROMPT, SEEDED
from support.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

# `make faults LONG=1`: outages as long as the matrix has them
LONGER = os.environ.get("LONG") == "1"
FROZEN_S = 60.0 if LONGER else 0.0
LENGTH = 200  # tokens


async def test_row_10_decode_worker_stopped_and_continued(fleet: Fleet) -> None:
    """It is stopped in mid-answer until the answer has gone on elsewhere, and then continues with
    what it held.
    """
    await fleet.learn(PROMPT, **SEEDED)
    await fleet.learn(OTHER)
    async with fleet.case(Invariant.TOKENS, Invariant.ANSWER) as case:
        asked = fleet.ask(case, "row-10!stop@token:10", PROMPT, **SEEDED)
        zombie = await fleet.reached(asked.history.request_id, "token:10")
        await fleet.stopped(case, zombie)
        await asked.tokens(11)
        await asyncio.sleep(FROZEN_S)
        assert zombie.frozen, "the answer went on without it"
        fleet.thaw(zombie)
        fleet.ask(case, "beside", OTHER, bystander=True)
        history = await asked.ended()
        await fleet.found(zombie)
    assert [one.decode_worker == zombie.worker_id for one in history.attempts] == [True, False]


async def test_row_11_partition_of_router_and_decode_worker(fleet: Fleet) -> None:
    await fleet.learn(PROMPT, max_tokens=LENGTH)
    async with fleet.case(Invariant.DEADLINE, Invariant.BLOCKS, Invariant.ANSWER) as case:
        asked = fleet.ask(case, "row-11!hold@sampled:5", PROMPT, deadline_s=60.0, max_tokens=LENGTH)
        worker = await fleet.reached(asked.history.request_id, "sampled:5")
        worker.routers.part()
        fleet.let_go(worker)
        history = await asked.ended()
        cut(case, worker.worker_id, worker.routers)
        await fleet.found(worker)
    assert [one.decode_worker == worker.worker_id for one in history.attempts] == [True, False]


async def test_row_11_partition_of_prefill_and_decode_worker(fleet: Fleet) -> None:
    """In mid-transfer. The router reaches both; the other decode worker can be reached by all."""
    await fleet.learn(LONG)
    async with fleet.case(Invariant.DEADLINE, Invariant.BLOCKS, Invariant.ANSWER) as case:
        asked = fleet.ask(case, "row-11!hold@arrived", LONG, deadline_s=60.0)
        worker = await fleet.reached(asked.history.request_id, "arrived")
        worker.handoffs.part()
        history = await asked.ended()
        cut(case, worker.worker_id, worker.handoffs)
    assert len(history.attempts) > 1
    assert history.attempts[0].decode_worker == worker.worker_id


def cut(case: Case, worker_id: str, way: TcpProxy) -> None:
    """Notes what a cut held back, and heals it."""
    fault = record(case, f"partition of {worker_id}")
    if way.held_back:
        fault.evidence.append(Evidence(time.monotonic(), f"{way.held_back} bytes were held back"))
    way.heal()


async def test_row_12_a_partition_that_heals_after_migration(fleet: Fleet) -> None:
    """It was one way: the worker heard the router and was not heard. All that it said comes when it
    heals.
    """
    await fleet.learn(PROMPT, max_tokens=LENGTH)
    async with fleet.case(Invariant.TOKENS, Invariant.BLOCKS, Invariant.ANSWER) as case:
        asked = fleet.ask(case, "row-12!hold@sampled:10", PROMPT, max_tokens=LENGTH)
        worker = await fleet.reached(asked.history.request_id, "sampled:10")
        worker.routers.passes["down"].clear()
        fleet.let_go(worker)
        history = await asked.ended()
        cut(case, worker.worker_id, worker.routers)
        await fleet.found(worker)
    assert [one.decode_worker == worker.worker_id for one in history.attempts] == [True, False]


async def test_row_13_connection_reset_in_mid_stream(fleet: Fleet) -> None:
    await fleet.learn(PROMPT, max_tokens=LENGTH)
    await fleet.learn(OTHER)
    async with fleet.case(Invariant.TOKENS, Invariant.ANSWER, Invariant.BLOCKS) as case:
        asked = fleet.ask(case, "row-13!hold@sampled:10", PROMPT, max_tokens=LENGTH)
        fleet.ask(case, "beside", OTHER, bystander=True)
        worker = await fleet.reached(asked.history.request_id, "sampled:10")
        fault = record(case, "the router's connection is reset")
        worker.routers.reset()
        fleet.let_go(worker)
        if worker.routers.resets:
            fault.evidence.append(
                Evidence(time.monotonic(), f"{worker.routers.resets} connections were reset")
            )
        history = await asked.ended()
    assert "was lost" in history.attempts[0].outcome
