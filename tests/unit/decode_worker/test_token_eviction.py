"""Sequences that drop tokens of their KV: what they answer depends on nothing but their tokens, and
their memory comes back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from support.speculation import (
    Answers,
    answers,
    by_hand_off,
    check_aborts,
    check_moves,
    local,
    settled,
)
from support.tiny_models import MAX_LEN
from support.worker_harness import Session, load_of, workers

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.token_eviction.compaction import Compaction
from kvrelay.engine.token_eviction.evictor import Overfull, TokenEvictor
from kvrelay.errors import Code
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.types.token_eviction import EvictionMethod
from kvrelay.worker_messages import (
    Failed,
    HandedOff,
    Prefill,
    Reserve,
    Reserved,
    RunLocal,
    TokenBatch,
)

SIZE = 16
BUDGET = 128
METHODS = pytest.mark.parametrize("method", get_args(EvictionMethod))


def config(
    method: EvictionMethod | None, memory: str = "8MiB", **speculation: Any
) -> ClusterConfig:
    decode: dict[str, object] = {"max_batch": 12, "chunk_tokens": 48}
    if speculation:
        decode["speculation"] = speculation
    eviction = None if method is None else {"method": method, "budget_tokens": BUDGET}
    kv = {"block_size": SIZE, "memory": memory, "eviction": eviction}
    return ClusterConfig.model_validate({"model": {"dtype": "float32"}, "kv": kv, "decode": decode})


def specs(count: int, seed: int = 0) -> list[SequenceSpec]:
    """Prompts and answers of any length, most beyond the budget together. Prompts repeat
    themselves, so that drafts are right.
    """
    draw = random.Random(seed)
    made = []
    for number in range(count):
        length = draw.choice([5, 60, 111, 112, 113, 127, 128, 129, 150])
        phrase = [draw.randrange(2, 120) for _ in range(draw.randint(3, 30))]
        prompt = tuple((phrase * length)[:length])
        sampling = SamplingParams(
            temperature=draw.choice([0.0, 0.5]),
            seed=number,
            max_tokens=draw.randint(1, MAX_LEN - length),
            ignore_eos=True,
        )
        made.append(SequenceSpec(f"r{number}", 0, prompt, length, sampling))
    return made


async def one_by_one(
    folder: Path, settings: ClusterConfig, requests: Sequence[SequenceSpec]
) -> Answers:
    """The answers of one decode worker that has one request at a time."""
    answered: Answers = {}
    async with workers(folder, settings, "decode-0") as running:
        session = await running.session("decode-0")
        for one in requests:
            await session.send(RunLocal(one))
            answered |= await answers(session, 1)
        await settled(running)
    return answered


def differing(found: Answers, expected: Answers) -> list[str]:
    return [name for name, answer in expected.items() if found[name] != answer]


@pytest.mark.long
@METHODS
@pytest.mark.sweep(3)
async def test_answers_do_not_depend_on_others_memory_or_drafts(
    tiny_model: Callable[..., Path], method: EvictionMethod
) -> None:
    """Few blocks preempt sequences, which are then computed again."""
    folder, requests = tiny_model("llama"), specs(24)
    expected = await one_by_one(folder, config(method), requests)
    together, _, _ = await local(folder, config(method), requests)
    assert differing(together, expected) == []
    few, _, _ = await local(folder, config(method, "200KiB"), requests)
    assert differing(few, expected) == []
    drafts = {"kind": "ngram", "tokens": 5, "min_ngram": 1, "max_batch": 12}
    drafted, _, accepted = await local(folder, config(method, **drafts), requests)
    assert accepted > 0
    assert differing(drafted, expected) == []
    every, _, _ = await local(folder, config(None), requests)
    assert len(differing(every, expected)) > len(requests) // 4, "dropped tokens are missed"


@METHODS
@pytest.mark.sweep(3)
async def test_a_sequence_goes_on_elsewhere_as_it_would_have(
    tiny_model: Callable[..., Path], method: EvictionMethod
) -> None:
    settings = config(method)
    await check_moves(tiny_model("llama"), settings, specs(12, seed=1), seed=2, plain=settings)


@pytest.mark.long
@METHODS
@pytest.mark.sweep(3)
async def test_a_sequence_that_joins_while_another_evicts_evicts_in_time(
    tiny_model: Callable[..., Path], method: EvictionMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts beyond the budget evict before their first step, and several hand-offs end while one
    of them does.
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    draw = random.Random(5)
    requests = [
        SequenceSpec(f"r{n}", 0, tuple(draw.choices(range(2, 120), k=length)), length, sampling)
        for n, length in enumerate([144, 130, 144, 150, 144, 128, 144, 135])
    ]
    expected, _, _ = await local(tiny_model("llama"), config(method), requests[:1])
    for one in requests[1:]:
        expected |= (await local(tiny_model("llama"), config(method), [one]))[0]
    plan = TokenEvictor.plan

    def slow(self: TokenEvictor, sequence: Overfull) -> Compaction:
        time.sleep(0.1)
        return plan(self, sequence)

    monkeypatch.setattr(TokenEvictor, "plan", slow)
    async with workers(tiny_model("llama"), config(method), "prefill-0", "decode-0") as running:
        prefill = await running.session("prefill-0")
        decode = await running.session("decode-0")
        for one in requests:
            await decode.send(Reserve(one, 10.0, "prefill-0"))
        for one in requests:
            reserved = await decode.event()
            assert isinstance(reserved, Reserved)
            await prefill.send(Prefill(one, reserved.target))
        first = await first_tokens(prefill, len(requests))
        rest = await later_tokens(decode, len(requests))
        await settled(running)
    found = {name: ((first[name], *tokens), end) for name, (tokens, end) in rest.items()}
    assert differing(found, expected) == []


async def test_a_hand_off_without_the_last_queries_evicts_later(
    tiny_model: Callable[..., Path],
) -> None:
    """The router does not ask for it, but no request may fail from it."""
    sampling = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    one = SequenceSpec("r0", 1, tuple(range(2, 125)), 100, sampling)
    settings = config("attention")
    async with workers(tiny_model("llama"), settings, "prefill-0", "decode-0") as running:
        prefill = await running.session("prefill-0")
        decode = await running.session("decode-0")
        tokens, finish = await by_hand_off(prefill, decode, one, until=MAX_LEN)
        await settled(running)
        load = await load_of(decode.info)
    assert (len(tokens), finish) == (80 - 23, "length")
    assert load.dropped_tokens > 0


@METHODS
@pytest.mark.sweep(3)
async def test_batches_that_did_not_fit_then_fit(
    tiny_model: Callable[..., Path], method: EvictionMethod
) -> None:
    """10 sequences of 190 tokens take 120 blocks; with a budget of 8 blocks they take 80."""
    folder = tiny_model("llama")
    sampling = SamplingParams(temperature=0.0, max_tokens=180, ignore_eos=True)
    prompts = [tuple(range(2 + number, 12 + number)) for number in range(10)]
    requests = [
        SequenceSpec(f"r{number}", 0, prompt, len(prompt), sampling)
        for number, prompt in enumerate(prompts)
    ]
    preempted = []
    for settings in (config(None, memory_for(90)), config(method, memory_for(90))):
        async with workers(folder, settings, "decode-0") as running:
            session = await running.session("decode-0")
            for one in requests:
                await session.send(RunLocal(one))
            await answers(session, len(requests))
            await settled(running)
            preempted.append((await load_of(session.info)).preemptions)
    assert preempted[0] > 0
    assert preempted[1] == 0


@METHODS
@pytest.mark.sweep(3)
async def test_a_shared_prefix_stays_whole(
    tiny_model: Callable[..., Path], method: EvictionMethod
) -> None:
    """A sequence that drops tokens of a prompt leaves the prompt's KV to others, in the prefix
    cache and beside it.
    """
    prompt = tuple(range(2, 114))
    endless = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    brief = replace(endless, max_tokens=12)
    requests = [
        SequenceSpec("long", 0, prompt, len(prompt), endless),
        SequenceSpec("beside", 0, (*prompt[:96], 7), 97, endless),
        SequenceSpec("after", 0, (*prompt[:96], 9), 97, brief),
    ]
    folder = tiny_model("llama")
    expected = await one_by_one(folder, config(method), requests)
    found: Answers = {}
    async with workers(folder, config(method), "decode-0") as running:
        session = await running.session("decode-0")
        await session.send(RunLocal(requests[0]))
        first = await session.tokens()
        await session.send(RunLocal(requests[1]))
        found |= await answers(session, 2, begun={"long": list(first.token_ids)})
        await session.send(RunLocal(requests[2]))
        found |= await answers(session, 1)
        await settled(running)
    assert differing(found, expected) == []


@METHODS
@pytest.mark.sweep(3)
async def test_what_ends_in_the_middle_leaves_nothing(
    tiny_model: Callable[..., Path], method: EvictionMethod
) -> None:
    await check_aborts(tiny_model("llama"), config(method), specs(60, seed=3))


@METHODS
@pytest.mark.sweep(3)
async def test_a_step_waits_for_one_eviction_at_most(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, method: EvictionMethod
) -> None:
    """Sequences of equal lengths are due at the same time; another one runs beside them."""
    happened: list[str] = []
    plan, run = TokenEvictor.plan, ModelRunner.run

    def planned(self: TokenEvictor, *args: Any) -> Any:
        happened.append("eviction")
        return plan(self, *args)

    def ran(self: ModelRunner, *args: Any) -> Any:
        happened.append("step")
        return run(self, *args)

    monkeypatch.setattr(TokenEvictor, "plan", planned)
    monkeypatch.setattr(ModelRunner, "run", ran)
    sampling = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    requests = [SequenceSpec(f"r{n}", 0, (5 + n, 7, 9), 3, sampling) for n in range(6)]
    requests.append(SequenceSpec("beside", 0, (3, 4, 5, 6), 4, replace(sampling, max_tokens=180)))
    expected = await one_by_one(tiny_model("llama"), config(method), requests)
    happened.clear()
    async with workers(tiny_model("llama"), config(method), "decode-0") as running:
        session = await running.session("decode-0")
        for one in requests:
            await session.send(RunLocal(one))
        found = await answers(session, len(requests))
        await settled(running)
    assert happened.count("eviction") > 2 * len(requests)
    assert ("eviction", "eviction") not in pairwise(happened)
    assert differing(found, expected) == []


async def test_a_sequence_that_cannot_be_compacted_fails_alone(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    move = TokenEvictor.move
    poisoned: list[int] = []

    def fails_once(self: TokenEvictor, blocks: Sequence[int], plan: Any) -> None:
        if not poisoned:
            poisoned.append(1)
            raise RuntimeError("the memory is gone")
        move(self, blocks, plan)

    monkeypatch.setattr(TokenEvictor, "move", fails_once)
    sampling = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    requests = [SequenceSpec(f"r{n}", 0, (5 + n, 7, 9), 3, sampling) for n in range(3)]
    async with workers(tiny_model("llama"), config("attention"), "decode-0") as running:
        session = await running.session("decode-0")
        for one in requests:
            await session.send(RunLocal(one))
        ended: dict[str, object] = {}
        while len(ended) < 3:
            event = await session.event()
            if isinstance(event, Failed):
                ended[event.request_id] = event.code
                assert "the memory is gone" in event.message
                continue
            assert isinstance(event, TokenBatch)
            for one in event.sequences:
                if one.finish_reason is not None:
                    ended[one.request_id] = one.finish_reason
        await settled(running)
    assert sorted(map(str, ended.values())) == sorted(map(str, [Code.INTERNAL, "length", "length"]))


async def first_tokens(prefill: Session, count: int) -> dict[str, int]:
    """The tokens that a prefill worker samples, by request id, once all are handed off."""
    found: dict[str, int] = {}
    handed = 0
    while handed < count:
        event = await prefill.event()
        if isinstance(event, HandedOff):
            handed += 1
            continue
        assert isinstance(event, TokenBatch), event
        found |= {one.request_id: one.token_ids[0] for one in event.sequences}
    return found


async def later_tokens(decode: Session, count: int) -> Answers:
    """The answers after their first tokens."""
    tokens: dict[str, list[int]] = {}
    finished: Answers = {}
    while len(finished) < count:
        event = await decode.event()
        assert isinstance(event, TokenBatch), event
        for one in event.sequences:
            tokens.setdefault(one.request_id, []).extend(one.token_ids)
            if one.finish_reason is not None:
                finished[one.request_id] = tuple(tokens[one.request_id]), one.finish_reason
    return finished


def memory_for(blocks: int) -> str:
    """Of the tiny model in float32: 2 layers, 2 heads of 12 values, K and V."""
    return f"{blocks * SIZE * 2 * 2 * 2 * 12 * 4}B"


async def test_the_router_is_told_what_an_answer_did_not_attend_to(
    tiny_model: Callable[..., Path],
) -> None:
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=100, ignore_eos=True)
    long = SequenceSpec("long", 0, tuple(range(2, 62)), 60, sampling)
    short = SequenceSpec("short", 0, tuple(range(2, 22)), 20, replace(sampling, max_tokens=9))
    async with workers(tiny_model("llama"), config("window"), "decode-0") as running:
        session = await running.session("decode-0")
        told: dict[str, list[int]] = {"short": [], "long": []}
        for one in (short, long):
            await session.send(RunLocal(one))
            finished = False
            while not finished:
                batch = await session.event()
                assert isinstance(batch, TokenBatch)
                for some in batch.sequences:
                    told[some.request_id].append(some.dropped_tokens)
                    finished = some.finish_reason is not None
        await settled(running)
        dropped = (await load_of(session.info)).dropped_tokens
    assert set(told["short"]) == {0}
    assert told["long"] == sorted(told["long"])
    assert (told["long"][0], told["long"][-1]) == (0, dropped)
    assert dropped > 0
