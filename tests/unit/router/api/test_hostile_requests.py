"""One tenant sends what costs most; the event loop never works long at one thing, and another
tenant is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest
from support.hostile_requests import GRPC_MESSAGES, HTTP_BODIES, HTTP_WIRE, MIB, slow_upload
from support.router_harness import RouterHarness, running_router
from support.tokens import Tokens, bearer

import router.api.grpc.receive_slots
import router.api.http.body
from kvrelay.process.loop_stall import LoopStalls
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.inference import GenerateRequest, SamplingOptions, request_to_proto

# Of the loop's thread at one time, the test's own work on this loop included. What this guards
# against took seconds.
MOST_CPU_S = 0.4
SIZE = 4 * MIB - 4096
METHOD = "/kvrelay.v1.InferenceService/Generate"


@dataclass
class Attacked:
    router: RouterHarness
    hostile: str  # tokens
    guest: str
    tokens: Tokens
    stalls: LoopStalls

    async def guest_is_served(self) -> None:
        """On both listeners, with requests that need the tokenizer, the template and a worker."""
        async with httpx.AsyncClient(
            base_url=self.router.http, timeout=120, headers=bearer(self.guest)
        ) as http:
            body = {"prompt": "Once upon a time", "max_tokens": 2}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
            assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
        request = request_to_proto(
            GenerateRequest(token_ids=(5, 6, 7), sampling=SamplingOptions(max_tokens=2))
        )
        async with grpc.aio.insecure_channel(self.router.grpc) as channel:
            call = channel.unary_stream(
                METHOD, request_serializer=pb.GenerateRequest.SerializeToString
            )
            metadata = (("authorization", f"Bearer {self.guest}"),)
            assert [one async for one in call(request, metadata=metadata, timeout=120)]


@pytest.fixture
async def attacked(tmp_path: Path) -> AsyncIterator[Attacked]:
    tokens = Tokens(tmp_path / "tokens.yaml")
    hostile, guest = tokens.add("hostile"), tokens.add("guest")
    async with running_router(prefill=0, tokens_file=tokens.path) as running:
        # As a router does: a collection of all that other tests have left would count as an
        # attack's.
        gc.collect()
        gc.freeze()
        stalls = LoopStalls("router", beat_s=0.005)
        measuring = asyncio.create_task(stalls.run())
        made = Attacked(running, hostile, guest, tokens, stalls)
        await made.guest_is_served()  # which starts processes and fills caches
        stalls.counts.worst_cpu_s = 0.0
        yield made
        measuring.cancel()
        gc.unfreeze()


def attacking(*attacks: Callable[[], object]) -> asyncio.Future[list[object]]:
    """Each in a thread of its own, whose work does not count as the loop's; results, or what was
    raised.
    """
    return asyncio.gather(*(asyncio.to_thread(one) for one in attacks), return_exceptions=True)


def posted(attacked: Attacked, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and answer; (0, b"") where the connection was ended before."""
    connection = http.client.HTTPConnection(
        attacked.router.http.removeprefix("http://"), timeout=120
    )
    try:
        connection.request("POST", path, body, bearer(attacked.hostile))
        answer = connection.getresponse()
        return answer.status, answer.read(2000)
    except (ConnectionError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def called(attacked: Attacked, message: bytes) -> grpc.StatusCode:
    with grpc.insecure_channel(
        attacked.router.grpc, (("grpc.max_receive_message_length", -1),)
    ) as channel:
        call = channel.unary_stream(METHOD)(
            message, metadata=(("authorization", f"Bearer {attacked.hostile}"),), timeout=120
        )
        with contextlib.suppress(grpc.RpcError):
            list(call)
        code: grpc.StatusCode = call.code()
        return code


@pytest.mark.long
async def test_bodies_over_http(attacked: Attacked) -> None:
    for path, body in HTTP_BODIES.values():
        data = await asyncio.to_thread(body, SIZE)
        attack = attacking(*[partial(posted, attacked, path, data)] * 2)
        await attacked.guest_is_served()
        for answer in await attack:
            assert isinstance(answer, tuple)
            status, text = answer
            # 504: a chat template that takes too long is stopped.
            assert status in (0, 200, 400, 404, 413, 429, 504), text
        assert attacked.stalls.counts.worst_cpu_s < MOST_CPU_S, (path, data[:60])


async def test_messages_over_grpc(attacked: Attacked) -> None:
    refused = (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
    for name, message in GRPC_MESSAGES.items():
        data = await asyncio.to_thread(message, SIZE)
        attack = attacking(*[partial(called, attacked, data)] * 2)
        await attacked.guest_is_served()
        for code in await attack:
            assert code in refused, name
        assert attacked.stalls.counts.worst_cpu_s < MOST_CPU_S, name


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", GRPC_MESSAGES)
async def test_a_refused_message_is_not_kept(attacked: Attacked, name: str) -> None:
    """Until the garbage collector comes by: it may take long, and stops the event loop for all that
    it finds.
    """
    data = await asyncio.to_thread(GRPC_MESSAGES[name], MIB)
    await asyncio.to_thread(called, attacked, data)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            await asyncio.to_thread(called, attacked, data)
        kept = [one for one in gc.get_objects() if type(one) is pb.GenerateRequest]
    finally:
        gc.enable()
    # The router may not have left the last call yet.
    assert len(kept) <= 1


@pytest.mark.long
async def test_many_bodies_of_each_size_below_the_bounds(attacked: Attacked) -> None:
    """The largest that were parsed at once, when the size of a body decided where it was parsed."""
    for path, body in HTTP_BODIES.values():
        data = body(60_000)
        answers = await attacking(*[partial(posted, attacked, path, data)] * 8)
        assert all(isinstance(one, tuple) and one[0] for one in answers)
        assert attacked.stalls.counts.worst_cpu_s < MOST_CPU_S, (path, data[:60])


async def test_what_is_not_a_body(attacked: Attacked) -> None:
    """Chunks, headers and requests in great number on one connection, of a sender without a
    token.
    """
    host, port = attacked.router.http.removeprefix("http://").split(":")
    for name, wire in HTTP_WIRE.items():
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):
            writer.write(wire(MIB // 4))
            async with asyncio.timeout(60):
                await writer.drain()
                assert (await reader.readline()).startswith(b"HTTP/1.1")
        writer.close()
        await attacked.guest_is_served()
        assert attacked.stalls.counts.worst_cpu_s < MOST_CPU_S, name


async def test_a_resume_as_long_as_the_context(attacked: Attacked) -> None:
    """Its tokens go through the detokenizer and the search for stop strings, one after the
    other.
    """
    sampling = SamplingOptions(
        max_tokens=4000, stop=tuple("a" * 200 + chr(98 + one) for one in range(16))
    )
    request = request_to_proto(
        GenerateRequest(token_ids=(1,), resume=(70,) * 3990, sampling=sampling)
    )
    attack = attacking(*[partial(called, attacked, request.SerializeToString())] * 4)
    await attacked.guest_is_served()
    await attack
    assert attacked.stalls.counts.worst_cpu_s < MOST_CPU_S


async def test_slow_uploads_of_one_tenant_leave_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.api.http.body, "MAX_HELD_BYTES", 64 * 1000)
    tokens = Tokens(tmp_path / "tokens.yaml")
    hostile, guest = tokens.add("hostile"), tokens.add("guest")
    async with running_router(prefill=0, tokens_file=tokens.path) as running:
        address = running.http.removeprefix("http://")
        host, port = address.split(":")
        uploads = [await asyncio.open_connection(host, int(port)) for _ in range(65)]
        for _, writer in uploads:
            writer.write(slow_upload(address, hostile, 2000, 1000))
            await writer.drain()
        refused = [asyncio.create_task(reader.readline()) for reader, _ in uploads]
        async with asyncio.timeout(60):  # the last has no room any more
            done, _ = await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
        assert next(iter(done)).result().startswith(b"HTTP/1.1 429")
        async with httpx.AsyncClient(
            base_url=running.http, timeout=120, headers=bearer(guest)
        ) as http:
            for _ in range(20):
                text = {"prompt": "a" * 1500}
                assert (await http.post("/tokenize", json=text)).status_code == 200
            assert sum(one.done() for one in refused) <= 4, (
                "no more had to go than the guest's body needs room for"
            )
        for task in refused:
            task.cancel()
        for _, writer in uploads:
            writer.close()


async def test_calls_whose_message_does_not_come_leave_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.api.grpc.receive_slots, "SLOW_S", 0.05)
    tokens = Tokens(tmp_path / "tokens.yaml")
    hostile, guest = tokens.add("hostile"), tokens.add("guest")
    async with (
        running_router(prefill=0, tokens_file=tokens.path) as running,
        grpc.aio.insecure_channel(running.grpc) as channel,
    ):
        silent = [
            channel.stream_stream(METHOD)(metadata=(("authorization", f"Bearer {hostile}"),))
            for _ in range(80)
        ]
        for call in silent:
            await call.wait_for_connection()
        request = request_to_proto(
            GenerateRequest(token_ids=(5, 6, 7), sampling=SamplingOptions(max_tokens=2))
        )
        call = channel.unary_stream(METHOD, request_serializer=pb.GenerateRequest.SerializeToString)
        answers = call(request, metadata=(("authorization", f"Bearer {guest}"),), timeout=15)
        assert [one async for one in answers], "before the silent calls have had their 20 s"
        for one in silent:
            one.cancel()


async def test_a_token_that_is_withdrawn_works_no_more_while_threads_are_busy(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads that clients' work could use are taken; the file of tokens is read again all the
    same.
    """
    monkeypatch.setattr("router.frontend.access.POLL_S", 0.01)
    release = threading.Event()
    loop = asyncio.get_running_loop()
    busy = [loop.run_in_executor(None, release.wait) for _ in range(64)]
    try:
        attacked.tokens.remove("hostile")
        async with (
            httpx.AsyncClient(base_url=attacked.router.http, timeout=60) as http,
            asyncio.timeout(60),
        ):
            while (
                await http.get("/v1/models", headers=bearer(attacked.hostile))
            ).status_code != 401:
                await asyncio.sleep(0.02)
    finally:
        release.set()
        await asyncio.gather(*busy)
