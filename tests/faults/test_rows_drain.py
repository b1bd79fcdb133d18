"""Workers and routers that are told to end, and a scale-down: rows 20 and 21."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from faults.checkers import Invariant
from faults.fleet import Fleet, record
from faults.fleet_worker import FleetWorker
from faults.history import BrokeOff, Evidence
from faults.launcher import FleetLauncher
from faults.prompts import LONG, OTHER, PROMPT, tokens

from kvrelay.wire.cluster import ClusterServiceStub
from kvrelay.wire.cluster import pb as cluster_pb

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

LENGTH = 200  # tokens
SHORT = 60  # tokens of a prompt that is not handed over
GRACE_S = 0.3


async def drains(*workers: FleetWorker) -> FleetWorker:
    """The first of them that says so."""
    async with asyncio.timeout(30):
        while True:
            for worker in workers:
                if (await worker.sample()).state == "draining":
                    return worker
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("times", [1, 2])
async def test_row_20_decode_worker_is_told_to_end(fleet: Fleet, times: int) -> None:
    """Once: what it runs ends there. Twice: it moves at once. The client sees neither."""
    await fleet.learn(PROMPT, max_tokens=LENGTH)
    async with fleet.case(Invariant.TOKENS, Invariant.ANSWER, Invariant.BLOCKS) as case:
        asked = fleet.ask(case, "row-20!hold@sampled:5", PROMPT, max_tokens=LENGTH)
        worker = await fleet.reached(asked.history.request_id, "sampled:5")
        fault = record(case, "SIGTERM", worker)
        os.kill(worker.pid, signal.SIGTERM)
        await drains(worker)
        if times == 2:
            os.kill(worker.pid, signal.SIGTERM)
        else:
            fleet.let_go(worker)
        history = await asked.ended()
        await fleet.until(lambda: not worker.alive, f"{worker.worker_id} has ended")
        fault.evidence.append(Evidence(time.monotonic(), f"wait status {worker.status}"))
    assert worker.status == 0
    assert len(history.attempts) == times


async def test_row_20_prefill_worker_is_told_to_end(fleet: Fleet) -> None:
    """In the middle of a prompt, which it computes and hands over before it ends."""
    await fleet.learn(LONG, OTHER)
    async with fleet.case(Invariant.TOKENS, Invariant.ANSWER, Invariant.BLOCKS) as case:
        asked = fleet.ask(case, "row-20!stop@chunk", LONG)
        worker = await fleet.reached(asked.history.request_id, "chunk")
        await fleet.until(lambda: worker.frozen, f"{worker.worker_id} is stopped")
        fault = record(case, "SIGTERM", worker)
        os.kill(worker.pid, signal.SIGTERM)
        fleet.thaw(worker)
        await drains(worker)
        fleet.ask(case, "beside", OTHER, bystander=True)
        history = await asked.ended()
        await fleet.until(lambda: not worker.alive, f"{worker.worker_id} has ended")
        fault.evidence.append(Evidence(time.monotonic(), f"wait status {worker.status}"))
    assert (worker.pool, worker.status) == ("prefill", 0)
    assert [one.prefill_worker for one in history.attempts] == [worker.worker_id]


async def test_row_20_what_is_left_when_the_drain_is_over_migrates(fleet: Fleet) -> None:
    await fleet.learn(PROMPT, OTHER, max_tokens=LENGTH)
    hasty = await fleet.replace(fleet.pool("decode")[0], grace_s=GRACE_S)
    async with fleet.case(Invariant.TOKENS, Invariant.ANSWER, Invariant.BLOCKS) as case:
        asked = [
            fleet.ask(case, "row-20!hold@sampled:5", prompt, max_tokens=LENGTH)
            for prompt in (PROMPT, OTHER)
        ]
        at = [await fleet.reached(one.history.request_id, "sampled:5") for one in asked]
        assert hasty in at, [one.worker_id for one in at]
        for worker in at:
            if worker is not hasty:
                fleet.let_go(worker)
        fault = record(case, "SIGTERM, and less time than what runs needs", hasty)
        os.kill(hasty.pid, signal.SIGTERM)
        histories = [await one.ended() for one in asked]
        await fleet.until(lambda: not hasty.alive, f"{hasty.worker_id} has ended")
        fault.evidence.append(Evidence(time.monotonic(), f"wait status {hasty.status}"))
    assert hasty.status == 0
    outcomes = [[attempt.outcome for attempt in one.attempts] for one in histories]
    assert sorted(outcomes, key=len) == [
        ["finished"],
        [f"{hasty.worker_id} was drained", "finished"],
    ]


@pytest.mark.parametrize("times", [1, 2])
async def test_row_20_router_is_told_to_end(fleet: Fleet, times: int) -> None:
    """Once: streams end there, and who comes later is sent to another. Twice: streams go on at
    another, too.
    """
    await fleet.learn(PROMPT, max_tokens=LENGTH)
    await fleet.learn(OTHER)
    first = fleet.router
    both = first, await fleet.add_router()
    await fleet.complete()
    async with fleet.case(Invariant.TOKENS, Invariant.ANSWER, Invariant.BLOCKS) as case:
        asked = fleet.ask(case, "row-20!hold@sampled:15", PROMPT, max_tokens=LENGTH, routers=both)
        worker = await fleet.reached(asked.history.request_id, "sampled:15")
        await asked.tokens(10)
        fault = record(case, "SIGTERM to the router")
        first.child.process.send_signal(signal.SIGTERM)
        await fleet.until(lambda: '"draining"' in first.log.read_text(), "the router drains")
        if times == 2:
            first.child.process.send_signal(signal.SIGTERM)
        fleet.let_go(worker)
        late = await fleet.ask(case, "row-20-late", OTHER, routers=both).ended()
        history = await asked.ended()
        code = await first.child.process.wait()
        fault.evidence.append(Evidence(time.monotonic(), f"exit code {code}"))
    assert code == 0
    assert [
        sum(isinstance(event, BrokeOff) for event in one.events) for one in (history, late)
    ] == [times - 1, 1]


async def test_row_21_scale_down_picks_a_worker_that_holds_leases_and_streams(
    launcher: FleetLauncher,
) -> None:
    """Each decode worker has a stream, and a lease whose KV is kept back, until one of the two
    drains.
    """
    fleet = launcher.fleet
    streamed, leased = (
        [tokens(length, length + number) for number in range(2)] for length in (SHORT, 140)
    )
    await fleet.learn(*streamed, *leased)
    async with fleet.case(Invariant.TOKENS, Invariant.ANSWER, Invariant.BLOCKS) as case:
        for worker in fleet.pool("decode"):
            worker.handoffs.part()
        asked = [fleet.ask(case, "row-21-lease", prompt) for prompt in leased]
        for one in asked:
            await one.tokens(1)
        asked += [fleet.ask(case, "row-21!hold@joined", prompt) for prompt in streamed]
        both = [await fleet.reached(one.history.request_id, "joined") for one in asked[2:]]
        assert [(one.busy, one.leases) for one in [await worker.sample() for worker in both]] == [
            (2, 1)
        ] * 2
        await ClusterServiceStub(fleet.router.admin).SetPoolSize(
            cluster_pb.SetPoolSizeRequest(decode=1)
        )
        leaver = await drains(*both)
        held = await leaver.sample()
        fault = record(case, "scale-down", leaver)
        if held.busy == 2 and held.leases == 1:
            fault.evidence.append(
                Evidence(held.at, f"{leaver.worker_id} drains with a stream and a lease")
            )
        for worker in both:
            worker.handoffs.heal()
            fleet.let_go(worker)
        histories = [await one.ended() for one in asked]
        await fleet.until(lambda: not leaver.alive, f"{leaver.worker_id} has ended")
    assert leaver.status == 0
    assert [len(one.attempts) for one in histories] == [1] * 4
    assert len([one for one in histories if one.attempts[0].decode_worker == leaver.worker_id]) == 2
    await launcher.resize(decode=2)
