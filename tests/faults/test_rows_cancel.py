"""Clients that leave, and workers that never report: rows 4, 5, 6 and 9."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from faults.cancels import ENDLESS, STATES, cancelled_in
from faults.checkers import Invariant
from faults.fleet import Fleet, record
from faults.history import Evidence
from faults.prompts import OTHER, PROMPT, tokens

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

TIMES = 20  # of each state; benchmarks/chaos.py does it a thousand times and measures
# What the router's record says of it: the phase that it ended in, and how many tokens its client
# may have had.
AS_RECORDED = {
    "queued": ("queue", range(1)),
    "reserved": ("prefill", range(1)),
    "prefilling": ("prefill", range(1)),
    "handing off": ("decode", range(1, 2)),
    "waiting to decode": ("decode", range(1, 2)),
    "decoding": ("decode", range(4, ENDLESS)),
    "finishing": ("decode", range(2, 3)),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.sweep(2)
async def test_row_04_cancelled_in_each_state(fleet: Fleet, state: str) -> None:
    async with fleet.case(Invariant.BLOCKS) as case:
        fault = record(case, f"cancelled while {state}")
        names = [one.request_id async for one in cancelled_in(fleet, case, state, TIMES)]
        rows = await recorded(fleet, names)
        phase, counts = AS_RECORDED[state]
        # A complete answer is held for a short time, and a busy router may see its end first.
        complete = {name for name in names if rows[name]["state"] == "length"}
        assert not complete or (state == "finishing" and len(complete) < TIMES / 2)
        for name in names:
            row = rows[name]
            if name in complete:
                continue
            assert (row["state"], row["phases"][-1][0]) == ("cancelled", phase), row
            assert row["tokens"] in counts, row
            fault.evidence.append(
                Evidence(time.monotonic(), f"{name} was cancelled in phase {phase}")
            )
        assert len(names) == TIMES
        assert {one.end.status for one in case.requests} == {"CANCELLED"}


async def recorded(fleet: Fleet, names: list[str]) -> dict[object, dict[str, Any]]:
    """What the router's status page shows of these requests, once it shows all of them."""
    async with (
        httpx.AsyncClient(base_url=fleet.router.endpoints.http, timeout=60) as http,
        asyncio.timeout(60),
    ):
        while True:
            rows = {row["id"]: row for row in (await http.get("/status.json")).json()["requests"]}
            if all(name in rows and not rows[name]["live"] for name in names):
                return rows
            await asyncio.sleep(0.05)


async def test_row_05_cancelled_between_the_end_of_prefill_and_the_commit(fleet: Fleet) -> None:
    """Blocks are back before the lease ends, and the commit that was on its way is for nobody."""
    async with fleet.case(Invariant.BLOCKS) as case:
        asked = fleet.ask(case, "row-05!hold@committing!tell@committed!tell@joined", PROMPT)
        name = asked.history.request_id
        worker = await fleet.reached(name, "committing")
        await asked.tokens(1)
        fault = record(case, "cancelled before the commit")
        fault.evidence.append(Evidence(asked.cancel(), f"{worker.worker_id} had the commit"))
        history = await asked.ended()
        await fleet.at_rest(worker)  # before what is held there goes on
    assert (history.end.status, len(history.token_ids)) == ("CANCELLED", 1)
    assert not worker.was_at(name, "committed")
    assert not worker.was_at(name, "joined")


async def test_row_06_decode_aborts_and_prefill_never_reports(fleet: Fleet) -> None:
    """It is stopped with the first token in its hand; when it goes on, its blocks come back too."""
    await fleet.learn(PROMPT)
    async with fleet.case(Invariant.ANSWER, Invariant.BLOCKS, Invariant.TOKENS) as case:
        asked = fleet.ask(case, "row-06!stop@token:0", PROMPT)
        silent = await fleet.reached(asked.history.request_id, "token:0")
        await fleet.stopped(case, silent)
        history = await asked.ended()
        first = fleet.workers[history.attempts[0].decode_worker]
        assert (await first.sample()).at_rest, "decode's blocks are back while prefill is silent"
        assert silent.frozen
        fleet.thaw(silent)
    assert [one.prefill_worker == silent.worker_id for one in history.attempts] == [True, False]


async def test_row_09_prefill_refuses(fleet: Fleet) -> None:
    """With its own error, at once: nothing is tried again."""
    await fleet.learn(OTHER)
    async with fleet.case(Invariant.BLOCKS) as case:
        asked = fleet.ask(case, "row-09!tell@reserved!tell@unstarted", tokens(2100, 17))
        fleet.ask(case, "beside", OTHER, bystander=True)
        history = await asked.ended()
        fault = record(case, "a prompt that is too long for the prefill worker")
        decode = await fleet.reached(history.request_id, "reserved")
        fault.evidence.append(
            Evidence(history.end.at, f"{decode.worker_id} had reserved blocks, and it was refused")
        )
    assert history.end.status == "INVALID_ARGUMENT"
    assert "2100 tokens do not fit into the context" in history.end.message
    assert not [
        one
        for worker in fleet.alive
        for one in worker.reached
        if one.request_id == history.request_id
    ][1:]
