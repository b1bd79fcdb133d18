"""Requests to one decode worker, with and without speculation, and their answers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

from support.worker_harness import Session, Workers, load_of, workers

from kvrelay.config.schema import ClusterConfig
from kvrelay.types.requests import SamplingParams, SequenceSpec, ThinkingMarkers
from kvrelay.worker_messages import (
    Abort,
    HandedOff,
    Prefill,
    Reserve,
    Reserved,
    RunLocal,
    TokenBatch,
)

Answers = dict[str, tuple[tuple[int, ...], str]]
"""Token ids and finish reason by request id."""


def config(memory: str = "4MiB", /, **speculation: object) -> ClusterConfig:
    decode: dict[str, object] = {"max_batch": 12, "chunk_tokens": 16}
    if speculation:
        decode["speculation"] = {"kind": "ngram", **speculation}
    kv = {"block_size": 4, "memory": memory}
    return ClusterConfig.model_validate({"model": {"dtype": "float32"}, "kv": kv, "decode": decode})


PLAIN = config()
PARAMS = [
    SamplingParams(temperature=0.0, ignore_eos=True),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, stop_token_ids=tuple(range(40, 60)), min_tokens=7),
    SamplingParams(temperature=0.0, repetition_penalty=1.05, logprobs=2),
    SamplingParams(temperature=0.2, seed=3, ignore_eos=True),
    SamplingParams(temperature=0.1, seed=4, frequency_penalty=0.02, presence_penalty=0.1),
    SamplingParams(temperature=0.3, seed=5, top_p=0.5, logit_bias=((9, 1.0),), min_tokens=20),
    SamplingParams(temperature=1.0, seed=6, top_k=2),
    *(
        SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            thinking_token_budget=budget,
            thinking=ThinkingMarkers(None, 9),
        )
        for budget in (0, 7)
    ),
]


def specs(count: int, seed: int = 0) -> list[SequenceSpec]:
    """Prompts that repeat themselves, so that there is something to guess from the first token
    on.
    """
    draw = random.Random(seed)
    made = []
    for number in range(count):
        phrase = [draw.randrange(2, 120) for _ in range(draw.randint(1, 6))]
        prompt = tuple(phrase * draw.randint(1, 6))
        params = replace(PARAMS[number % len(PARAMS)], max_tokens=draw.choice([1, 2, 3, 20, 50]))
        made.append(
            SequenceSpec(
                f"r{number}", 0, prompt, len(prompt), replace(params, seed=params.seed or 0)
            )
        )
    return made


async def answers(
    session: Session, count: int, begun: dict[str, list[int]] | None = None
) -> Answers:
    """What comes until so many sequences have finished; checks that their tokens are numbered
    without gaps. begun: tokens that have come, by request id.
    """
    tokens = begun or {}
    finished: Answers = {}
    while len(finished) < count:
        batch = await session.event()
        assert isinstance(batch, TokenBatch), batch
        for one in batch.sequences:
            so_far = tokens.setdefault(one.request_id, [])
            assert one.index == len(so_far)
            assert len(one.logprobs) in (0, len(one.token_ids))
            so_far += one.token_ids
            if one.finish_reason is not None:
                finished[one.request_id] = tuple(so_far), one.finish_reason
    return finished


async def local(
    model: Path, settings: ClusterConfig, requests: list[SequenceSpec]
) -> tuple[Answers, int, int]:
    """Answers of one decode worker, and how many tokens it guessed and how many of these were
    right.
    """
    async with workers(model, settings, "decode-0") as running:
        session = await running.session("decode-0")
        answered: Answers = {}
        for start in range(0, len(requests), 12):
            some = requests[start : start + 12]
            for one in some:
                await session.send(RunLocal(one))
            answered |= await answers(session, len(some))
        await settled(running)
        load = await load_of(session.info)
        return answered, load.draft_tokens, load.accepted_tokens


async def settled(running: Workers) -> None:
    for info in await running.settled():
        assert info.load.integrity_ok, info.load.integrity_error


async def check_moves(
    model: Path,
    settings: ClusterConfig,
    requests: list[SequenceSpec],
    seed: int,
    plain: ClusterConfig = PLAIN,
) -> None:
    """Each request comes by hand-off from a prefill worker, and goes on at another decode worker
    after any number of tokens, and back. Its answer is that of one `plain` worker.
    """
    expected, _, _ = await local(model, plain, requests)
    draw = random.Random(seed)
    async with workers(model, settings, "prefill-0", "decode-0", "decode-1") as running:
        prefill = await running.session("prefill-0")
        decode = [await running.session(name) for name in ("decode-0", "decode-1")]
        for one in requests:
            tokens, finish = await by_hand_off(prefill, decode[0], one, until=draw.randint(1, 30))
            for attempt in range(1, 100):
                if finish is not None:
                    break
                moved = replace(one, attempt=attempt, token_ids=one.token_ids + tuple(tokens))
                more, finish = await by_run_local(
                    decode[attempt % 2], moved, until=draw.randint(1, 30)
                )
                tokens += more
            assert (tuple(tokens), finish) == expected[one.request_id]
        await settled(running)
        if settings.decode.speculation is not None:
            assert (await load_of(decode[0].info)).accepted_tokens > 0


async def check_aborts(
    model: Path, settings: ClusterConfig, requests: list[SequenceSpec] | None = None
) -> None:
    """Sequences that end in the middle, and a session that closes, leave nothing behind."""
    draw = random.Random(1)
    async with workers(model, settings, "decode-0") as running:
        session = await running.session("decode-0")
        for one in requests or specs(60):
            await session.send(RunLocal(one))
            await asyncio.sleep(draw.random() * 0.02)
            if draw.random() < 0.7:
                await session.send(Abort(*one.key))
        await session.close()
        await settled(running)


ALWAYS_FIVE = SamplingParams(temperature=0.0, seed=0, max_tokens=60, logit_bias=((5, 100.0),))


async def by_hand_off(
    prefill: Session, decode: Session, one: SequenceSpec, until: int
) -> tuple[list[int], str | None]:
    """Tokens of both workers until there are so many or the answer ends; the decode worker then
    hears of an abort.
    """
    await decode.send(Reserve(one, 10.0, "prefill-0"))
    while not isinstance(reserved := await decode.event(), Reserved):
        assert isinstance(reserved, TokenBatch), (
            "only what was on its way before an abort comes between"
        )
    await prefill.send(Prefill(one, reserved.target))
    first = await prefill.tokens()
    tokens = list(first.token_ids)
    if first.finish_reason is not None:
        await decode.send(Abort(*one.key))
        return tokens, first.finish_reason
    assert isinstance(await prefill.event(), HandedOff)
    more, finish = await tokens_until(decode, one, until)
    return tokens + more, finish


async def by_run_local(
    decode: Session, one: SequenceSpec, until: int
) -> tuple[list[int], str | None]:
    await decode.send(RunLocal(one))
    return await tokens_until(decode, one, until)


async def tokens_until(
    decode: Session, one: SequenceSpec, until: int
) -> tuple[list[int], str | None]:
    tokens: list[int] = []
    while len(tokens) < until:
        batch = await decode.event()
        assert isinstance(batch, TokenBatch), batch
        for some in batch.sequences:
            if (some.request_id, some.attempt) == one.key:
                tokens += some.token_ids
                if some.finish_reason is not None:
                    return tokens, some.finish_reason
    await decode.send(Abort(*one.key))
    return tokens, None
