"""Workers whose KV is int8: half the hand-off, and refused by workers whose KV is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from worker_harness import Session, Workers, workers

from kvrelay.config import ClusterConfig
from kvrelay.engine import runner
from kvrelay.engine.native.build import NativeUnavailable
from kvrelay.errors import Code
from kvrelay.messages import Failed, HandedOff, Prefill, Reserve, Reserved, RunLocal
from kvrelay.types import Handoff, SamplingParams, SequenceSpec

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
    await decode.send(Reserve(spec("relayed"), 10.0))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved), reserved
    await prefill.send(Prefill(spec("relayed"), replace(reserved.target, transport=transport)))
    first = await prefill.tokens()
    handed_off = await prefill.event()
    assert isinstance(handed_off, HandedOff), handed_off
    return [*first.token_ids, *await decode.answer()], handed_off.handoff


@pytest.mark.parametrize("transport", ["memory", "shm", "grpc", "gloo"])
async def test_int8_kv_gives_the_tokens_of_the_local_path(tiny_model: Callable[..., Path], transport: str) -> None:
    async with workers(tiny_model("llama"), config("int8"), "prefill-0", "decode-0", "decode-1") as running:
        prefill, decode, alone = [await running.session(name) for name in ("prefill-0", "decode-0", "decode-1")]
        tokens, handoff = await relay(prefill, decode, transport)
        assert (handoff.transport, handoff.blocks) == (transport, 8)
        assert handoff.bytes == 8 * handoff.block_bytes
        assert handoff.block_bytes == 8 * 2 * 2 * 2 * (12 + 2)  # tokens, layers, K and V, heads, values and scale
        await alone.send(RunLocal(spec("local")))
        assert await alone.answer() == tokens
        for info in await running.settled():
            assert info.load.integrity_ok, info.load.integrity_error
            assert info.block_bytes == handoff.block_bytes
            assert info.load.kv_bytes == info.load.blocks_total * info.block_bytes


@pytest.mark.parametrize(("prefill_dtype", "decode_dtype"), [("int8", "auto"), ("auto", "int8")])
async def test_workers_with_unlike_kv_refuse_each_other(
    tiny_model: Callable[..., Path], prefill_dtype: str, decode_dtype: str
) -> None:
    model = tiny_model("llama")
    async with (
        workers(model, config(prefill_dtype), "prefill-0") as ours,
        workers(model, config(decode_dtype), "decode-0") as theirs,
    ):
        assert "another model, kv.dtype or kv.block_size" in await refusal(ours, theirs)


async def test_workers_of_which_one_has_no_kernels_refuse_each_other(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler() -> None:
        raise NativeUnavailable("there is none here")

    model, suited = tiny_model("llama"), config("auto", block_size=16)
    async with workers(model, suited, "prefill-0") as ours:
        monkeypatch.setattr(runner, "check", no_compiler)
        async with workers(model, suited, "decode-0") as theirs:
            assert "only one of them runs with native kernels" in await refusal(ours, theirs)


async def refusal(ours: Workers, theirs: Workers) -> str:
    prefill, decode = await ours.session("prefill-0"), await theirs.session("decode-0")
    await decode.send(Reserve(spec("a"), 10.0))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved)
    await prefill.send(Prefill(spec("a"), reserved.target))
    failed = await prefill.event()
    assert isinstance(failed, Failed)
    assert failed.code is Code.FAILED_PRECONDITION
    return failed.message
