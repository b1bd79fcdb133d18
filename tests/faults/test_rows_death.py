"""Workers that die: rows 1, 2, 3, 15, 16 and 24."""

from __future__ import annotations

import signal

import pytest
from faults.checkers import Invariant
from faults.fleet import Fleet, record
from faults.history import Evidence
from faults.prompts import LONG, OTHER, PROMPT, SEEDED, tokens

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

TOKENS = 48
POISON = tokens(180, 24)  # of no other row: it stays in quarantine


@pytest.mark.parametrize(
    ("at", "sampling"),
    [(1, {}), (TOKENS // 2, SEEDED), (TOKENS - 1, {})],
    ids=["first", "middle", "last but one"],
)
async def test_row_01_decode_worker_killed_at_a_token(
    fleet: Fleet, at: int, sampling: dict[str, float]
) -> None:
    """It is stopped when it is about to send that token, so the client has none after it."""
    await fleet.learn(PROMPT, **sampling)
    await fleet.learn(OTHER)
    async with fleet.case(Invariant.TOKENS, Invariant.ANSWER, Invariant.BLOCKS) as case:
        asked = fleet.ask(case, f"row-01!stop@token:{at}", PROMPT, **sampling)
        worker = await fleet.reached(asked.history.request_id, f"token:{at}")
        await asked.tokens(at)
        await fleet.kill(case, worker)
        fleet.ask(case, "beside", OTHER, bystander=True)
        history = await asked.ended()
    assert [one.at for one in history.received if one.index < at][-1] < case.faults[0].evidence[
        0
    ].at
    assert [one.decode_worker == worker.worker_id for one in history.attempts] == [True, False]


async def test_row_02_prefill_worker_killed_while_it_computes(fleet: Fleet) -> None:
    await fleet.learn(LONG, OTHER)
    async with fleet.case(Invariant.ANSWER, Invariant.BLOCKS) as case:
        asked = fleet.ask(case, "row-02!stop@chunk", LONG)
        worker = await fleet.reached(asked.history.request_id, "chunk")
        assert worker.pool == "prefill"
        fleet.ask(case, "beside", OTHER, bystander=True)
        await fleet.kill(case, worker)
        history = await asked.ended()
    assert history.attempts[0].prefill_worker == worker.worker_id
    assert len(history.attempts) == 2


async def test_row_03_prefill_worker_killed_in_mid_transfer(fleet: Fleet) -> None:
    """The decode worker has written the first blocks when the one that sends them dies."""
    await fleet.learn(LONG, OTHER)
    async with fleet.case(Invariant.ANSWER, Invariant.BLOCKS, Invariant.OWN_KV) as case:
        asked = fleet.ask(case, "row-03!hold@arrived!hold@chunk", LONG)
        await fleet.reached(asked.history.request_id, "chunk")
        decode = await fleet.reached(asked.history.request_id, "arrived")
        assert (decode.pool, asked.num_tokens) == ("decode", 0)
        fleet.ask(case, "beside", OTHER, bystander=True)
        name = asked.history.request_id
        sender = next(one for one in fleet.pool("prefill") if one.was_at(name, "chunk"))
        await fleet.kill(case, sender)
        history = await asked.ended()
    assert len(history.attempts) == 2
    assert history.attempts[0].prefill_worker == sender.worker_id


async def test_row_15_all_decode_workers_dead(fleet: Fleet) -> None:
    """What was streaming waits for its deadline, and then the client is told when to come back.
    A worker that is stopped may have tokens before the tenth that it had not sent.
    """
    await fleet.learn(PROMPT)
    async with fleet.case(Invariant.DEADLINE, Invariant.BLOCKS) as case:
        # Otherwise a slow machine could take the stopped worker for dead before the others are.
        await fleet.kill(case, *fleet.pool("decode")[1:])
        asked = fleet.ask(case, "row-15!stop@token:10", PROMPT, router_deadline=True)
        last = await fleet.reached(asked.history.request_id, "token:10")
        await asked.tokens(1)
        await fleet.kill(case, *fleet.pool("decode"))
        late = fleet.ask(case, "row-15-late", OTHER, router_deadline=True)
        ends = [(await one.ended()).end for one in (asked, late)]
    assert not last.alive
    for end in ends:
        assert end.status == "UNAVAILABLE", end
        assert end.retry_after_s, end
        assert "decode worker" in end.message
    assert 1 <= asked.num_tokens <= 10


async def test_row_16_all_prefill_workers_dead(fleet: Fleet) -> None:
    prompts = [LONG, tokens(600, 21), tokens(500, 22)]
    await fleet.learn(*prompts, max_tokens=8)
    async with fleet.case(Invariant.ANSWER, Invariant.BLOCKS, Invariant.TOKENS) as case:
        names = ["row-16!stop@chunk", "row-16", "row-16"]
        asked = [
            fleet.ask(case, name, prompt, max_tokens=8)
            for name, prompt in zip(names, prompts, strict=True)
        ]
        await fleet.reached(asked[0].history.request_id, "chunk")
        await fleet.kill(case, *fleet.pool("prefill"))
        histories = [await one.ended() for one in asked]
    moved = [one for one in histories if len(one.attempts) > 1]
    assert moved
    for history in moved:
        assert (history.attempts[-1].path, history.attempts[-1].prefill_worker) == ("local", "")


async def test_row_24_a_request_that_crashes_its_worker_every_time(fleet: Fleet) -> None:
    """Two workers die of it; it is not given a third, nor is its like, and who asked beside it has
    an answer.
    """
    await fleet.learn(OTHER)
    async with fleet.case(Invariant.TOKENS, Invariant.ANSWER, Invariant.BLOCKS) as case:
        asked = fleet.ask(case, "row-24!die@unstarted*", POISON)
        beside = [fleet.ask(case, "beside", OTHER, bystander=True) for _ in range(3)]
        history = await asked.ended()
        await fleet.complete()  # the dead are replaced, as they always are
        for one in beside:
            await one.ended()
        again = await fleet.ask(case, "row-24-again", POISON).ended()
        dead = [
            one for one in fleet.workers.values() if one.was_at(history.request_id, "unstarted")
        ]
        fault = record(case, "a request that kills", *dead)
        for one in dead:
            fault.evidence.append(
                Evidence(history.end.at, f"wait status of {one.worker_id}: {one.status}")
            )
    assert history.end.status == "INTERNAL"
    assert "2 workers crashed" in history.end.message
    assert [one.status for one in dead] == [signal.SIGKILL] * 2
    assert (again.end.status, again.token_ids) == ("FAILED_PRECONDITION", ())
    assert "quarantine" in again.end.message
