"""Hand-offs between whole workers that are cut short or tampered with: what the next request finds,
and whose blocks are free again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.worker_harness import Session, Workers, workers

from kv_transfer.lease import LeaseTable
from kv_transfer.prefix_export import PrefixExport
from kv_transfer.receiver import Receiver
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import Code, Unavailable
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.wire.transfer import FetchRequest, Frame, KvBlocks, KvCommit, KvReceipt
from kvrelay.worker_messages import (
    Abort,
    Event,
    Failed,
    HandedOff,
    Prefill,
    Reserve,
    Reserved,
    RunLocal,
    TokenBatch,
)
from prefill_worker.fetch_cost_model import FetchCostModel

CONFIG = ClusterConfig.model_validate(
    {
        "model": {"dtype": "float32"},
        "kv": {"block_size": 8, "memory": "4MiB"},
        "prefill": {"chunk_tokens": 16},
        "decode": {"chunk_tokens": 16},
    }
)
PROMPT = tuple(range(2, 63))


def spec(request_id: str, attempt: int = 0, token_ids: tuple[int, ...] = PROMPT) -> SequenceSpec:
    params = SamplingParams(temperature=0.0, max_tokens=8, seed=5, ignore_eos=True)
    return SequenceSpec(request_id, attempt, token_ids, len(token_ids), params)


@pytest.fixture
async def running(tiny_model: Callable[..., Path]) -> AsyncIterator[Workers]:
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0") as made:
        yield made
        for info in await made.settled():
            assert info.load.integrity_ok, info.load.integrity_error


@pytest.fixture
async def prefill(running: Workers) -> Session:
    return await running.session("prefill-0")


@pytest.fixture
async def decode(running: Workers) -> Session:
    return await running.session("decode-0")


Frames = AsyncIterator[Frame]
Changed = AsyncGenerator[Frame, None]


def between(monkeypatch: pytest.MonkeyPatch, change: Callable[[Frames], Changed]) -> None:
    """Frames go through `change` before they reach a receiver."""
    receive = Receiver._receive

    async def changed(receiver: Receiver, frames: Frames, context: Any) -> KvReceipt:
        async with aclosing(change(frames)) as through:
            return await receive(receiver, through, context)

    monkeypatch.setattr(Receiver, "_receive", changed)


class Hold:
    """Stops a push's frames before the first of a kind."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self.held = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, frames: Frames) -> Changed:
        async for frame in frames:
            if isinstance(frame, self._kind):
                self.held.set()
                await self.go_on.wait()
            yield frame


LEASE_S = 60.0


async def begin(prefill: Session, decode: Session, one: SequenceSpec, transport: str) -> Reserved:
    await decode.send(Reserve(one, LEASE_S, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved), reserved
    await prefill.send(Prefill(one, replace(reserved.target, transport=transport)))
    return reserved


async def failure(session: Session) -> Failed:
    event = await session.event()
    while isinstance(event, TokenBatch):
        event = await session.event()
    assert isinstance(event, Failed), event
    return event


async def relay(prefill: Session, decode: Session, one: SequenceSpec, transport: str) -> list[int]:
    await begin(prefill, decode, one, transport)
    first = await own_event(prefill, one)
    assert isinstance(first, TokenBatch), first
    assert isinstance(await own_event(prefill, one), HandedOff)
    return [*first.sequences[0].token_ids, *await decode.answer()]


async def own_event(session: Session, one: SequenceSpec) -> Event:
    """The next event of this attempt. Those of earlier attempts, which were aborted or have failed,
    may still come.
    """
    while True:
        event = await session.event()
        about: Any = event.sequences[0] if isinstance(event, TokenBatch) else event
        if (about.request_id, about.attempt) == one.key:
            return event


async def local(decode: Session) -> list[int]:
    await decode.send(RunLocal(spec("local")))
    return await decode.answer()


@pytest.mark.parametrize("transport", ["memory", "shm", "grpc", "gloo"])
async def test_kv_that_was_tampered_with_is_in_no_prefix_cache(
    prefill: Session, decode: Session, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    tampered = 0

    async def flip(frames: Frames) -> Changed:
        """A bit of a digest: to the receiver that is the same as a bit of the KV, which not all
        frames carry.
        """
        nonlocal tampered
        async for frame in frames:
            if isinstance(frame, KvBlocks) and not tampered:
                tampered += 1
                frame = replace(frame, digests=(frame.digests[0] ^ 1, *frame.digests[1:]))
            yield frame

    between(monkeypatch, flip)
    await begin(prefill, decode, spec("a"), transport)
    failed = await failure(prefill)
    assert tampered == 1
    # The latter where gRPC loses the reason
    assert failed.code in (Code.DATA_LOSS, Code.UNAVAILABLE)
    await decode.send(Abort("a", 0))
    await decode.send(Reserve(spec("a", 1), 10.0, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved)
    assert reserved.target.cached_tokens == 0
    await decode.send(Abort("a", 1))
    tokens = await relay(prefill, decode, spec("a", 2), transport)
    assert tokens == await local(decode)


@pytest.mark.parametrize("transport", ["memory", "shm", "grpc", "gloo"])
async def test_cancelled_between_the_end_of_prefill_and_the_commit(
    running: Workers,
    prefill: Session,
    decode: Session,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
) -> None:
    """Both hear of it; nothing is committed, though the lease would last for a minute."""
    hold = Hold(KvCommit)
    between(monkeypatch, hold)
    await begin(prefill, decode, spec("a"), transport)
    await prefill.tokens()
    async with asyncio.timeout(60):
        await hold.held.wait()
    await prefill.send(Abort("a", 0))
    await decode.send(Abort("a", 0))
    for info in await running.settled():
        assert info.load.blocks_held == 0
    hold.go_on.set()
    assert await relay(prefill, decode, spec("b"), transport) == await local(decode)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("transport", ["memory", "shm", "grpc", "gloo"])
@pytest.mark.parametrize("why", ["aborted", "lease ends"])
async def test_the_decode_worker_gives_up_while_frames_are_on_their_way(
    running: Workers,
    prefill: Session,
    decode: Session,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    why: str,
) -> None:
    """It is told to, or its lease ends. The prefill worker hears of it from nobody else, and gives
    up as well.
    """
    hold = Hold(KvBlocks)
    between(monkeypatch, hold)
    await begin(prefill, decode, spec("a"), transport)
    async with asyncio.timeout(60):
        await hold.held.wait()
    if why == "aborted":
        await decode.send(Abort("a", 0))
    else:
        expire = LeaseTable.expire
        monkeypatch.setattr(LeaseTable, "expire", lambda table, now: expire(table, now + LEASE_S))
        assert (await failure(decode)).code is Code.FAILED_PRECONDITION
    assert (await failure(prefill)).code in (Code.FAILED_PRECONDITION, Code.UNAVAILABLE)
    for info in await running.settled():
        assert info.load.blocks_held == 0


async def test_a_fetch_whose_answer_is_lost_has_fetched(
    prefill: Session, decode: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = 0
    export = PrefixExport._export

    async def without_answer(prefix_export: PrefixExport, wish: FetchRequest) -> int:
        nonlocal lent
        lent += await export(prefix_export, wish)
        raise Unavailable("connection reset")

    monkeypatch.setattr(PrefixExport, "_export", without_answer)
    monkeypatch.setattr(FetchCostModel, "is_fetch_faster", lambda *_: True)
    tokens = await local(decode)
    one = spec("second", 0, (*PROMPT, *tokens, *range(20, 60)))
    await decode.send(Reserve(one, 10.0, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved)
    source = decode.source(one, len(PROMPT) // 8 * 8, prefill.info)
    await prefill.send(Prefill(one, reserved.target, source))
    first = await prefill.tokens()
    assert first.prefill is not None
    assert lent == len(PROMPT) // 8
    assert first.prefill.fetched_tokens == lent * 8
    assert isinstance(await prefill.event(), HandedOff)
    assert len(await decode.answer()) == 7
