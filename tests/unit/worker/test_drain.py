"""A worker that drains lets go of everything: by itself within its grace, and by handing it back
after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from support.worker_harness import Engine, Session, Workers, load_of, silent_peer, workers

from kvrelay.clock import ManualClock
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import Code
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.types.workers import WorkerInfo
from kvrelay.wire.worker import WorkerServiceStub, pb
from kvrelay.worker.drain import RETURN_S
from kvrelay.worker_messages import Abort, Failed, Prefill, Refused, Reserve, Reserved, RunLocal

CONFIG = ClusterConfig.model_validate(
    {
        "model": {"dtype": "float32"},
        "kv": {"block_size": 8, "memory": "4MiB"},
        "decode": {"max_batch": 2},
    }
)
PROMPT = tuple(range(2, 63))


def spec(request_id: str, max_tokens: int = 4) -> SequenceSpec:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=1, ignore_eos=True)
    return SequenceSpec(request_id, 0, PROMPT, len(PROMPT), params)


@pytest.fixture
async def running(
    tiny_model: Callable[..., Path], clock: ManualClock, engine: Engine
) -> AsyncIterator[Workers]:
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0") as both:
        engine.start()
        yield both
        engine.free.set()


async def drain(info: WorkerInfo, grace_s: float | None) -> None:
    async with grpc.aio.insecure_channel(info.address) as channel:
        await WorkerServiceStub(channel).Drain(pb.DrainRequest(grace_seconds=grace_s))


async def handed_back(session: Session) -> Failed:
    event = await session.event()
    assert isinstance(event, Failed), event
    assert (event.code, event.message) == (Code.UNAVAILABLE, "draining")
    return event


async def at_rest(running: Workers, **states: str) -> None:
    """Until the workers' heartbeats tell these states, and that they are empty."""
    async with asyncio.timeout(30):
        while True:
            infos = await running.settled()
            if {info.pool: info.state for info in infos} == {
                "prefill": "ready",
                "decode": "ready",
            } | states:
                return
            await asyncio.sleep(0.05)


async def test_what_is_left_when_the_grace_is_over_is_handed_back(
    running: Workers, clock: ManualClock, engine: Engine
) -> None:
    decode = await running.session("decode-0")
    engine.free.clear()
    await decode.send(RunLocal(spec("streams")))
    await engine.held()
    await decode.send(Reserve(spec("leases"), 1e6, "prefill-0"))
    assert isinstance(await decode.event(), Reserved)
    await drain(decode.info, 30.0)
    clock.advance(29.9)
    await decode.send(RunLocal(spec("new")))
    assert await decode.event() == Refused("new", 0, "draining"), (
        "nothing new, and nothing given up within the grace"
    )
    clock.advance(0.1)
    assert {(await handed_back(decode)).request_id for _ in range(2)} == {"streams", "leases"}
    engine.free.set()
    await at_rest(running, decode="draining")


async def test_an_answer_that_has_begun_is_continued_within_the_grace(
    running: Workers, clock: ManualClock
) -> None:
    decode = await running.session("decode-0")
    await decode.send(RunLocal(spec("a", max_tokens=6)))
    whole = await decode.answer()
    await drain(decode.info, 30.0)
    rest = replace(spec("b", max_tokens=6), token_ids=(*PROMPT, *whole[:2]))
    await decode.send(RunLocal(spec("new")))
    assert await decode.event() == Refused("new", 0, "draining")
    await decode.send(RunLocal(rest))
    assert await decode.answer() == whole[2:]
    clock.advance(30.0)
    await decode.send(RunLocal(replace(rest, request_id="late")))
    assert await decode.event() == Refused("late", 0, "draining")
    await at_rest(running, decode="draining")


@pytest.mark.parametrize("ends", ["abort", "session"])
async def test_the_worker_stays_a_while_for_the_rest_of_an_abandoned_answer(
    running: Workers, clock: ManualClock, engine: Engine, ends: str
) -> None:
    decode = await running.session("decode-0")
    engine.free.clear()
    await decode.send(RunLocal(spec("a")))
    await engine.held()
    await drain(decode.info, 30.0)
    if ends == "abort":
        await decode.send(Abort("a", 0))
    else:
        await decode.close()
    engine.free.set()
    async with asyncio.timeout(30):
        while (await load_of(decode.info)).running:
            await asyncio.sleep(0.01)
    clock.advance(RETURN_S - 0.01)
    assert not (await load_of(decode.info)).empty
    clock.advance(0.02)
    assert (await load_of(decode.info)).empty


async def test_the_earliest_of_several_graces_holds(running: Workers, clock: ManualClock) -> None:
    decode = await running.session("decode-0")
    await decode.send(Reserve(spec("a"), 1e6, "prefill-0"))
    assert isinstance(await decode.event(), Reserved)
    for grace_s in (5.0, 30.0):
        await drain(decode.info, grace_s)
    clock.advance(5.0)
    assert (await handed_back(decode)).request_id == "a"


@pytest.mark.parametrize("grace_s", [-1.0, float("nan")])
async def test_no_worker_drains_for_less_than_no_time(running: Workers, grace_s: float) -> None:
    decode = await running.session("decode-0")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(decode.info, grace_s)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await at_rest(running)


async def test_a_prompt_that_a_prefill_worker_hands_back_is_computed_elsewhere(
    running: Workers, clock: ManualClock
) -> None:
    prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
    await decode.send(Reserve(spec("a"), 1e6, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved)
    async with silent_peer() as (address, _):
        await prefill.send(
            Prefill(spec("a"), replace(reserved.target, address=address, transport="grpc"))
        )
        first = await prefill.tokens()
        await drain(prefill.info, 0.0)
        assert (await handed_back(prefill)).request_id == "a"
    await decode.send(Abort("a", 0))
    await decode.send(RunLocal(spec("b")))
    assert (await decode.answer())[0] == first.token_ids[0]
    await at_rest(running, prefill="draining")
