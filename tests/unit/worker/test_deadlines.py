"""No step is spent, and no peer waited for, once nobody wants the answer any more. Time is a clock
of the test's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.worker_harness import Engine, Session, Workers, silent_peer, workers

from kvrelay.clock import ManualClock
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import Code
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker_messages import (
    Abort,
    Failed,
    Prefill,
    PrefixSource,
    Reserve,
    Reserved,
    RunLocal,
)

CONFIG = ClusterConfig.model_validate(
    {
        "model": {"dtype": "float32"},
        "kv": {"block_size": 8, "memory": "4MiB"},
        "prefill": {"chunk_tokens": 16},
        "decode": {"max_batch": 4, "chunk_tokens": 16},
    }
)
PROMPT = tuple(range(2, 63))
LEASE_S = 1e6


def spec(
    request_id: str, deadline_s: float | None, token_ids: tuple[int, ...] = PROMPT
) -> SequenceSpec:
    params = SamplingParams(temperature=0.0, max_tokens=4, seed=1, ignore_eos=True)
    return SequenceSpec(request_id, 0, token_ids, len(token_ids), params, deadline_s=deadline_s)


@pytest.fixture
async def running(
    tiny_model: Callable[..., Path], clock: ManualClock, engine: Engine
) -> AsyncIterator[Workers]:
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0") as both:
        engine.start()
        yield both
        engine.free.set()


async def failed(session: Session, request_id: str) -> None:
    event = await session.event()
    assert isinstance(event, Failed), event
    assert (event.request_id, event.code) == (request_id, Code.DEADLINE_EXCEEDED)
    assert "deadline" in event.message


async def test_a_deadline_that_is_over_on_arrival_is_told_at_once(
    running: Workers, engine: Engine
) -> None:
    decode = await running.session("decode-0")
    for command in (RunLocal(spec("a", 0.0)), Reserve(spec("a", -1.0), LEASE_S, "prefill-0")):
        await decode.send(command)
        await failed(decode, "a")
    assert engine.steps == []


async def test_queued_work_is_dropped_without_a_step(
    running: Workers, engine: Engine, clock: ManualClock
) -> None:
    decode = await running.session("decode-0")
    engine.free.clear()
    await decode.send(RunLocal(spec("first", 10.0)))
    await engine.held()
    await decode.send(RunLocal(spec("second", 5.0, (100, *PROMPT))))
    await decode.send(RunLocal(spec("over", 0.0)))
    await failed(decode, "over")  # so the one before has come
    clock.advance(5.0)
    await failed(decode, "second")
    engine.free.set()
    assert len(await decode.answer()) == 4, "who has time left goes on"
    assert 100 not in [first for step in engine.steps for first in step]
    await running.settled()


async def test_a_stream_ends_when_its_time_is_over(
    running: Workers, engine: Engine, clock: ManualClock
) -> None:
    decode = await running.session("decode-0")
    engine.free.clear()
    await decode.send(RunLocal(spec("a", 10.0)))
    await engine.held()
    clock.advance(10.0)
    engine.free.set()
    await failed(decode, "a")
    await running.settled()


async def test_a_prompt_is_given_up_between_two_chunks(
    running: Workers, engine: Engine, clock: ManualClock
) -> None:
    prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
    one = spec("a", 10.0)
    await decode.send(Reserve(replace(one, deadline_s=None), LEASE_S, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved)
    engine.free.clear()
    await prefill.send(Prefill(one, reserved.target))
    await engine.held()
    clock.advance(10.0)
    engine.free.set()
    await failed(prefill, "a")
    assert len(engine.steps) == 1, "of four chunks"
    await decode.send(Abort("a", 0))
    await running.settled()


async def test_a_reservation_ends_with_its_request(running: Workers, clock: ManualClock) -> None:
    decode = await running.session("decode-0")
    await decode.send(Reserve(spec("a", 10.0), LEASE_S, "prefill-0"))
    assert isinstance(await decode.event(), Reserved)
    clock.advance(10.0)
    await failed(decode, "a")
    await running.settled()


async def test_a_decode_worker_that_takes_no_bytes_is_not_waited_for(
    running: Workers, clock: ManualClock
) -> None:
    prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
    one = spec("a", 10.0)
    await decode.send(Reserve(replace(one, deadline_s=None), LEASE_S, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved)
    async with silent_peer() as (address, _):
        await prefill.send(
            Prefill(one, replace(reserved.target, address=address, transport="grpc"))
        )
        assert (await prefill.tokens()).index == 0
        clock.advance(10.0)
        await failed(prefill, "a")
    await decode.send(Abort("a", 0))
    await running.settled()


async def test_a_prefix_cache_elsewhere_that_does_not_answer_is_not_waited_for(
    running: Workers, engine: Engine, clock: ManualClock
) -> None:
    prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
    one = spec("a", 10.0)
    await decode.send(Reserve(replace(one, deadline_s=None), LEASE_S, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved)
    async with silent_peer() as (address, asked):
        await prefill.send(
            Prefill(one, reserved.target, PrefixSource("decode-9", address, len(PROMPT)))
        )
        await asyncio.wait_for(asked.wait(), 60)
        clock.advance(10.0)
        await failed(prefill, "a")
    assert engine.steps == []
    await decode.send(Abort("a", 0))
    await running.settled()
