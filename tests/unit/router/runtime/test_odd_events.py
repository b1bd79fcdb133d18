"""Whatever a worker of another version says of one request, the other streams of its session go
on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from support.fake_worker import FakeWorkerServer, answer, worker_info
from support.router_harness import RouterHarness, inference_stub, running_router
from support.wire_mutations import UNKNOWN, mutations
from write_wire_golden import example

from kvrelay.protocol_version import VERSION, Protocol
from kvrelay.wire import cluster
from kvrelay.wire.inference import pb as inference_pb
from kvrelay.wire.worker import Welcome, event_to_proto, pb
from kvrelay.worker_messages import Abort

PROMPT = (10, 11, 12)
TOKENS = 300  # of the bystander, which is given one after each odd event
KINDS = [field.name for field in pb.SessionResponse.DESCRIPTOR.fields if field.name != "welcome"]


def request(request_id: str, max_tokens: int) -> inference_pb.GenerateRequest:
    sampling = inference_pb.SamplingParams(max_tokens=max_tokens, seed=3)
    return inference_pb.GenerateRequest(request_id=request_id, token_ids=PROMPT, sampling=sampling)


def about(kind: str, request_id: str, attempt: int) -> pb.SessionResponse:
    """An event with all of its fields, about that attempt."""
    descriptor = pb.SessionResponse.DESCRIPTOR
    message = example(descriptor, descriptor.fields_by_name[kind])
    assert isinstance(message, pb.SessionResponse)
    for one in attempts_of(message, kind):
        one.request_id, one.attempt = request_id, attempt
    return message


def attempts_of(message: pb.SessionResponse, kind: str) -> list[Any]:
    """The parts of the event that are about an attempt."""
    if kind == "cache":
        return []
    body = getattr(message, kind)
    return list(body.sequences) if kind == "tokens" else [body]


class Bystander:
    """A stream beside those that odd things are said of."""

    def __init__(self, worker: FakeWorkerServer, call: Any) -> None:
        self._worker = worker
        self._call = call
        self._tokens: list[int] = []

    async def next(self) -> Message:
        async with asyncio.timeout(60):
            response = await self._call.read()
        assert response is not grpc.aio.EOF
        self._tokens += response.token_ids
        return response

    async def goes_on(self) -> None:
        """By a token. What the worker said before has then been heard, too."""
        self._worker.steps_left = 1
        self._worker.wake()
        await self.next()

    async def ends_well(self) -> None:
        """With the right answer, in its first attempt and on the worker's first session."""
        self._worker.steps_left = None
        self._worker.wake()
        while not (response := await self.next()).finish_reason:
            pass
        assert self._tokens == answer(PROMPT, 3, TOKENS)
        assert [one.outcome for one in response.ledger.attempts] == ["finished"]
        assert self._worker.sessions == 1


@asynccontextmanager
async def cluster_stub(target: str) -> AsyncIterator[cluster.ClusterServiceStub]:
    async with grpc.aio.insecure_channel(target) as channel:
        yield cluster.ClusterServiceStub(channel)


@asynccontextmanager
async def held() -> AsyncIterator[tuple[RouterHarness, FakeWorkerServer, Bystander]]:
    """A router with one worker that computes a step when it is told to, and a stream that has begun
    on it.
    """
    async with running_router(prefill=0, decode=1) as harness, inference_stub(harness.grpc) as stub:
        worker = harness.workers["decode-0"]
        worker.steps_left = 1
        bystander = Bystander(worker, stub.Generate(request("bystander", TOKENS)))
        await bystander.next()
        yield harness, worker, bystander


async def placed(worker: FakeWorkerServer, request_id: str) -> int:
    """The attempt by which the request came to the worker."""
    async with asyncio.timeout(30):
        while True:
            for name, attempt in worker.worker.sequences:
                if name == request_id:
                    return attempt
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sweep(2)
async def test_an_odd_event_is_its_own_requests_trouble(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "router.core.workers.worker_table.FULL_FOR_S", (0.001, 0.001)
    )  # after each that says that the worker is full
    async with held() as (harness, worker, bystander), inference_stub(harness.grpc) as stub:
        odd = list(mutations(about(kind, "victim", 1)))
        assert 20 < len(odd) < TOKENS - 1
        for number, (_, message) in enumerate(odd):
            name = f"victim-{number}"
            call = stub.Generate(request(name, 4))
            attempt = await placed(worker, name)
            for one in attempts_of(message, kind):
                one.request_id = one.request_id and name
                one.attempt = one.attempt and attempt
            worker.say_as_it_is(message)
            await bystander.goes_on()
            call.cancel()
        await bystander.ends_well()


async def test_an_event_that_cannot_be_read_ends_its_session_alone() -> None:
    """A text that is not UTF-8, as of a version in which the field has bytes."""
    failed = pb.SessionResponse.DESCRIPTOR.fields_by_name["failed"].number
    unreadable = bytes([failed << 3 | 2, 4, 0x22, 2, 0xFF, 0xFE])
    ended = asyncio.Event()

    async def session(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        await anext(requests)
        try:
            yield event_to_proto(Welcome("decode-9", 1)).SerializeToString()
            yield unreadable
            await asyncio.Event().wait()
        finally:
            ended.set()

    handler = grpc.stream_stream_rpc_method_handler(session)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("kvrelay.v1.WorkerService", {"Session": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with running_router(prefill=0) as router, inference_stub(router.grpc) as stub:
        router.registry.entries["decode-9"] = worker_info("decode-9", "decode", f"127.0.0.1:{port}")
        router.registry.announced.set()
        async with asyncio.timeout(60):
            await ended.wait()
        call = stub.Generate(request("after", 4))
        assert [token async for one in call for token in one.token_ids] == answer(PROMPT, 3, 4)
    await server.stop(None)


async def test_unknown_events_and_a_second_welcome_are_ignored() -> None:
    async with held() as (_, worker, bystander):
        for unknown in UNKNOWN:
            worker.say_as_it_is(pb.SessionResponse.FromString(unknown))
        worker.say_as_it_is(pb.SessionResponse(welcome=pb.Welcome(worker_id="decode-0", epoch=1)))
        await bystander.ends_well()


async def test_a_worker_hears_that_its_tokens_were_of_no_use() -> None:
    """Or it would go on with a sequence that nobody waits for."""
    async with held() as (harness, worker, bystander), inference_stub(harness.grpc) as stub:
        call = stub.Generate(request("victim", 4))
        attempt = await placed(worker, "victim")
        tokens = pb.SequenceTokens(request_id="victim", attempt=attempt, token_ids=[-1])
        worker.say_as_it_is(pb.SessionResponse(tokens=pb.TokenBatch(sequences=[tokens])))
        async with asyncio.timeout(30):
            while Abort("victim", attempt) not in worker.worker.commands:
                await asyncio.sleep(0.001)
        assert await placed(worker, "victim") > attempt, "it is tried again"
        call.cancel()
        await bystander.ends_well()


@pytest.mark.parametrize("by", ["the registry", "its welcome"])
async def test_a_worker_of_a_protocol_that_does_not_fit_is_shown_and_left_alone(by: str) -> None:
    async with held() as (harness, _, bystander):
        stranger = FakeWorkerServer("decode-7", "decode", {})
        future = Protocol(VERSION + 7, VERSION + 3, release="9.0")
        stranger.worker.info = replace(stranger.worker.info, protocol=future)
        said = (
            stranger.worker.info
            if by == "the registry"
            else replace(stranger.worker.info, protocol=Protocol())
        )
        harness.registry.entries["decode-7"] = said
        await stranger.start()
        async with cluster_stub(harness.admin) as admin, asyncio.timeout(30):
            while True:
                status = await admin.GetStatus(cluster.status_request())
                unfit = {one.worker_id: one.unfit for pool in status.pools for one in pool.workers}
                if unfit.get("decode-7"):
                    break
                await asyncio.sleep(0.05)
        assert "upgrade this end" in unfit["decode-7"], unfit
        assert "9.0" in unfit["decode-7"]
        assert stranger.sessions == (by == "its welcome"), "it is not asked again and again"
        await bystander.ends_well()
        await stranger.kill()


async def test_a_worker_with_another_vocabulary_is_shown_and_left_alone() -> None:
    async with held() as (harness, _, bystander):
        stranger = FakeWorkerServer("decode-7", "decode", {})
        await stranger.start()
        harness.registry.entries["decode-7"] = replace(
            stranger.worker.info, vocab_size=7, max_model_len=5
        )
        async with cluster_stub(harness.admin) as admin, asyncio.timeout(30):
            while True:
                status = await admin.GetStatus(cluster.status_request())
                unfit = {one.worker_id: one.unfit for pool in status.pools for one in pool.workers}
                if "vocabulary of 7" in unfit.get("decode-7", ""):
                    break
                await asyncio.sleep(0.05)
        assert not stranger.sessions
        await bystander.ends_well()
        await stranger.kill()
