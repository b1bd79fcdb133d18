"""Polls and refusals: what they may cost the event loop, whoever makes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.router_harness import RouterHarness, running_router
from support.tokens import Tokens, bearer

import kvrelay
import router.api.grpc.auth
import router.api.grpc.listener
import router.api.http.connections.pacing
import router.core.queueing.request_pace
import router.frontend.waiting_room
import router.observability.exposition
from kvrelay.clock import ManualClock
from kvrelay.wire.inference import InferenceServiceStub, pb
from router.core.queueing.request_pace import BURST, MAX_WAIT_S, PER_SECOND, Pace
from router.frontend.waiting_room import WaitingRoom
from router.sibling_processes import Place

gaps = st.lists(st.floats(0, 0.1), min_size=1, max_size=600)


@given(gaps)
def test_a_tenant_is_answered_at_its_rate_whatever_it_does(between: list[float]) -> None:
    """Requests that wait as they are told end no faster than the rate, but for the burst."""
    pace, now, ends = Pace(), 0.0, []
    for gap in between:
        now += gap
        ends.append(now + pace.wait_s("a", now))
        pace.charge("a", now)
    for count, end in enumerate(sorted(ends), start=1):
        allowed = BURST + PER_SECOND * end + 2
        assert count <= allowed or pace.wait_s("a", now) == MAX_WAIT_S


@given(gaps)
def test_nobody_waits_for_another_and_debts_are_forgiven(between: list[float]) -> None:
    pace, now = Pace(), 0.0
    for gap in between:
        now += gap
        pace.charge("a", now)
        assert pace.wait_s("b", now) == 0
    later = now + MAX_WAIT_S + BURST / PER_SECOND
    assert pace.wait_s("a", later) == 0


def test_tenants_that_are_gone_are_forgotten() -> None:
    pace = Pace()
    for _ in range(2000):
        pace.charge("a", 0.0)
    assert pace.wait_s("a", 0.0) == MAX_WAIT_S
    pace.keep({"b"})
    assert pace.wait_s("a", 0.0) == 0


class Endpoints:
    def __init__(
        self, running: RouterHarness, http: httpx.AsyncClient, hostile: str, victim: str
    ) -> None:
        self.running = running
        self.http = http
        self.hostile = hostile
        self.victim = victim

    async def polls(
        self, token: str, number: int, path: str = "/metrics"
    ) -> list[asyncio.Task[httpx.Response]]:
        """Begun, and all at the router."""
        tasks = [
            asyncio.create_task(self.http.get(path, headers=bearer(token))) for _ in range(number)
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks


@pytest.fixture
async def endpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Endpoints]:
    """With a pace at which a fourth request waits for longer than any test takes."""
    for name, value in (("BURST", 3.0), ("PER_SECOND", 1e-6), ("MAX_WAIT_S", 1e6)):
        monkeypatch.setattr(router.core.queueing.request_pace, name, value)
    tokens = Tokens(tmp_path / "tokens.yaml")
    hostile, victim = tokens.add("hostile"), tokens.add("victim")
    limits = httpx.Limits(max_connections=None)
    async with (
        running_router(tokens_file=tokens.path) as running,
        httpx.AsyncClient(base_url=running.http, timeout=30, limits=limits) as http,
    ):
        yield Endpoints(running, http, hostile, victim)


async def ended(tasks: Sequence[asyncio.Task[Any]], number: int) -> None:
    async with asyncio.timeout(60):
        while sum(task.done() for task in tasks) < number:
            await asyncio.sleep(0.01)


async def cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def only_the_hostile_tenant_waits(endpoints: Endpoints) -> None:
    waiting = asyncio.create_task(endpoints.http.get("/version", headers=bearer(endpoints.hostile)))
    for _ in range(3):
        (calm,) = await endpoints.polls(endpoints.victim, 1, "/version")
        assert (await calm).status_code == 200
    assert not waiting.done()
    await cancelled([waiting])


@pytest.mark.parametrize("path", ["/metrics", "/status.json", "/v1/models", "/nothing", "/version"])
async def test_polls_wait_for_their_own_tenant_only(endpoints: Endpoints, path: str) -> None:
    polls = await endpoints.polls(endpoints.hostile, 12, path)
    await ended(polls, 3)
    (calm,) = await endpoints.polls(endpoints.victim, 1)
    assert (await calm).status_code == 200
    assert sum(task.done() for task in polls) in (3, 4)  # the fourth owes nothing yet when it comes
    await cancelled(polls)


async def test_refused_requests_wait_answers_do_not(endpoints: Endpoints) -> None:
    good = {"model": "demo", "prompt": [11, 12], "max_tokens": 2}
    for _ in range(8):
        answer = await endpoints.http.post(
            "/v1/completions", json=good, headers=bearer(endpoints.hostile)
        )
        assert answer.status_code == 200
    refusals = [
        asyncio.create_task(
            endpoints.http.post("/v1/completions", json={}, headers=bearer(endpoints.hostile))
        )
        for _ in range(4)
    ]
    assert [(await one).status_code for one in refusals] == [400] * 4
    waiting = asyncio.create_task(
        endpoints.http.post("/v1/completions", json=good, headers=bearer(endpoints.hostile))
    )
    for _ in range(3):  # in which time an answer that does not wait would have come
        answer = await endpoints.http.post(
            "/v1/completions", json=good, headers=bearer(endpoints.victim)
        )
        assert answer.status_code == 200
    assert not waiting.done()
    await cancelled([waiting])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_clients_that_leave_before_an_answer_are_charged(
    endpoints: Endpoints, protocol: str
) -> None:
    endpoints.running.workers["decode-0"].may_step.clear()
    body = {"model": "demo", "prompt": [11, 12], "max_tokens": 2}
    workers = endpoints.running.workers["decode-0"].worker
    async with grpc.aio.insecure_channel(endpoints.running.grpc) as channel:
        stub = InferenceServiceStub(channel)
        for _ in range(4):
            if protocol == "http":
                asked: Any = asyncio.create_task(
                    endpoints.http.post(
                        "/v1/completions", json=body, headers=bearer(endpoints.hostile)
                    )
                )
            else:
                asked = asyncio.ensure_future(
                    stub.Generate(
                        pb.GenerateRequest(token_ids=[11, 12]),
                        metadata=(("authorization", f"Bearer {endpoints.hostile}"),),
                    ).read()
                )
            async with asyncio.timeout(60):
                while not workers.sequences:
                    await asyncio.sleep(0.01)
                asked.cancel()
                await asyncio.wait([asked])
                while workers.sequences:
                    await asyncio.sleep(0.01)
    await only_the_hostile_tenant_waits(endpoints)


async def test_an_error_of_many_choices_is_charged_for_each(endpoints: Endpoints) -> None:
    body = {"model": "demo", "prompt": [11, 12], "max_tokens": 2, "n": 4, "seed": 1}
    refused = await endpoints.http.post(
        "/v1/completions",
        json=body | {"logit_bias": {"9999": 1}},
        headers=bearer(endpoints.hostile),
    )
    assert refused.status_code == 400
    await only_the_hostile_tenant_waits(endpoints)


async def test_grpc_is_paced_as_well(endpoints: Endpoints) -> None:
    async with grpc.aio.insecure_channel(endpoints.running.grpc) as channel:
        stub = InferenceServiceStub(channel)
        as_hostile = (("authorization", f"Bearer {endpoints.hostile}"),)
        for _ in range(4):
            await stub.ListModels(pb.ListModelsRequest(), metadata=as_hostile)
        waiting = stub.ListModels(pb.ListModelsRequest(), metadata=as_hostile)
        as_victim = (("authorization", f"Bearer {endpoints.victim}"),)
        await stub.ListModels(pb.ListModelsRequest(), metadata=as_victim)
        assert not waiting.done()
        waiting.cancel()


async def test_refused_calls_are_charged_on_grpc(endpoints: Endpoints) -> None:
    as_hostile = (("authorization", f"Bearer {endpoints.hostile}"),)
    async with grpc.aio.insecure_channel(endpoints.running.grpc) as channel:
        stub = InferenceServiceStub(channel)
        for _ in range(4):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Generate(pb.GenerateRequest(), metadata=as_hostile).read()
    await only_the_hostile_tenant_waits(endpoints)


async def test_strangers_wait_for_each_other_and_hold_few_connections(
    endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.frontend.waiting_room, "MAX_STRANGERS", 2)
    strangers = await endpoints.polls("kvr_unknown", 12)
    await ended(strangers, 10)  # all but the two that wait
    answers = [task.result() for task in strangers if task.done()]
    assert {one.status_code for one in answers} == {401}
    assert sum(one.headers.get("connection") == "close" for one in answers) >= 6
    (calm,) = await endpoints.polls(endpoints.victim, 1)
    assert (await calm).status_code == 200
    await cancelled(strangers)


async def test_strangers_on_grpc_wait_in_the_same_room(
    endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.frontend.waiting_room, "MAX_STRANGERS", 2)
    async with grpc.aio.insecure_channel(endpoints.running.grpc) as channel:
        stub = InferenceServiceStub(channel)

        async def refused() -> grpc.StatusCode:
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await stub.ListModels(
                    pb.ListModelsRequest(), metadata=(("authorization", "Bearer kvr_unknown"),)
                )
            return info.value.code()

        strangers = [asyncio.create_task(refused()) for _ in range(12)]
        await ended(strangers, 10)  # all but the two that wait
        assert {one.result() for one in strangers if one.done()} == {
            grpc.StatusCode.UNAUTHENTICATED
        }
        answer = await endpoints.http.get("/metrics", headers=bearer("kvr_unknown"))
        assert (answer.status_code, answer.headers["connection"]) == (401, "close")
        as_victim = (("authorization", f"Bearer {endpoints.victim}"),)
        await stub.ListModels(pb.ListModelsRequest(), metadata=as_victim)
        assert sum(one.done() for one in strangers) == 10
        await cancelled(strangers)


async def test_a_stranger_who_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BURST", 0.0), ("PER_SECOND", 1e-6), ("MAX_WAIT_S", 1e6)):
        monkeypatch.setattr(router.core.queueing.request_pace, name, value)
    monkeypatch.setattr(router.frontend.waiting_room, "MAX_STRANGERS", 2)
    waiting_room = WaitingRoom(ManualClock())
    assert await waiting_room.stranger()
    waiting = [asyncio.create_task(waiting_room.stranger()) for _ in range(3)]
    await ended(waiting, 1)
    assert [one.result() for one in waiting if one.done()] == [False]
    await cancelled(waiting)
    waiting = [asyncio.create_task(waiting_room.stranger()) for _ in range(3)]
    await ended(waiting, 1)
    assert sum(one.done() for one in waiting) == 1
    await cancelled(waiting)


def test_all_calls_of_64_connections_wait() -> None:
    """Those that are refused at once come again at once."""
    most = router.api.grpc.auth.MAX_CALLS + router.frontend.waiting_room.MAX_POLLS
    assert most >= 64 * router.api.grpc.listener.MAX_STREAMS


async def test_few_polls_of_a_tenant_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each occupies memory, and calls of many connections are many."""
    for name, value in (("BURST", 0.0), ("PER_SECOND", 1e-6), ("MAX_WAIT_S", 1e6)):
        monkeypatch.setattr(router.core.queueing.request_pace, name, value)
    monkeypatch.setattr(router.frontend.waiting_room, "MAX_POLLS", 2)
    waiting_room = WaitingRoom(ManualClock())
    await waiting_room.tenant("a", poll=True)
    for name in "ab":
        waiting_room.refused(name)
        polls = [asyncio.create_task(waiting_room.tenant(name, poll=True)) for _ in range(5)]
        await ended(polls, 3)
        assert sum(one.done() for one in polls) == 3
        await cancelled(polls)


async def test_requests_that_wait_leave_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All at one moment, they would be refused in one round of the event loop."""
    waits: list[float] = []
    leaves = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await leaves.wait()

    monkeypatch.setattr(router.frontend.waiting_room.asyncio, "sleep", sleep)
    waiting_room = WaitingRoom(ManualClock())
    for _ in range(round(BURST) + 1):
        waiting_room.refused("a")
    for _ in range(2):
        waits.clear()
        waiting = [asyncio.create_task(waiting_room.tenant("a", poll=False)) for _ in range(100)]
        while len(waits) < len(waiting):
            await asyncio.wait(waiting, timeout=0)
        assert waits == pytest.approx([number / PER_SECOND for number in range(1, 101)])
        leaves.set()
        await asyncio.gather(*waiting)  # that they were served costs nothing
        leaves.clear()


async def test_no_tenant_takes_all_connections(
    endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.api.http.connections.pacing, "MAX_REQUESTS", 3)
    endpoints.running.workers["decode-0"].may_step.clear()
    body = {"model": "demo", "prompt": [11, 12], "max_tokens": 2}
    flying = [
        asyncio.create_task(
            endpoints.http.post("/v1/completions", json=body, headers=bearer(endpoints.hostile))
        )
        for _ in range(3)
    ]
    async with asyncio.timeout(60):
        while len(endpoints.running.workers["decode-0"].worker.sequences) < 3:
            await asyncio.sleep(0.01)
    refused = await endpoints.http.post(
        "/v1/completions", json=body, headers=bearer(endpoints.hostile)
    )
    assert refused.status_code == 429
    assert refused.json()["error"]["message"].startswith(
        "tenant hostile has 3 HTTP requests in progress"
    )
    endpoints.running.workers["decode-0"].may_step.set()
    assert [(await one).status_code for one in flying] == [200] * 3
    assert (
        await endpoints.http.post("/v1/completions", json=body, headers=bearer(endpoints.hostile))
    ).status_code == 200


async def test_no_tenant_has_all_calls(
    endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.api.grpc.auth, "MAX_CALLS", 3)
    worker = endpoints.running.workers["decode-0"]
    worker.may_step.clear()
    client = kvrelay.AsyncClient(
        endpoints.running.grpc, token=endpoints.hostile, retry=kvrelay.RetryPolicy(max_attempts=1)
    )
    async with client, asyncio.timeout(60):
        flying = [client.generate(token_ids=[11, 12], max_tokens=2) for _ in range(3)]
        answers = [asyncio.create_task(one.result()) for one in flying]
        while len(worker.worker.sequences) < 3:
            await asyncio.sleep(0.01)
        with pytest.raises(kvrelay.ResourceExhausted, match="has 3 gRPC calls in progress"):
            await client.generate(token_ids=[11, 12], max_tokens=2).result()
        worker.may_step.set()
        assert [len((await one).token_ids) for one in answers] == [2] * 3
    # A call that its client cancels ends, too.
    async with kvrelay.AsyncClient(endpoints.running.grpc, token=endpoints.hostile) as client:
        for _ in range(2 * 3):
            async with client.generate(token_ids=[11, 12], max_tokens=1000) as stream:
                await anext(stream)


@pytest.mark.parametrize("processes", [1, 2])
async def test_one_exposition_serves_all_who_ask_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processes: int
) -> None:
    """Also in a router of two processes, of which the other has ended."""
    place = Place(tmp_path, 0, processes) if processes > 1 else None
    monkeypatch.setattr(router.observability.exposition, "SPACING", 1e9)
    rendered = 0
    render = router.observability.exposition.generate_latest

    def counted(registry: router.observability.exposition.CollectorRegistry) -> bytes:
        nonlocal rendered
        rendered += 1
        return render(registry)

    monkeypatch.setattr(router.observability.exposition, "generate_latest", counted)
    async with (
        running_router(place=place) as running,
        httpx.AsyncClient(base_url=running.http, timeout=60) as http,
    ):
        answers = await asyncio.gather(*(http.get("/metrics") for _ in range(20)))
        assert len({one.content for one in answers}) == 1
    assert rendered == 2, "the series of the process, and those of the cluster"
