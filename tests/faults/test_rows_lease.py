"""A lease ends, its blocks are another's, and then a frame of the first one comes: row 7."""

from __future__ import annotations

import asyncio
import time

import pytest
from faults.checkers import Invariant
from faults.fleet import ENGINE, Fleet, record
from faults.history import Evidence
from faults.prompts import LONG, tokens

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

LARGE = 2040  # tokens of a prompt that takes more blocks than LONG leaves


async def test_row_07_a_late_frame_after_its_blocks_were_given_away(fleet: Fleet) -> None:
    """The network keeps the push's first frame back, and the router's renewals, until the lease has
    ended.

    The request goes on elsewhere. The frame comes when each decode worker has promised most of its
    blocks to another.
    """
    large = [tokens(LARGE, 70 + number) for number in range(2)]
    await fleet.learn(LONG, *large)
    async with fleet.case(
        Invariant.TOKENS, Invariant.ANSWER, Invariant.BLOCKS, Invariant.OWN_KV
    ) as case:
        fault = record(case, "a lease that ends before its first frame comes")
        for worker in fleet.pool("decode"):
            worker.handoffs.part()
        asked = fleet.ask(case, "row-07!tell@reserved!tell@refused", LONG)
        name = asked.history.request_id
        worker = await fleet.reached(name, "reserved")
        (other,) = (one for one in fleet.pool("decode") if one is not worker)
        await fleet.until(lambda: worker.handoffs.held_back, "the push has begun")
        promised = (await worker.sample()).blocks_held
        other.handoffs.heal()
        worker.routers.passes["up"].clear()
        async with asyncio.timeout(30):
            while not (await worker.sample()).at_rest:
                await asyncio.sleep(0.01)
        fault.evidence.append(
            Evidence(time.monotonic(), f"the lease on {worker.worker_id} has ended")
        )
        worker.routers.heal()
        await asked.ended()
        await fleet.found(worker)

        later = [fleet.ask(case, "row-07-later!tell@reserved", prompt) for prompt in large]
        owners = {
            (await fleet.reached(one.history.request_id, "reserved")).worker_id for one in later
        }
        assert owners == {worker.worker_id, other.worker_id}
        held = await worker.sample()
        # Of vLLM's memory, a quarter is for hand-offs.
        total = held.blocks_total // (4 if ENGINE == "vllm" else 1)
        assert held.blocks_held + promised > total, "some blocks were the first one's"
        assert not worker.was_at(name, "refused")
        worker.handoffs.heal()
        await fleet.reached(name, "refused")
        for one in later:
            assert len((await one.ended()).attempts) == 1
        fault.evidence.append(Evidence(time.monotonic(), worker.said(name, "refused")))
    assert "does not exist in epoch" in worker.said(name, "refused")
    assert [one.decode_worker == worker.worker_id for one in asked.history.attempts] == [
        True,
        False,
    ]
