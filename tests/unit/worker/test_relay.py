"""A prefill and a decode worker, real model and real hand-off, driven message by message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.worker_harness import Session, workers
from transformers import AutoModelForCausalLM

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import Code
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker_messages import (
    Abort,
    Failed,
    HandedOff,
    Prefill,
    Refused,
    Renew,
    Reserve,
    Reserved,
    RunLocal,
    TokenBatch,
)

CONFIG = ClusterConfig.model_validate(
    {
        "model": {"dtype": "float32"},
        "kv": {"block_size": 8, "memory": "4MiB"},
        "prefill": {"chunk_tokens": 16},
        "decode": {"chunk_tokens": 16, "max_batch": 4},
    }
)
PROMPT = tuple(range(2, 63))


def spec(request_id: str, token_ids: tuple[int, ...] = PROMPT, **sampling: object) -> SequenceSpec:
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": 12, "seed": 5, "ignore_eos": True, **sampling}
    )  # type: ignore[arg-type]
    return SequenceSpec(request_id, 0, token_ids, len(token_ids), params)


def oracle(model: Path, token_ids: tuple[int, ...], count: int) -> list[int]:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network.generation_config.eos_token_id = None
    output = network.generate(torch.tensor([token_ids]), max_new_tokens=count, do_sample=False)
    return list(output[0, len(token_ids) :].tolist())


async def relay(
    prefill: Session, decode: Session, one: SequenceSpec, transport: str
) -> tuple[list[int], HandedOff]:
    await decode.send(Reserve(one, 10.0, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved), reserved
    await prefill.send(Prefill(one, replace(reserved.target, transport=transport)))
    first = await prefill.tokens()
    handed_off = await prefill.event()
    assert isinstance(handed_off, HandedOff), handed_off
    assert first.prefill is not None
    return [*first.token_ids, *await decode.answer()], handed_off


async def failure(session: Session) -> object:
    """The next event but for tokens: a push may be refused before the last chunk is computed, or
    after it.
    """
    event = await session.event()
    return await session.event() if isinstance(event, TokenBatch) else event


@pytest.mark.parametrize("transport", ["memory", "shm", "grpc"])
async def test_the_relay_gives_the_tokens_of_generate(
    tiny_model: Callable[..., Path], transport: str
) -> None:
    model = tiny_model("llama")
    async with workers(model, CONFIG, "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        tokens, handed_off = await relay(prefill, decode, spec("a"), transport)
        assert tokens == oracle(model, PROMPT, 12)
        handoff = handed_off.handoff
        assert handoff.transport == transport
        assert handoff.blocks == 8
        assert handoff.bytes == handoff.blocks * handoff.block_bytes

        again, handed_off = await relay(prefill, decode, spec("b"), transport)
        assert again == tokens
        assert handed_off.handoff.cached_blocks == 7, (
            "the decode worker kept the full blocks of the prompt"
        )
        assert handed_off.handoff.blocks == 1

        await decode.send(RunLocal(spec("c")))
        assert await decode.answer() == tokens
        for info in await running.settled():
            assert info.load.integrity_ok, info.load.integrity_error


async def test_an_answer_of_one_token_needs_no_hand_off(tiny_model: Callable[..., Path]) -> None:
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        one = spec("a", max_tokens=1)
        await decode.send(Reserve(one, 10.0, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        await prefill.send(Prefill(one, reserved.target))
        assert (await prefill.tokens()).finish_reason == "length"
        await decode.send(Abort("a", 0))
        await running.settled()


async def test_a_repeated_command_is_run_once(tiny_model: Callable[..., Path]) -> None:
    async with workers(tiny_model("llama"), CONFIG, "decode-0") as running:
        decode = await running.session("decode-0")
        await decode.send(Reserve(spec("a"), 10.0, "prefill-0"))
        await decode.send(Reserve(spec("a"), 10.0, "prefill-0"))
        assert await decode.event() == await decode.event()
        await decode.send(Abort("a", 0))
        await decode.send(RunLocal(spec("b")))
        await decode.send(RunLocal(spec("b")))
        assert len(await decode.answer()) == 12
        await running.settled()


async def test_a_repeated_prefill_is_run_once(tiny_model: Callable[..., Path]) -> None:
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        await decode.send(Reserve(spec("a"), 10.0, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        for _ in range(2):
            await prefill.send(Prefill(spec("a"), reserved.target))
        await prefill.tokens()
        assert isinstance(await prefill.event(), HandedOff)
        assert len(await decode.answer()) == 11
        await running.settled()
        await prefill.send(Prefill(spec("b", tuple(range(300))), reserved.target))
        refused = await prefill.event()
        assert isinstance(refused, Failed), "nothing came between: one prefill, one account"
        assert refused.request_id == "b"


async def test_a_lease_that_is_not_renewed_ends_and_gives_its_blocks_back(
    tiny_model: Callable[..., Path],
) -> None:
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        await decode.send(Reserve(spec("a"), 0.2, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        ended = await decode.event()
        assert isinstance(ended, Failed)
        assert ended.code is Code.FAILED_PRECONDITION
        await running.settled()
        await prefill.send(Prefill(spec("a"), reserved.target))
        assert isinstance(await failure(prefill), Failed), "the frames come too late"
        await running.settled()


async def test_a_renewed_lease_lasts(tiny_model: Callable[..., Path]) -> None:
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        await decode.send(Reserve(spec("a"), 0.3, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        await decode.send(Renew((reserved.target.lease_id,), 60.0))
        await decode.send(RunLocal(spec("b", max_tokens=60)))
        assert len(await decode.answer()) == 60, (
            "takes longer than the lease did at first, or not: it holds anyway"
        )
        await prefill.send(Prefill(spec("a"), reserved.target))
        await prefill.tokens()
        assert isinstance(await prefill.event(), HandedOff)
        assert len(await decode.answer()) == 11


async def test_slots_are_refused_when_all_are_taken(tiny_model: Callable[..., Path]) -> None:
    async with workers(tiny_model("llama"), CONFIG, "decode-0") as running:
        decode = await running.session("decode-0")
        for name in "abcde":
            await decode.send(Reserve(spec(name), 10.0, "prefill-0"))
        events = [await decode.event() for _ in range(5)]
        assert [type(event) for event in events] == [Reserved] * 4 + [Refused]


async def test_when_a_router_goes_its_sequences_go(tiny_model: Callable[..., Path]) -> None:
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        await decode.send(Reserve(spec("a"), 60.0, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        await decode.send(RunLocal(spec("b", max_tokens=100)))
        await decode.tokens()
        await decode.close()
        await running.settled()
        await prefill.send(Prefill(spec("a"), reserved.target))
        assert isinstance(await failure(prefill), Failed)


async def test_a_prompt_past_the_context_is_refused_by_the_worker_itself(
    tiny_model: Callable[..., Path],
) -> None:
    async with workers(tiny_model("llama"), CONFIG, "decode-0") as running:
        decode = await running.session("decode-0")
        await decode.send(RunLocal(spec("a", tuple(range(100)) * 3)))
        failed = await decode.event()
        assert isinstance(failed, Failed)
        assert failed.code is Code.INVALID_ARGUMENT
        # Told before any step, not by the step that fails.
        assert "300 tokens do not fit into the context" in failed.message
