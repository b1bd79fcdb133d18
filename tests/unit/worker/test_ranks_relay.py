"""Hand-offs between workers of unlike degrees of tensor parallelism, and a worker whose rank
freezes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.one_process import answer_of
from support.worker_harness import Session, Workers, workers

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.parallel.group import RankGroup
from kvrelay.engine.runner import ModelRunner
from kvrelay.types.requests import Handoff, PrefillTimings, SamplingParams, SequenceSpec
from kvrelay.worker.steps import step_watch
from kvrelay.worker.steps.step_watch import StepHung
from kvrelay.worker_messages import (
    HandedOff,
    Prefill,
    PrefixSource,
    Reserve,
    Reserved,
    RunLocal,
    TokenBatch,
)
from prefill_worker.fetch_cost_model import FetchCostModel

NEW_TOKENS = 12
MANY_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, seed=5, ignore_eos=True)
PROMPT = tuple(range(2, 63))
BLOCK = 8
FEW_BLOCKS = 20  # of the test's model in float32
SECOND_TURN = tuple(range(40, 70))


def config(prefill: int, decode: int, **more: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": {"dtype": "float32", "max_model_len": 128},
            "kv": {"memory": FEW_BLOCKS * 3072, "block_size": BLOCK, **more},
            "prefill": {"chunk_tokens": 32, "tensor_parallel": prefill},
            "decode": {"chunk_tokens": 32, "tensor_parallel": decode},
            # On a slow machine, prompts would take so many steps that answers never meet.
            "slo": None,
        }
    )


def spec(request_id: str, prompt: tuple[int, ...], salt: str) -> SequenceSpec:
    return SequenceSpec(request_id, 0, prompt, len(prompt), GREEDY, salt)


async def relay(
    sender: Session,
    receiver: Session,
    one: SequenceSpec,
    transport: str,
    source: PrefixSource | None,
) -> tuple[list[int], Handoff, PrefillTimings]:
    await receiver.send(Reserve(one, 10.0, "prefill-0"))
    reserved = await receiver.event()
    assert isinstance(reserved, Reserved), reserved
    await sender.send(Prefill(one, replace(reserved.target, transport=transport), source))
    first = await sender.tokens()
    handed_off = await sender.event()
    assert isinstance(handed_off, HandedOff), handed_off
    assert first.prefill is not None
    return [*first.token_ids, *await receiver.answer()], handed_off.handoff, first.prefill


def greedy(
    folder: Path, prompt: tuple[int, ...], kv_dtype: str, count: int = NEW_TOKENS
) -> list[int]:
    """What one process answers, all in one step and then token by token."""
    runner = ModelRunner.load(
        str(folder), kv_bytes=4 << 20, kv_dtype=kv_dtype, block_size=BLOCK, kernels="torch"
    )  # type: ignore[arg-type]
    return answer_of(runner, prompt, GREEDY, count)


async def each_way(model: Path, running: Workers, kv_dtype: str) -> None:
    """Over each transport; in a second turn, whose beginning the decode worker has and lends; and
    on the local path.
    """
    first = greedy(model, PROMPT, kv_dtype)
    longer = (*PROMPT, *first, *SECOND_TURN)
    second = greedy(model, longer, kv_dtype)
    sender, receiver = [await running.session(name) for name in ("prefill-0", "decode-0")]
    assert sender.info.layout_hash != receiver.info.layout_hash
    for transport in ("memory", "shm", "grpc", "gloo"):  # the salt keeps one's blocks from the next
        one = spec(f"first-{transport}", PROMPT, salt=transport)
        tokens, handoff, _ = await relay(sender, receiver, one, transport, None)
        assert (tokens, handoff.transport) == (first, transport)
        assert handoff.cached_blocks == 0
        one = spec(f"second-{transport}", longer, salt=transport)
        source = receiver.source(one, len(PROMPT) + NEW_TOKENS - 1, sender.info)
        tokens, handoff, timings = await relay(sender, receiver, one, transport, source)
        assert tokens == second
        assert (
            handoff.cached_blocks
            == timings.cached_tokens // BLOCK
            == (len(PROMPT) + NEW_TOKENS - 1) // BLOCK
        )
        assert timings.fetched_tokens == 2 * BLOCK
    await receiver.send(RunLocal(spec("local", PROMPT, "")))
    assert await receiver.answer() == first
    for info in await running.settled():
        assert info.load.integrity_ok, info.load.integrity_error


async def with_too_few_blocks(model: Path, running: Workers) -> None:
    """Three sequences of 6 blocks, of which not even two fit when they have grown to 11."""
    decode = await running.session("decode-0")
    prompts = [(9 + i, *PROMPT[:44]) for i in range(3)]
    longer = replace(GREEDY, max_tokens=MANY_TOKENS)
    for i, prompt in enumerate(prompts):
        await decode.send(RunLocal(replace(spec(f"{i}", prompt, "few"), sampling=longer)))
    answers: dict[str, list[int]] = {f"{i}": [] for i in range(3)}
    while min(map(len, answers.values())) < MANY_TOKENS:
        event = await decode.event()
        assert isinstance(event, TokenBatch), event
        for tokens in event.sequences:
            answers[tokens.request_id] += tokens.token_ids
    assert [answers[f"{i}"] for i in range(3)] == [
        greedy(model, one, "auto", MANY_TOKENS) for one in prompts
    ]
    assert any(info.load.preemptions for info in await running.settled()), "one was preempted"


@pytest.fixture(autouse=True)
def _always_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of this model, computing a block is sooner
    monkeypatch.setattr(FetchCostModel, "is_fetch_faster", lambda *_: True)


@pytest.mark.long
@pytest.mark.parametrize("kv_dtype", [pytest.param("auto", marks=pytest.mark.long), "int8"])
async def test_two_ranks_prefill_and_one_decodes(
    tiny_model: Callable[..., Path], kv_dtype: str
) -> None:
    async with workers(
        tiny_model("llama"), config(2, 1, dtype=kv_dtype), "prefill-0", "decode-0"
    ) as running:
        await each_way(tiny_model("llama"), running, kv_dtype)
        degrees = {
            info.worker_id: info.tensor_parallel for info in await running.registry.workers()
        }
        assert degrees == {"prefill-0": 2, "decode-0": 1}


@pytest.mark.long
async def test_one_prefills_and_two_ranks_decode_of_which_one_freezes(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends its worker, and goes with it."""
    groups: list[RankGroup] = []
    begin = RankGroup.begin

    def noted(group: RankGroup, *arguments: Any) -> None:
        groups.append(group)
        begin(group, *arguments)

    monkeypatch.setattr(RankGroup, "begin", noted)

    async def ask() -> None:
        async with workers(tiny_model("llama"), config(1, 2), "prefill-0", "decode-0") as running:
            await each_way(tiny_model("llama"), running, "auto")
            await with_too_few_blocks(tiny_model("llama"), running)
            decode = await running.session("decode-0")
            # Only now: until then the machine may be slow
            monkeypatch.setattr(step_watch, "LEAST_S", 1.0)
            os.kill(groups[0].pids[0], signal.SIGSTOP)
            await decode.send(RunLocal(spec("a", PROMPT, "")))
            await asyncio.Event().wait()  # the worker's end ends this

    with pytest.raises(ExceptionGroup) as caught:
        await ask()
    assert caught.group_contains(StepHung)
    (group,) = groups
    assert group.lost().endswith("ended with signal 9")
    group.close()
