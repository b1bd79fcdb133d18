"""Hand-offs between workers whose KV lies in unlike ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.worker_harness import Session, workers

from kvrelay.compiler.compiled import NativeUnavailable
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine import kernel_choice
from kvrelay.errors import Code
from kvrelay.types.requests import Handoff, SamplingParams, SequenceSpec
from kvrelay.worker_messages import Failed, HandedOff, Prefill, Reserve, Reserved, RunLocal

PROMPT = tuple(range(2, 63))


def config(prefill: dict[str, Any], decode: dict[str, Any]) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": {"dtype": "float32"},
            "kv": {"memory": "4MiB"},
            "prefill": {"chunk_tokens": 32, "kv": prefill},
            "decode": {"chunk_tokens": 32, "kv": decode},
        }
    )


def spec(request_id: str, token_ids: tuple[int, ...] = PROMPT) -> SequenceSpec:
    params = SamplingParams(temperature=0.0, max_tokens=12, seed=5, ignore_eos=True)
    return SequenceSpec(request_id, 0, token_ids, len(token_ids), params)


async def relay(
    prefill: Session, decode: Session, one: SequenceSpec, transport: str
) -> tuple[list[int], Handoff]:
    await decode.send(Reserve(one, 10.0, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved), reserved
    await prefill.send(Prefill(one, replace(reserved.target, transport=transport)))
    first = await prefill.tokens()
    handed_off = await prefill.event()
    assert isinstance(handed_off, HandedOff), handed_off
    return [*first.token_ids, *await decode.answer()], handed_off.handoff


@pytest.mark.sweep(8)
@pytest.mark.parametrize("transport", ["memory", "shm", "grpc", "gloo"])
@pytest.mark.parametrize(("theirs", "ours"), [(16, 32), (32, 16), (8, 16), (16, 24)])
async def test_unlike_block_sizes_give_the_tokens_of_the_local_path(
    tiny_model: Callable[..., Path], transport: str, theirs: int, ours: int
) -> None:
    """8 and 24 are without kernels, so the order within blocks is another one too. The second turn
    is partly cached.
    """
    unlike = config({"block_size": theirs}, {"block_size": ours})
    async with workers(tiny_model("llama"), unlike, "prefill-0", "decode-0", "decode-1") as running:
        prefill, decode, alone = [
            await running.session(name) for name in ("prefill-0", "decode-0", "decode-1")
        ]
        prompt = PROMPT
        for turn in range(2):
            one = spec(f"turn-{turn}", prompt)
            tokens, handoff = await relay(prefill, decode, one, transport)
            assert handoff.transport == transport
            cached = turn * (len(PROMPT) + 12) // ours * ours
            assert handoff.cached_blocks == cached // theirs
            assert handoff.blocks == -(-len(prompt) // theirs) - cached // theirs
            await alone.send(RunLocal(spec(f"local-{turn}", prompt)))
            assert await alone.answer() == tokens
            prompt = (*prompt, *tokens, *range(40, 70))
        for info in await running.settled():
            assert info.load.integrity_ok, info.load.integrity_error


@pytest.mark.parametrize(("prefill_dtype", "decode_dtype"), [("int8", "auto"), ("auto", "int8")])
async def test_int8_on_one_side(
    tiny_model: Callable[..., Path], prefill_dtype: str, decode_dtype: str
) -> None:
    """The wire carries the sender's bytes; what int8 costs is not more than where both sides have
    it.
    """
    unlike = config({"dtype": prefill_dtype}, {"dtype": decode_dtype})
    async with workers(tiny_model("llama"), unlike, "prefill-0", "decode-0") as running:
        prefill, decode = [await running.session(name) for name in ("prefill-0", "decode-0")]
        tokens, handoff = await relay(prefill, decode, spec("a"), "auto")
        assert len(tokens) == 12
        by_dtype = {info.worker_id: info.block_bytes for info in await running.settled()}
        assert handoff.block_bytes == by_dtype["prefill-0"] != by_dtype["decode-0"]
        for info in await running.settled():
            assert info.load.integrity_ok, info.load.integrity_error


async def test_one_side_without_kernels(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler() -> None:
        raise NativeUnavailable("there is none here")

    model, alike = tiny_model("llama"), config({}, {})
    async with workers(model, alike, "prefill-0") as ours:
        monkeypatch.setattr(kernel_choice, "check", no_compiler)
        async with workers(model, alike, "decode-0", "decode-1") as theirs:
            prefill, decode = await ours.session("prefill-0"), await theirs.session("decode-0")
            assert prefill.info.layout_hash != decode.info.layout_hash
            tokens, _ = await relay(prefill, decode, spec("a"), "shm")
            alone = await theirs.session("decode-1")
            await alone.send(RunLocal(spec("b")))
            assert await alone.answer() == tokens


async def test_another_model_is_refused(tiny_model: Callable[..., Path]) -> None:
    async with (
        workers(tiny_model("llama"), config({}, {}), "prefill-0") as ours,
        workers(tiny_model("qwen2"), config({}, {}), "decode-0") as theirs,
    ):
        prefill, decode = await ours.session("prefill-0"), await theirs.session("decode-0")
        await decode.send(Reserve(spec("a"), 10.0, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        await prefill.send(Prefill(spec("a"), reserved.target))
        failed = await prefill.event()
        while not isinstance(failed, Failed):  # the refusal may come after the first token
            failed = await prefill.event()
        assert failed.code is Code.FAILED_PRECONDITION
        assert "both workers need the same" in failed.message
