"""A prompt that waits for blocks starts when they come back, whoever held them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from support.worker_harness import Session, Workers, load_of, workers

from kv_transfer.prefix_export import PrefixExport
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import NotFound
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.types.workers import WorkerInfo
from kvrelay.worker_messages import Abort, Prefill, Refused, Reserve, Reserved, RunLocal
from prefill_worker.fetch_cost_model import FetchCostModel

SIZE = 16
MAX_LEN = 176
CONFIG = ClusterConfig.model_validate(
    {
        "model": {"dtype": "float32", "max_model_len": 190},
        "kv": {"block_size": SIZE, "memory": "100KiB"},
        "prefill": {"chunk_tokens": 256},
        "decode": {"chunk_tokens": 256},
    }
)


def spec(request_id: str, first: int, tokens: int, max_tokens: int = 4) -> SequenceSpec:
    token_ids = tuple((first + 7 * number) % 90 + 2 for number in range(tokens))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=1, ignore_eos=True)
    return SequenceSpec(request_id, 0, token_ids, tokens, params)


class Export:
    """An export of blocks that does not end by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.released = asyncio.Event(), asyncio.Event()
        monkeypatch.setattr(PrefixExport, "_push", self._push)
        monkeypatch.setattr(FetchCostModel, "is_fetch_faster", lambda _, tokens, __: bool(tokens))

    async def _push(self, *_: Any) -> None:
        self.begun.set()
        await self.released.wait()
        raise NotFound("the export is over")


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch) -> Export:
    return Export(monkeypatch)


@pytest.fixture
async def running(tiny_model: Callable[..., Path], export: Export) -> AsyncIterator[Workers]:
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0", "decode-1") as made:
        yield made
        export.released.set()


async def fetching(running: Workers, export: Export) -> tuple[Session, Session, SequenceSpec]:
    """decode-0, prefill-0 and a prompt of prefill-0 that fetches most of its blocks from decode-0.
    Both hold the blocks.
    """
    decode, other = await running.session("decode-0"), await running.session("decode-1")
    prefill = await running.session("prefill-0")
    tokens = MAX_LEN - 24
    await decode.send(RunLocal(spec("first", 0, tokens)))
    await decode.answer()
    again = spec("again", 0, tokens + 20)
    await other.send(Reserve(again, 60.0, "prefill-0"))
    reserved = await other.event()
    assert isinstance(reserved, Reserved)
    source = decode.source(again, tokens // SIZE * SIZE, prefill.info)
    await prefill.send(Prefill(again, reserved.target, source))
    await asyncio.wait_for(export.begun.wait(), 60)
    await other.send(Abort(*again.key))
    return decode, prefill, again


async def waits(info: WorkerInfo) -> None:
    async with asyncio.timeout(60):
        while not (await load_of(info)).waiting:
            await asyncio.sleep(0.02)


@pytest.mark.long
async def test_blocks_of_an_export_wake_a_prompt(running: Workers, export: Export) -> None:
    decode, _, _ = await fetching(running, export)
    await decode.send(RunLocal(spec("waits", 50, MAX_LEN)))
    await waits(decode.info)
    export.released.set()
    async with asyncio.timeout(60):
        assert len(await decode.answer()) == 4


async def test_blocks_of_a_fetch_that_is_aborted_wake_a_prompt(
    running: Workers, export: Export
) -> None:
    _, prefill, again = await fetching(running, export)
    other = await running.session("decode-1")
    large = spec("waits", 50, MAX_LEN)
    await other.send(Reserve(large, 60.0, "prefill-0"))
    reserved = await other.event()
    assert isinstance(reserved, Reserved)
    await prefill.send(Prefill(large, reserved.target))
    await waits(prefill.info)
    await prefill.send(Abort(*again.key))
    async with asyncio.timeout(60):
        assert len((await prefill.tokens()).token_ids) == 1


async def test_a_reservation_does_not_take_the_blocks_that_a_waiting_prompt_needs(
    running: Workers, export: Export
) -> None:
    decode, _, _ = await fetching(running, export)
    await decode.send(RunLocal(spec("kept", 60, SIZE + 1)))
    await decode.answer()
    await decode.send(RunLocal(spec("waits", 50, MAX_LEN)))
    await waits(decode.info)
    cached = (await load_of(decode.info)).blocks_cached
    await decode.send(Reserve(spec("later", 70, 20), 60.0, "prefill-0"))
    assert await decode.event() == Refused("later", 0, "full")
    assert (await load_of(decode.info)).blocks_cached == cached > 0, "nothing was evicted for it"
    export.released.set()
    async with asyncio.timeout(60):
        assert len(await decode.answer()) == 4
