"""Workers whose KV is int8 or int4: half and a quarter of the hand-off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.worker_harness import Session, workers

from kvrelay.config.schema import ClusterConfig
from kvrelay.types.requests import Handoff, SamplingParams, SequenceSpec
from kvrelay.worker_messages import HandedOff, Prefill, Reserve, Reserved, RunLocal

PROMPT = tuple(range(2, 63))


def config(kv_dtype: str, block_size: int = 8) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": {"dtype": "float32"},
            "kv": {"dtype": kv_dtype, "block_size": block_size, "memory": "4MiB"},
            "prefill": {"chunk_tokens": 16},
            "decode": {"chunk_tokens": 16},
        }
    )


def spec(request_id: str) -> SequenceSpec:
    params = SamplingParams(temperature=0.0, max_tokens=12, seed=5, ignore_eos=True)
    return SequenceSpec(request_id, 0, PROMPT, len(PROMPT), params)


async def relay(prefill: Session, decode: Session, transport: str) -> tuple[list[int], Handoff]:
    await decode.send(Reserve(spec("relayed"), 10.0, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved), reserved
    await prefill.send(Prefill(spec("relayed"), replace(reserved.target, transport=transport)))
    first = await prefill.tokens()
    handed_off = await prefill.event()
    assert isinstance(handed_off, HandedOff), handed_off
    return [*first.token_ids, *await decode.answer()], handed_off.handoff


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("dtype", "transport"),
    [
        *(("int8", name) for name in ("memory", "shm", "grpc", "gloo")),
        ("int4", "shm"),
        ("int4", "grpc"),
    ],
)
async def test_quantised_kv_gives_the_tokens_of_the_local_path(
    tiny_model: Callable[..., Path], dtype: str, transport: str
) -> None:
    async with workers(
        tiny_model("llama"), config(dtype), "prefill-0", "decode-0", "decode-1"
    ) as running:
        prefill, decode, alone = [
            await running.session(name) for name in ("prefill-0", "decode-0", "decode-1")
        ]
        tokens, handoff = await relay(prefill, decode, transport)
        assert (handoff.transport, handoff.blocks) == (transport, 8)
        assert handoff.bytes == 8 * handoff.block_bytes
        # Tokens, layers, K and V, heads, values and scale
        vector = {"int8": 12, "int4": 6}[dtype]
        assert handoff.block_bytes == 8 * 2 * 2 * 2 * (vector + 2)
        await alone.send(RunLocal(spec("local")))
        assert await alone.answer() == tokens
        for info in await running.settled():
            assert info.load.integrity_ok, info.load.integrity_error
            assert info.block_bytes == handoff.block_bytes
            assert info.load.kv_bytes == info.load.blocks_total * info.block_bytes
