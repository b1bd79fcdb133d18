"""A prompt whose beginning another worker has computed: fetched, not computed again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.worker_harness import Session, Workers, workers

from kv_transfer.block_writer import BlockWriter
from kv_transfer.prefix_export import PrefixExport
from kv_transfer.receiver import Receiver
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import Unavailable
from kvrelay.types.requests import Handoff, PrefillTimings, SamplingParams, SequenceSpec
from kvrelay.worker_messages import (
    Abort,
    HandedOff,
    Prefill,
    PrefixSource,
    Reserve,
    Reserved,
    RunLocal,
)
from prefill_worker import fetcher
from prefill_worker.fetch_cost_model import FetchCostModel
from prefill_worker.prefill_stage import PrefillStage

SIZE = 16
CONFIG = ClusterConfig.model_validate(
    {
        "model": {"dtype": "float32"},
        "kv": {"block_size": SIZE, "memory": "4MiB"},
        "prefill": {"chunk_tokens": 32},
        "decode": {"chunk_tokens": 32},
    }
)
PROMPT = tuple(range(2, 63))
NEW_TOKENS = 12


def spec(request_id: str, token_ids: tuple[int, ...] = PROMPT, salt: str = "") -> SequenceSpec:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, seed=5, ignore_eos=True)
    return SequenceSpec(request_id, 0, token_ids, len(token_ids), params, salt)


@pytest.fixture
async def running(tiny_model: Callable[..., Path]) -> AsyncIterator[Workers]:
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0", "decode-1") as made:
        yield made
        for info in await made.settled():
            assert info.load.integrity_ok, info.load.integrity_error


@pytest.fixture
async def decode(running: Workers) -> Session:
    return await running.session("decode-0")


@pytest.fixture
async def prefill(running: Workers) -> Session:
    return await running.session("prefill-0")


async def first_turn(decode: Session) -> tuple[int, ...]:
    """The next turn's prompt. The decode worker has computed its beginning, prompt and answer."""
    await decode.send(RunLocal(spec("first")))
    return (*PROMPT, *await decode.answer(), *range(20, 60))


HELD = (len(PROMPT) + NEW_TOKENS - 1) // SIZE * SIZE  # the last token's KV is never computed


async def begin(
    prefill: Session,
    decode: Session,
    one: SequenceSpec,
    source: Source | None,
    transport: str = "auto",
) -> None:
    await decode.send(Reserve(one, 10.0, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved), reserved
    await prefill.send(
        Prefill(one, replace(reserved.target, transport=transport), source and source(one, prefill))
    )


async def relay(
    prefill: Session,
    decode: Session,
    one: SequenceSpec,
    source: Source | None,
    transport: str = "auto",
) -> tuple[list[int], Handoff, PrefillTimings]:
    await begin(prefill, decode, one, source, transport)
    first = await prefill.tokens()
    handed_off = await prefill.event()
    assert isinstance(handed_off, HandedOff), handed_off
    assert first.prefill is not None
    return [*first.token_ids, *await decode.answer()], handed_off.handoff, first.prefill


Source = Callable[[SequenceSpec, Session], PrefixSource]  # of a request for a prefill worker


def source(worker: Session, cached_tokens: int = HELD) -> Source:
    return lambda one, prefill: worker.source(one, cached_tokens, prefill.info)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("transport", ["memory", "shm", "grpc", "gloo"])
async def test_the_second_turn_computes_and_sends_only_what_is_new(
    running: Workers, prefill: Session, decode: Session, transport: str
) -> None:
    prompt = await first_turn(decode)
    tokens, handoff, timings = await relay(
        prefill, decode, spec("second", prompt), source(decode), transport
    )
    assert (timings.fetched_tokens, timings.cached_tokens) == (HELD, HELD)
    assert timings.chunks == -(-(len(prompt) - HELD) // 32)
    assert (handoff.cached_blocks, handoff.blocks) == (
        HELD // SIZE,
        -(-len(prompt) // SIZE) - HELD // SIZE,
    )
    alone = await running.session("decode-1")
    await alone.send(RunLocal(spec("local", prompt)))
    assert await alone.answer() == tokens
    # What was fetched is in the prefill worker's own cache now.
    _, _, timings = await relay(prefill, alone, spec("third", prompt), None, transport)
    assert timings.fetched_tokens == 0
    assert timings.cached_tokens >= HELD


async def test_what_is_there_already_is_not_fetched(
    prefill: Session, decode: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of this model, computing a block is sooner
    monkeypatch.setattr(FetchCostModel, "is_fetch_faster", lambda *_: True)
    prompt = await first_turn(decode)
    await relay(prefill, decode, spec("own"), None)  # the first turn's prompt
    _, _, timings = await relay(prefill, decode, spec("second", prompt), source(decode))
    assert timings.cached_tokens == HELD
    assert timings.fetched_tokens == HELD - len(PROMPT) // SIZE * SIZE


async def test_a_source_that_holds_less_than_was_thought(
    prefill: Session, decode: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost model learns from the bytes that arrived, not from those that were requested."""
    measured: list[int] = []
    monkeypatch.setattr(
        FetchCostModel, "add_fetch", lambda _, num_bytes, seconds: measured.append(num_bytes)
    )
    prompt = await first_turn(decode)
    _, handoff, timings = await relay(
        prefill, decode, spec("second", prompt), source(decode, len(prompt))
    )
    assert timings.fetched_tokens == HELD
    assert measured == [HELD // SIZE * handoff.block_bytes]


async def test_a_fetch_that_fails_in_an_unforeseen_way_costs_no_request(
    prefill: Session, decode: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC raises errors of its own for a channel that was closed; the prompt is computed then."""

    async def broken(*_: object) -> int:
        raise ValueError("channel is closed")

    monkeypatch.setattr(fetcher, "kv_fetch", broken)
    prompt = await first_turn(decode)
    tokens, _, timings = await relay(prefill, decode, spec("second", prompt), source(decode))
    assert timings.fetched_tokens == 0
    assert len(tokens) == NEW_TOKENS


async def test_a_source_that_holds_nothing(
    running: Workers, prefill: Session, decode: Session
) -> None:
    prompt = await first_turn(decode)
    alone = await running.session("decode-1")
    tokens, _, timings = await relay(prefill, decode, spec("second", prompt), source(alone))
    assert timings.fetched_tokens == 0
    await alone.send(RunLocal(spec("local", prompt)))
    assert await alone.answer() == tokens


async def test_another_tenants_blocks_are_not_found(prefill: Session, decode: Session) -> None:
    prompt = await first_turn(decode)
    _, handoff, timings = await relay(
        prefill, decode, spec("second", prompt, salt="other"), source(decode)
    )
    assert (timings.fetched_tokens, timings.cached_tokens, handoff.cached_blocks) == (0, 0, 0)


async def test_a_source_that_is_gone(prefill: Session, decode: Session) -> None:
    prompt = await first_turn(decode)
    nobody = PrefixSource("decode-9", "127.0.0.1:1", HELD)
    _, _, timings = await relay(prefill, decode, spec("second", prompt), lambda *_: nobody)
    assert timings.fetched_tokens == 0


async def test_a_request_that_is_cancelled_while_it_fetches(
    prefill: Session, decode: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks come back, on three sides; the fixture looks."""
    asked, cancelled = asyncio.Event(), asyncio.Event()
    export = PrefixExport._export

    async def slow(prefix_export: PrefixExport, wish: Any) -> int:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return await export(prefix_export, wish)

    monkeypatch.setattr(PrefixExport, "_export", slow)
    prompt = await first_turn(decode)
    one = spec("second", prompt)
    await begin(prefill, decode, one, source(decode))
    async with asyncio.timeout(60):
        await asked.wait()
        await prefill.send(Abort(*one.key))
        await decode.send(Abort(*one.key))
        await cancelled.wait()


async def test_blocks_are_kept_for_as_long_as_somebody_writes_to_them(
    running: Workers, prefill: Session, decode: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is lost in mid-push; while that is being wound up, the request is cancelled."""
    writing, go_on = threading.Event(), threading.Event()
    aborted: asyncio.Queue[PrefillStage] = asyncio.Queue()
    pushes: list[asyncio.Task[int]] = []
    ending = asyncio.Event()
    write, export, abort, end = (
        BlockWriter.write,
        PrefixExport._export,
        PrefillStage.abort,
        Receiver.end,
    )

    def slow(writer: BlockWriter, *arguments: Any) -> None:
        writing.set()
        assert go_on.wait(60)
        write(writer, *arguments)

    async def lost(prefix_export: PrefixExport, wish: Any) -> int:
        pushes.append(asyncio.create_task(export(prefix_export, wish)))
        assert await asyncio.to_thread(writing.wait, 20)
        raise Unavailable("lost")

    def seen(stage: PrefillStage, key: tuple[str, int]) -> None:
        abort(stage, key)
        aborted.put_nowait(stage)

    async def noted(receiver: Receiver, lease_id: int) -> None:
        ending.set()
        await end(receiver, lease_id)

    monkeypatch.setattr(BlockWriter, "write", slow)
    monkeypatch.setattr(PrefixExport, "_export", lost)
    monkeypatch.setattr(PrefillStage, "abort", seen)
    monkeypatch.setattr(Receiver, "end", noted)
    one = spec("second", await first_turn(decode))
    await begin(prefill, decode, one, source(decode))
    async with asyncio.timeout(60):
        await ending.wait()
        await prefill.send(Abort(*one.key))
        stage = await aborted.get()
        await decode.send(Abort(*one.key))
        for _ in range(10):  # all that the cancellation can bring about
            await asyncio.sleep(0)
    assert stage._context.cache.pool.num_held >= HELD // SIZE
    go_on.set()
    await asyncio.gather(*pushes, return_exceptions=True)
    await running.settled()
    assert len(stage.inbound.leases) == 0


async def test_a_source_that_does_not_answer_is_not_waited_for_longer_than_it_would_take_to_compute(
    prefill: Session, decode: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(prefix_export: PrefixExport, wish: Any) -> int:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(PrefixExport, "_export", silent)
    monkeypatch.setattr(FetchCostModel, "is_fetch_faster", lambda *_: True)
    prompt = await first_turn(decode)
    # From now on it knows its own speed
    await relay(prefill, decode, spec("measured", tuple(range(70, 99))), None)
    tokens, _, timings = await relay(prefill, decode, spec("second", prompt), source(decode))
    assert timings.fetched_tokens == 0
    assert len(tokens) == NEW_TOKENS


def test_fetch_cost_model() -> None:
    model = FetchCostModel()
    assert model.is_fetch_faster(100, 10**9), "nobody knows better yet"
    assert not model.is_fetch_faster(0, 0)
    model.add_compute(1000, 1.0)
    model.add_fetch(10**8, 0.11)  # 1 GB/s beyond the latency
    assert model.bytes_per_second == pytest.approx(0.65e9)
    assert model.is_fetch_faster(100, 40 * 10**6)
    assert not model.is_fetch_faster(100, 80 * 10**6)
    assert not model.is_fetch_faster(5, 1), "asking takes longer than computing it"
    model.add_compute(0, 1.0)
    model.add_compute(10, 0.0)
    model.add_fetch(0, 1.0)
    model.add_fetch(10**9, 0.001)
    assert (model.tokens_per_second, model.bytes_per_second) == (1000.0, pytest.approx(0.65e9))


async def test_a_scored_prompt_is_computed_although_the_router_names_a_source(
    running: Workers, prefill: Session, decode: Session
) -> None:
    prompt = await first_turn(decode)
    alone, told = await running.session("decode-1"), []
    for session, from_source in ((alone, False), (prefill, True)):
        one = spec(f"scored{from_source}", prompt)
        one = replace(one, sampling=replace(one.sampling, prompt_logprobs=2))
        if from_source:
            await begin(prefill, decode, one, source(decode))
        else:
            await alone.send(RunLocal(one))
        first = await session.tokens()
        assert first.prefill is not None
        assert first.prefill.cached_tokens == 0
        assert first.prompt_logprobs is not None
        told.append(list(first.prompt_logprobs.logprobs))
        # The other tokens, so that the blocks come back.
        await (decode if from_source else alone).answer()
    assert told[1] == pytest.approx(told[0], abs=1e-4)
    assert all(told[1]), "a place without a score is 0"
