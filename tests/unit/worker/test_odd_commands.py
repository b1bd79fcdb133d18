"""Whatever a router of another version asks for, the other sequences of its session go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc
import pytest
from google.protobuf.message import Message
from support.wire_mutations import UNKNOWN, mutations
from support.worker_harness import Session, workers
from unit.worker.test_relay import CONFIG, oracle, relay, spec
from write_wire_golden import example

from kvrelay.protocol_version import VERSION, Protocol
from kvrelay.wire.worker import Hello, WorkerServiceStub, command_to_proto, pb
from kvrelay.worker import session as worker_session
from kvrelay.worker_messages import Abort, RunLocal, TokenBatch

TOKENS = 12
CHUNK = 40  # odd commands beside one stream


def odd_commands(kind: str, request_id: str) -> list[Message]:
    """Each with an oddity; those that begin something are about a sequence that could be run."""
    descriptor = pb.SessionRequest.DESCRIPTOR
    message = cast(pb.SessionRequest, example(descriptor, descriptor.fields_by_name[kind]))
    body = getattr(message, kind)
    if kind in ("reserve", "prefill", "run_local"):
        body.spec.CopyFrom(
            command_to_proto(RunLocal(spec(request_id, max_tokens=2))).run_local.spec
        )
    found = []
    for number, (_, odd) in enumerate(mutations(message)):
        made = getattr(odd, kind)
        if kind in ("reserve", "prefill", "run_local") and made.spec.request_id == request_id:
            made.spec.request_id += str(number)
        found.append(odd)
    return found


async def answer(session: Session, request_id: str) -> list[int]:
    """The request's tokens up to its finish; what is said of others is passed over."""
    token_ids: list[int] = []
    while True:
        event = await session.event()
        assert getattr(event, "request_id", "") != request_id, event
        for one in event.sequences if isinstance(event, TokenBatch) else ():
            if one.request_id == request_id:
                token_ids += one.token_ids
                if one.finish_reason is not None:
                    return token_ids


@pytest.mark.parametrize("kind", [field.name for field in pb.SessionRequest.DESCRIPTOR.fields])
async def test_an_odd_command_is_its_own_sequences_trouble(
    kind: str, tiny_model: Callable[..., Path]
) -> None:
    model = tiny_model()
    expected = oracle(model, spec("x").token_ids, TOKENS)
    odd = odd_commands(kind, "victim")
    assert len(odd) > 5
    async with workers(model, CONFIG, "decode-0") as running:
        session = await running.session("decode-0")
        for start in range(0, len(odd), CHUNK):
            name, chunk = f"bystander-{start}", odd[start : start + CHUNK]
            await session.send(RunLocal(spec(name)))
            for message in chunk:
                await session._call.write(message)
                for part in ("reserve", "prefill", "run_local"):
                    if message.WhichOneof("command") == part:
                        victim = getattr(message, part).spec
                        await session.send(Abort(victim.request_id, victim.attempt))
            assert await answer(session, name) == expected
        await session.close()
        (info,) = await running.settled()
    assert info.load.integrity_ok, info.load.integrity_error


async def test_odd_prefills_leave_a_prefill_worker_as_it_was(
    tiny_model: Callable[..., Path],
) -> None:
    model = tiny_model()
    async with workers(model, CONFIG, "prefill-0", "decode-0") as running:
        prefill, decode = [await running.session(name) for name in ("prefill-0", "decode-0")]
        for kind in ("prefill", "reserve", "abort"):
            for message in odd_commands(kind, "victim"):
                await prefill._call.write(message)
                if message.WhichOneof("command") == "prefill":
                    victim = message.prefill.spec
                    await prefill.send(Abort(victim.request_id, victim.attempt))
        await decode.send(Hello("again"))
        for unknown in UNKNOWN:
            for session in (prefill, decode):
                await session._call.write(pb.SessionRequest.FromString(unknown))
        one = spec("last")
        await prefill.send(RunLocal(one))
        while getattr(await prefill.event(), "request_id", "") != "last":
            pass  # what is said of the victims
        tokens, _ = await relay(prefill, decode, replace(one, attempt=1), "grpc")
        assert tokens == oracle(model, one.token_ids, TOKENS)


async def test_a_router_of_a_protocol_that_does_not_fit_is_told_so(
    tiny_model: Callable[..., Path],
) -> None:
    async with workers(tiny_model(), CONFIG, "decode-0") as running:
        (info,) = await running.registry.workers()
        assert info.protocol.version == VERSION
        async with grpc.aio.insecure_channel(info.address) as channel:
            call = WorkerServiceStub(channel).Session()
            await call.write(
                command_to_proto(
                    Hello("router-9", Protocol(VERSION + 7, VERSION + 3, release="9.0"))
                )
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "router-9 is rejected: it speaks protocol" in (caught.value.details() or "")
        assert "upgrade this end" in (caught.value.details() or "")


async def last_of(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_command_that_cannot_be_read_ends_its_session_with_the_reason(
    tiny_model: Callable[..., Path],
) -> None:
    async with workers(tiny_model(), CONFIG, "decode-0") as running:
        (info,) = await running.registry.workers()
        async with grpc.aio.insecure_channel(info.address) as channel:
            call = channel.stream_stream("/kvrelay.v1.WorkerService/Session")()
            await call.write(command_to_proto(Hello("router-9")).SerializeToString())
            await call.read()
            await call.write(b"\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError, match="a command cannot be read") as caught:
                await last_of(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_sessions_without_a_hello_are_capped_and_end(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_session, "_MAX_SILENT", 4)
    monkeypatch.setattr(worker_session, "_HELLO_S", 0.5)
    model = tiny_model()
    async with workers(model, CONFIG, "decode-0") as running:
        (info,) = await running.registry.workers()
        async with grpc.aio.insecure_channel(info.address) as channel:
            calls = [WorkerServiceStub(channel).Session() for _ in range(10)]
            codes = [await call.code() for call in calls]
            assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 6
            assert codes.count(grpc.StatusCode.DEADLINE_EXCEEDED) == 4
        session = await running.session("decode-0")
        await session.send(RunLocal(spec("later")))
        expected = oracle(model, spec("later").token_ids, TOKENS)
        assert await answer(session, "later") == expected
