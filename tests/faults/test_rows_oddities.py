"""A worker that is slow, a clock that is wrong, a certificate that ends: row 26."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from faults.checkers import Invariant
from faults.client import Asking
from faults.fleet import Fleet, record, running_fleet
from faults.fleet_worker import Forks
from faults.history import Case, Evidence
from faults.points import JUMP_S
from faults.prompts import LONG, OTHER, PROMPT
from support.certificates import all_roles

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

SLOW = 10  # times
LENGTH = 150  # tokens: enough steps to tell
SHORT = timedelta(seconds=3)


@pytest.mark.long
async def test_row_26_a_worker_ten_times_as_slow(fleet: Fleet) -> None:
    """It is ejected: what comes later goes to the other one, but for a probe."""
    await fleet.learn(PROMPT, OTHER, max_tokens=LENGTH)
    await fleet.learn(OTHER)
    slow = await fleet.replace(fleet.pool("decode")[0], slow=SLOW)
    async with fleet.case(Invariant.TOKENS, Invariant.ANSWER, Invariant.DEADLINE) as case:
        fault = record(case, f"{slow.worker_id} is {SLOW} times as slow")
        reason = ""
        async with asyncio.timeout(150):
            # On a busy machine, one round may not tell the two workers apart.
            while not reason:
                asked = [
                    fleet.ask(case, "row-26", prompt, max_tokens=LENGTH, deadline_s=60.0)
                    for prompt in (PROMPT, OTHER)
                ]
                answers = asyncio.gather(*(one.ended() for one in asked))
                while not (reason := await unfit(fleet, slow.worker_id)) and not answers.done():
                    await asyncio.sleep(0.1)
                await answers
        fault.evidence.append(Evidence(time.monotonic(), reason))
        later = [
            await fleet.ask(case, "row-26-later", OTHER, deadline_s=60.0).ended() for _ in range(6)
        ]
    assert "times as slow as the median of the pool's others" in reason
    assert sum(one.attempts[0].decode_worker == slow.worker_id for one in later) <= 1
    await fleet.replace(slow)


async def unfit(fleet: Fleet, worker_id: str) -> str:
    """Why the router gives it no new work."""
    status = await fleet.router.status()
    return next(
        one.unfit for pool in status.pools for one in pool.workers if one.worker_id == worker_id
    )


async def test_row_26_clocks_five_minutes_apart(fleet: Fleet) -> None:
    """A decode worker's clock is set five minutes forward when it has just granted a lease, and the
    lease lasts.
    """
    await fleet.learn(LONG, OTHER)
    async with fleet.case(
        Invariant.TOKENS, Invariant.ANSWER, Invariant.BLOCKS, Invariant.DEADLINE
    ) as case:
        fault = record(case, "a clock that is set forward")
        asked = fleet.ask(case, "row-26!jump@reserved!hold1.0@arrived", LONG, deadline_s=60.0)
        name = asked.history.request_id
        worker = await fleet.reached(name, "reserved")
        if (ahead := float(worker.said(name, "reserved")) - time.time()) > 0.9 * JUMP_S:
            fault.evidence.append(
                Evidence(time.monotonic(), f"{worker.worker_id} is {ahead:.0f} s ahead")
            )
        await fleet.reached(name, "arrived")
        histories = [await asked.ended()]
        # The worker has the KV of this prompt, so requests for it go to no other one alone.
        later = [fleet.ask(case, "row-26", LONG) for _ in range(4)]
        histories += [await one.ended() for one in later]
    assert [len(one.attempts) for one in histories] == [1] * 5
    assert worker.worker_id in {one.attempts[0].decode_worker for one in histories[1:]}


async def test_row_26_a_certificate_that_ends_in_mid_run(forks: Forks, tmp_path: Path) -> None:
    """Of workers and router alike. What is connected goes on; what connects is told why it
    cannot.
    """
    made = all_roles(tmp_path, ("router", "worker"))
    alone = {"replicas": 1}
    async with running_fleet(
        forks, prefill=alone, decode=alone, security=made.security.model_dump()
    ) as fleet:
        await fleet.learn(PROMPT, OTHER)
        async with fleet.case(Invariant.TOKENS, Invariant.ANSWER, Invariant.BLOCKS) as case:
            asked = fleet.ask(case, "row-26!hold@joined", PROMPT)
            worker = await fleet.reached(asked.history.request_id, "joined")
            fault = record(case, "certificates that end")
            for role in ("router", "worker"):
                made.issue(role, lifetime=SHORT)
            fault.evidence.append(Evidence(time.monotonic(), await ended(fleet)))
            fleet.let_go(worker)
            await asked.ended()

            async with fleet.client_channel(fleet.router.endpoints.grpc) as channel:
                stranger = await anew(fleet, case, channel).ended()
            moved = await fleet.ask(case, "row-26", OTHER).ended()
            for role in ("router", "worker"):
                made.issue(role)
            async with fleet.client_channel(fleet.router.endpoints.grpc) as channel:
                again = await anew(fleet, case, channel).ended()
    assert (stranger.end.status, stranger.token_ids) == ("UNAVAILABLE", ())
    assert stranger.end.message.endswith("certificate has expired")
    assert "certificate has expired" in moved.attempts[0].outcome, (
        "the prefill worker connects for each certificate"
    )
    assert (moved.attempts[-1].path, again.end.status) == ("local", "length")


async def ended(fleet: Fleet) -> str:
    """What the status says of certificates, once all of them have ended."""
    async with asyncio.timeout(60):
        while True:
            status = await fleet.router.status()
            notes = [one.load.certificate_note for pool in status.pools for one in pool.workers]
            notes.append(status.router.certificate_note)
            if all(" expired at " in one for one in notes):
                return notes[-1]
            await asyncio.sleep(0.1)


def anew(fleet: Fleet, case: Case, channel: grpc.aio.Channel) -> Asking:
    """A request of a client that connects just now."""
    return fleet.ask(case, "row-26-anew", OTHER, routers=(replace(fleet.router, channel=channel),))
