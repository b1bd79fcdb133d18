"""A request that has ended leaves no reference cycle of the router's objects. Collections of many
such cycles would stop all streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import grpc
import httpx
import pytest
from support.router_harness import RouterHarness, running_router
from support.tokens import Tokens, bearer

import router
from kvrelay.v1 import inference_pb2 as pb
from router.runtime.stream_reader import StreamReader

METHOD = "/kvrelay.v1.InferenceService/Generate"
FOLDER = str(Path(router.__file__).parent)


@dataclass
class Guest:
    channel: grpc.aio.Channel
    http: httpx.AsyncClient
    token: str

    def call(self, token: str = "", timeout: float = 60.0, **fields: object) -> grpc.aio.Call:
        message = pb.GenerateRequest(**{"prompt": "Once upon a time", **fields})  # type: ignore[arg-type]
        call = self.channel.unary_stream(
            METHOD,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        metadata = (("authorization", f"Bearer {token or self.token}"),)
        return call(message, metadata=metadata, timeout=timeout)

    async def failed(self, **fields: object) -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(aiter(self.call(**fields)))  # type: ignore[arg-type]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[RouterHarness, Guest]]:
    tokens = Tokens(tmp_path / "tokens.yaml")
    guest = tokens.add("guest")
    async with (
        running_router(tokens_file=tokens.path) as running,
        grpc.aio.insecure_channel(running.grpc) as channel,
        httpx.AsyncClient(base_url=running.http, timeout=60, headers=bearer(guest)) as http,
    ):
        yield running, Guest(channel, http, guest)


async def answered(guest: Guest) -> None:
    assert [one async for one in guest.call()]


async def cancelled_at_once(guest: Guest) -> None:
    call = guest.call()
    await asyncio.sleep(0)
    call.cancel()


async def cancelled_after_a_token(guest: Guest) -> None:
    call = guest.call(sampling=pb.SamplingParams(max_tokens=400, ignore_eos=True))
    await call.read()
    call.cancel()


async def unknown_model(guest: Guest) -> None:
    await guest.failed(model="nobody")


async def wrong_field(guest: Guest) -> None:
    await guest.failed(sampling=pb.SamplingParams(top_p=7.0))


async def wrong_token(guest: Guest) -> None:
    await guest.failed(token="nobody")


async def too_late(guest: Guest) -> None:
    sampling = pb.SamplingParams(max_tokens=2000, ignore_eos=True)
    with pytest.raises(grpc.aio.AioRpcError):
        assert [one async for one in guest.call(timeout=0.2, sampling=sampling)]


async def posted(guest: Guest) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 5, "n": 2}
    assert (await guest.http.post("/v1/completions", json=body)).status_code == 200


async def posted_and_refused(guest: Guest) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": -5}
    assert (await guest.http.post("/v1/completions", json=body)).status_code == 400


async def streamed(guest: Guest) -> None:
    await _streamed(guest, whole=True)


async def left(guest: Guest) -> None:
    await _streamed(guest, whole=False)


async def _streamed(guest: Guest, whole: bool) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "max_tokens": 5 if whole else 400, "stream": True, "n": 2}
    async with guest.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_lines():
            if not whole:
                break


ENDS: list[Callable[[Guest], Awaitable[None]]] = [
    answered,
    cancelled_at_once,
    cancelled_after_a_token,
    unknown_model,
    wrong_field,
    wrong_token,
    too_late,
    posted,
    posted_and_refused,
    streamed,
    left,
]


@contextlib.contextmanager
def keeping_garbage() -> Iterator[list[object]]:
    """What only a collection would free goes into the list."""
    gc.collect()
    gc.disable()
    found: list[object] = []
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def living_readers() -> set[int]:
    return {id(one) for one in gc.get_objects() if type(one) is StreamReader}


@pytest.mark.parametrize("end", ENDS, ids=lambda one: one.__name__)
@pytest.mark.sweep(4)
async def test_an_ended_request_leaves_nothing_to_the_collector(
    served: tuple[RouterHarness, Guest], end: Callable[[Guest], Awaitable[None]]
) -> None:
    running, guest = served
    others = living_readers()
    await end(guest)  # fills caches
    with keeping_garbage() as garbage:
        for _ in range(5):
            await end(guest)
        while any(one.worker.sequences for one in running.workers.values()):
            await asyncio.sleep(0.01)
        await answered(guest)
        readers = living_readers() - others
    # The router keeps its last streams for a while, but not the readers.
    assert not readers
    ours = [
        one.f_code.co_qualname if isinstance(one, FrameType) else type(one).__qualname__
        for one in garbage
        if str(type(one).__module__).startswith("router.")
        or (isinstance(one, FrameType) and one.f_code.co_filename.startswith(FOLDER))
    ]
    assert ours == []
