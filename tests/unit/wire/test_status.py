from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from kvrelay.errors import (
    Code,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    KvRelayError,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
    error_for,
)
from kvrelay.wire import inference as wire
from kvrelay.wire.status import abort, error_from_rpc


class Refusing(wire.InferenceServiceServicer):
    """Ends every call with the error that it was made with."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def ListModels(
        self, request: wire.pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> wire.pb.ListModelsResponse:
        if isinstance(self.error, KvRelayError):
            await abort(context, self.error)
        raise self.error


class Silent(wire.InferenceServiceServicer):
    """Never answers."""

    async def ListModels(
        self, request: wire.pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> wire.pb.ListModelsResponse:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


@asynccontextmanager
async def serve(servicer: wire.InferenceServiceServicer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    wire.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def failure(target: str, seconds: float = 5.0) -> KvRelayError:
    async with grpc.aio.insecure_channel(target) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await wire.InferenceServiceStub(channel).ListModels(
                wire.pb.ListModelsRequest(), timeout=seconds
            )
    return error_from_rpc(caught.value, target)


@pytest.mark.parametrize("code", list(Code), ids=lambda code: code.name)
async def test_an_error_survives_the_wire(code: Code) -> None:
    sent = error_for(code, "what went wrong: ünïcode", field="sampling.top_p", retry_after_s=1.25)
    async with serve(Refusing(sent)) as target:
        received = await failure(target)
    assert type(received) is type(sent)
    assert received.message == f"{target}: what went wrong: ünïcode"
    assert (received.field, received.retry_after_s) == ("sampling.top_p", 1.25)


async def test_what_was_not_said_stays_unsaid() -> None:
    async with serve(Refusing(ResourceExhausted("full"))) as target:
        received = await failure(target)
    assert (received.field, received.retry_after_s) == (None, None)


async def test_a_message_longer_than_metadata_allows_is_cut() -> None:
    async with serve(Refusing(InvalidArgument("ü" * 100_000))) as target:
        received = await failure(target)
    assert isinstance(received, InvalidArgument)
    assert received.message == f"{target}: " + "ü" * 1000


@pytest.mark.parametrize("text", ["\N{GRINNING FACE}", "\u4e00", "%", "\n", "a\u4e00"])
async def test_a_message_is_cut_to_what_it_has_as_metadata(text: str) -> None:
    sent = InvalidArgument(text * 100_000, field="messages")
    async with serve(Refusing(sent)) as target:
        received = await failure(target)
    assert isinstance(received, InvalidArgument)
    cut = received.message.removeprefix(f"{target}: ")
    assert 300 < len(cut) <= 1000
    assert sent.message.startswith(cut)


async def test_a_message_with_half_of_a_pair_is_sent() -> None:
    async with serve(Refusing(InvalidArgument("a\ud800b", field="path"))) as target:
        received = await failure(target)
    assert isinstance(received, InvalidArgument)
    assert received.message == f"{target}: a?b"


async def test_a_refused_connection_names_the_target(unused_tcp_port: int) -> None:
    target = f"127.0.0.1:{unused_tcp_port}"
    received = await failure(target)
    assert isinstance(received, Unavailable)
    assert received.message.startswith(f"{target}: cannot connect: Connection refused")


def test_a_blocking_call_gives_the_same_error(unused_tcp_port: int) -> None:
    target = f"127.0.0.1:{unused_tcp_port}"
    with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as caught:
        wire.InferenceServiceStub(channel).ListModels(wire.pb.ListModelsRequest(), timeout=5)
    received = error_from_rpc(caught.value, target)
    assert isinstance(received, Unavailable)
    assert "cannot connect" in received.message


async def test_statuses_of_grpc_itself_are_typed() -> None:
    async with serve(wire.InferenceServiceServicer()) as target:
        assert isinstance(await failure(target), Unimplemented)
    async with serve(Silent()) as target:
        assert isinstance(await failure(target, seconds=0.05), DeadlineExceeded)


async def test_a_status_that_kvrelay_does_not_use_is_internal() -> None:
    async with serve(Refusing(RuntimeError("a defect"))) as target:
        received = await failure(target)
    assert isinstance(received, Internal)
    assert "a defect" in received.message


async def test_a_refused_call_keeps_nothing_of_its_message() -> None:
    """Without the garbage collector, which comes late where there is much: refused messages would
    fill the memory.
    """

    class Large:
        pass

    kept: list[weakref.ref[Large]] = []

    async def refuse(message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        def check(large: Large) -> None:
            kept.append(weakref.ref(large))
            raise InvalidArgument("too many entries", field="messages")

        try:
            check(Large())
        except KvRelayError as error:
            await abort(context, error)
        return b""

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(refuse)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", {"Refuse": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(3):
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary("/test.Service/Refuse")(b"")
        assert len(kept) == 3
        assert not [one for one in kept if one() is not None]
    finally:
        gc.enable()
        await server.stop(None)


@pytest.mark.parametrize("delay", ["9" * 400, "9" * 5000, "-1", "\u0663", "1e3", "", "1.5"])
def test_a_delay_that_makes_no_sense_is_no_delay(delay: str) -> None:
    trailing = grpc.aio.Metadata(("grpc-retry-pushback-ms", delay))
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, "later", None
    )
    assert error_from_rpc(error, "router").retry_after_s is None
