"""Workers of a model with latent attention: each latent vector is kept, sent and stored once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tiers_first import read_always
from support.worker_harness import Session, load_of, workers

from kvrelay.config.schema import ClusterConfig
from kvrelay.types.requests import Handoff, PrefillTimings, SamplingParams, SequenceSpec
from kvrelay.worker.tiers import tier_fetcher
from kvrelay.worker_messages import HandedOff, Prefill, Reserve, Reserved, RunLocal

SIZE = 16
# Bytes of a block in float32: tokens, layers, and the latent vector with its positions.
BLOCK_BYTES = SIZE * 2 * (16 + 8) * 4
PROMPT = tuple(2 + (3 * place + place * place) % 120 for place in range(61))


def config(memory: int, dtype: str = "auto", **kv: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": {"dtype": "float32"},
            "kv": {"dtype": dtype, "block_size": SIZE, "memory": memory, **kv},
            "prefill": {"chunk_tokens": 32},
            "decode": {"chunk_tokens": 32},
        }
    )


def spec(request_id: str, prompt: tuple[int, ...] = PROMPT) -> SequenceSpec:
    params = SamplingParams(temperature=0.0, max_tokens=12, seed=5, ignore_eos=True)
    return SequenceSpec(request_id, 0, prompt, len(prompt), params)


async def relay(
    prefill: Session, decode: Session, request_id: str, transport: str
) -> tuple[list[int], Handoff, PrefillTimings]:
    await decode.send(Reserve(spec(request_id), 10.0, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved), reserved
    await prefill.send(Prefill(spec(request_id), replace(reserved.target, transport=transport)))
    first = await prefill.tokens()
    handed_off = await prefill.event()
    assert isinstance(handed_off, HandedOff), handed_off
    assert first.prefill is not None
    tokens = [*first.token_ids, *await decode.answer()]
    return tokens, handed_off.handoff, first.prefill


@pytest.mark.parametrize(
    ("dtype", "transport", "block_bytes"),
    [
        ("auto", "shm", BLOCK_BYTES),
        ("auto", "grpc", BLOCK_BYTES),
        ("int8", "grpc", SIZE * 2 * (24 + 2)),
        ("int4", "memory", SIZE * 2 * (12 + 2)),
    ],
)
@pytest.mark.sweep(4)
async def test_a_hand_off_sends_each_latent_vector_once(
    tiny_model: Callable[..., Path], dtype: str, transport: str, block_bytes: int
) -> None:
    """The second prompt is in the caches of both workers."""
    names = ("prefill-0", "decode-0", "decode-1")
    async with workers(tiny_model("deepseek_v3"), config(2**20, dtype), *names) as running:
        prefill, decode, alone = [await running.session(name) for name in names]
        tokens, handoff, _ = await relay(prefill, decode, "first", transport)
        assert (handoff.blocks, handoff.block_bytes) == (4, block_bytes)
        assert handoff.bytes == 4 * block_bytes
        again, handoff, timings = await relay(prefill, decode, "second", transport)
        assert timings.cached_tokens == 48
        assert handoff.bytes == block_bytes
        await alone.send(RunLocal(spec("local")))
        assert await alone.answer() == tokens == again
        for info in await running.settled():
            assert info.load.integrity_ok, info.load.integrity_error
            assert info.block_bytes == block_bytes


async def test_blocks_come_back_from_disk(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_fetcher, "_SHORTEST_S", 30.0)
    monkeypatch.setattr(tier_fetcher, "_LONGEST_S", 60.0)
    read_always(monkeypatch)
    prompts = [(2 + number, *PROMPT[1:]) for number in range(8)]
    tiers = [{"kind": "disk", "path": str(tmp_path), "size": "1MiB"}]
    async with workers(
        tiny_model("deepseek_v3"), config(24 * BLOCK_BYTES, tiers=tiers), "decode-0"
    ) as running:
        decode = await running.session("decode-0")
        found = []
        for round_ in range(2):
            for number, prompt in enumerate(prompts):
                await decode.send(RunLocal(spec(f"{round_}-{number}", prompt)))
                first = await decode.tokens()
                assert first.prefill is not None
                assert not round_ or first.prefill.cached_tokens == 48
                found.append([*first.token_ids, *await decode.answer()])
            async with asyncio.timeout(20):
                while (await load_of(decode.info)).tiers[0].stored < 8:
                    await asyncio.sleep(0.02)
        assert first.prefill.fetched_from == "disk"
        assert found[:8] == found[8:]
