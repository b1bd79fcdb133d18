"""What one request, or one router, does wrong is its own affair alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.worker_harness import Session, workers

from kv_transfer.transports.named import NamedOutbound
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.base.step_input import OnLayer
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import Sampled
from kvrelay.engine.sequence_segment import Segment
from kvrelay.errors import Code
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.wire.transfer import KvBlocks
from kvrelay.worker_messages import (
    Abort,
    Failed,
    HandedOff,
    Prefill,
    Reserve,
    Reserved,
    RunLocal,
    TokenBatch,
)

CONFIG = ClusterConfig.model_validate(
    {
        "model": {"dtype": "float32"},
        "kv": {"block_size": 8, "memory": "4MiB"},
        "decode": {"max_batch": 4},
        "slo": None,  # so that a prompt is one step, also beside answers
    }
)
PROMPT = tuple(range(2, 63))


def spec(
    request_id: str, token_ids: tuple[int, ...] = PROMPT, max_tokens: int = 12
) -> SequenceSpec:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=5, ignore_eos=True)
    return SequenceSpec(request_id, 0, token_ids, len(token_ids), params)


async def failure(session: Session) -> Failed:
    event = await session.event()
    assert isinstance(event, Failed), event
    return event


async def test_a_transport_that_cannot_work_fails_its_request_and_not_the_worker(
    tiny_model: Callable[..., Path],
) -> None:
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        for transport in ("nccl", "auto"):
            await decode.send(Reserve(spec(transport), 5.0, "prefill-0"))
            reserved = await decode.event()
            assert isinstance(reserved, Reserved)
            await prefill.send(
                Prefill(spec(transport), replace(reserved.target, transport=transport))
            )
            if transport == "nccl":
                assert (await failure(prefill)).code is Code.UNIMPLEMENTED
                await decode.send(Abort(transport, 0))
        await prefill.tokens()
        assert isinstance(await prefill.event(), HandedOff)
        await decode.answer()
        await running.settled()


async def test_a_push_that_breaks_in_an_unforeseen_way_ends_its_request(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(outbound: NamedOutbound, header: KvBlocks, blocks: Sequence[int]) -> KvBlocks:
        raise OSError("the memory is unwell")

    monkeypatch.setattr(NamedOutbound, "pack", broken)
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        await decode.send(Reserve(spec("a"), 5.0, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        await prefill.send(Prefill(spec("a"), reserved.target))
        await prefill.tokens()
        failed = await failure(prefill)
        assert failed.code is Code.INTERNAL
        assert "the memory is unwell" in failed.message
        await decode.send(Abort("a", 0))
        await running.settled()


async def test_nobody_finds_blocks_that_a_failed_step_did_not_compute(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = True
    run = ModelRunner.run

    def broken(
        runner: ModelRunner, segments: Sequence[Segment], on_layer: OnLayer | None = None
    ) -> list[list[Sampled]]:
        if fails and len(segments[0].token_ids) == len(PROMPT):
            raise RuntimeError("the device is unwell")
        return run(runner, segments, on_layer)

    monkeypatch.setattr(ModelRunner, "run", broken)
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        await decode.send(Reserve(spec("relayed"), 60.0, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        await prefill.send(Prefill(spec("relayed"), reserved.target))
        assert (await failure(prefill)).code is Code.INTERNAL
        await decode.send(RunLocal(spec("local")))
        assert (await failure(decode)).code is Code.INTERNAL
        fails = False
        await decode.send(Abort("relayed", 0))
        await running.settled()
        await decode.send(RunLocal(spec("local")))
        found = await decode.tokens()
        await decode.answer()
        await decode.send(Reserve(spec("again"), 60.0, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        await prefill.send(Prefill(spec("again"), reserved.target))
        for first in (found, await prefill.tokens()):
            assert first.prefill is not None
            assert first.prefill.cached_tokens == 0


async def test_routers_with_requests_of_one_name_do_not_meet(
    tiny_model: Callable[..., Path],
) -> None:
    async with workers(tiny_model("llama"), CONFIG, "decode-0") as running:
        one, two = await running.session("decode-0"), await running.session("decode-0")
        await one.send(RunLocal(spec("a", max_tokens=60)))
        await one.send(Reserve(spec("b"), 5.0, "prefill-0"))
        await two.send(Abort("a", 0))
        await two.send(RunLocal(spec("a")))
        await two.send(Reserve(spec("b"), 5.0, "prefill-0"))
        for _ in range(2):
            refused = await failure(two)
            assert refused.code is Code.FAILED_PRECONDITION
            assert "another router" in refused.message
        async with asyncio.timeout(30):
            while not isinstance(await one.event(), Reserved):
                pass
        await one.send(Abort("a", 0))
        await one.send(RunLocal(spec("c")))
        await one.close()
        await two.send(RunLocal(replace(spec("a"), attempt=1)))
        assert len(await two.answer()) == 12
        await running.settled()


@pytest.mark.parametrize("token_ids", [(), (5, 10**6), tuple(range(100)) * 3])
async def test_a_prompt_that_the_model_cannot_run_spoils_no_step(
    tiny_model: Callable[..., Path], token_ids: tuple[int, ...]
) -> None:
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        await decode.send(Reserve(spec("a"), 5.0, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        await prefill.send(Prefill(spec("bad", token_ids), reserved.target))
        assert (await failure(prefill)).code is Code.INVALID_ARGUMENT
        for bad in (
            RunLocal(spec("bad", token_ids)),
            Reserve(spec("bad", token_ids), 5.0, "prefill-0"),
        ):
            await decode.send(bad)
            assert (await failure(decode)).code is Code.INVALID_ARGUMENT
        await prefill.send(Prefill(spec("a"), reserved.target))
        await prefill.tokens()
        assert isinstance(await prefill.event(), HandedOff)
        assert len(await decode.answer()) == 11
        await running.settled()


async def test_a_token_that_the_model_does_not_have_is_its_own_requests_affair(
    tiny_model: Callable[..., Path],
) -> None:
    async with workers(tiny_model("llama"), CONFIG, "decode-0") as running:
        decode = await running.session("decode-0")
        await decode.send(RunLocal(spec("good", max_tokens=30)))
        for name, token_id in (("large", 10**6), ("negative", -1)):
            await decode.send(RunLocal(spec(name, (2, 3, token_id))))
        refused, tokens = {}, 0
        while tokens < 30:
            event = await decode.event()
            if isinstance(event, Failed):
                refused[event.request_id] = event.code
            else:
                assert isinstance(event, TokenBatch)
                tokens += sum(len(one.token_ids) for one in event.sequences)
        assert refused == dict.fromkeys(("large", "negative"), Code.INVALID_ARGUMENT)
        await running.settled()
