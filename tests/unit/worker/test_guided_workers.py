"""Answers with guidance on real workers: the same over each path, and a start that waits for
nobody.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.guided_model import EOS, PROMPT, guided_model, json_schema, params
from support.worker_harness import Session, workers

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.sampling.grammar_trial import GrammarTrial
from kvrelay.errors import Code, Internal, KvRelayError
from kvrelay.types.requests import Guidance, SamplingParams, SequenceSpec
from kvrelay.worker.guided_starts import GuidedStarts
from kvrelay.worker_messages import (
    Abort,
    Event,
    Failed,
    HandedOff,
    Prefill,
    Reserve,
    Reserved,
    RunLocal,
    TokenBatch,
)

LIST = json_schema(
    {
        "type": "array",
        "items": {"enum": ["north", "south", "east", "west"]},
        "minItems": 6,
        "maxItems": 9,
    }
)


def config(**decode: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": {"dtype": "float32"},
            "kv": {"block_size": 8, "memory": "16MiB"},
            "prefill": {"chunk_tokens": 16},
            "decode": {"chunk_tokens": 16, "max_batch": 12, **decode},
        }
    )


# Blocks for one sequence of 200 tokens, each of 8 tokens in 2 layers: K and V of 2 heads of 12
# float32 values.
BLOCKS, BLOCK_BYTES = 26, 8 * 2 * 2 * 2 * 12 * 4
SPECULATION = {"kind": "ngram", "tokens": 5, "min_ngram": 1, "max_ngram": 3, "max_batch": 12}


def spec(
    request_id: str, guidance: Guidance | None = LIST, emitted: tuple[int, ...] = (), **options: Any
) -> SequenceSpec:
    plain = SamplingParams(temperature=0.0, seed=1, max_tokens=40, ignore_eos=True)
    sampling = plain if guidance is None else params(guidance, max_tokens=300, **options)
    return SequenceSpec(request_id, 0, PROMPT + emitted, len(PROMPT), sampling)


async def answers(session: Session, *specs: SequenceSpec) -> dict[str, tuple[int, ...]]:
    """What the worker says to all of them at once."""
    for one in specs:
        await session.send(RunLocal(one))
    tokens: dict[str, tuple[int, ...]] = {one.request_id: () for one in specs}
    left = len(specs)
    while left:
        batch = await session.event()
        assert isinstance(batch, TokenBatch), batch
        for item in batch.sequences:
            tokens[item.request_id] += item.token_ids
            left -= item.finish_reason is not None
    return tokens


async def relayed(prefill: Session, decode: Session, one: SequenceSpec) -> tuple[int, ...]:
    await decode.send(Reserve(one, 10.0, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved), reserved
    await prefill.send(Prefill(one, reserved.target))
    first = await prefill.tokens()
    assert isinstance(await prefill.event(), HandedOff)
    return (*first.token_ids, *await decode.answer())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return guided_model(tmp_path_factory.mktemp("guided"))


async def test_each_path_gives_the_same_tokens(model: Path) -> None:
    specs = [spec(f"r{seed}", seed=seed, temperature=0.8) for seed in range(3)]
    free = spec("free", None)
    async with workers(model, config(), "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        alone = {one.request_id: (await answers(decode, one))[one.request_id] for one in specs}
        assert all(tokens[-1] == EOS for tokens in alone.values())
        plain = (await answers(decode, free))["free"]
        together = await answers(
            decode, *(replace(one, attempt=1) for one in (specs[0], free, *specs[1:]))
        )
        assert together == alone | {"free": plain}
        for one in specs:
            assert await relayed(prefill, decode, replace(one, attempt=2)) == alone[one.request_id]
        whole = alone["r0"]
        for emitted in range(1, len(whole), 3):
            rest = spec("r0", seed=0, temperature=0.8, emitted=whole[:emitted])
            rest = replace(rest, attempt=10 + emitted)
            assert (await answers(decode, rest))["r0"] == whole[emitted:]
        await running.settled()
    drafted = {"kind": "draft", "model": str(model), "tokens": 4}
    for speculation in (SPECULATION, drafted):
        async with workers(model, config(speculation=speculation), "decode-0") as running:
            session = await running.session("decode-0")
            assert await answers(session, *specs, free) == alone | {"free": plain}
            (info,) = await running.settled()
            assert 0 < info.load.accepted_tokens < info.load.draft_tokens


async def test_a_preempted_answer_continues_as_it_would_have(model: Path) -> None:
    specs = [spec(f"r{seed}", seed=seed) for seed in range(6)]
    async with workers(model, config(), "decode-0") as running:
        alone = await answers(await running.session("decode-0"), *specs)
    tight = ClusterConfig.model_validate(
        {
            "model": {"dtype": "float32", "max_model_len": 200},
            "kv": {"block_size": 8, "memory": BLOCKS * BLOCK_BYTES},
            "decode": {"chunk_tokens": 16, "max_batch": 12},
        }
    )
    async with workers(model, tight, "decode-0") as running:
        assert await answers(await running.session("decode-0"), *specs) == alone
        (info,) = await running.settled()
        assert info.load.preemptions > 0


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (spec("r", Guidance("regex", "(")), "regular expression: unclosed group"),
        (spec("r", Guidance("regex", "a" * 70000)), "guidance has 70000 bytes"),
        (spec("r", ignore_eos=True), "ignore_eos is set"),
        (spec("r", min_tokens=1), "min_tokens is set"),
        (spec("r", emitted=(523,)), "token 523 at position 7 does not follow"),
    ],
)
async def test_a_worker_trusts_no_router(model: Path, broken: SequenceSpec, reason: str) -> None:
    async with workers(model, config(), "prefill-0", "decode-0") as running:
        session = await running.session("decode-0")
        await session.send(RunLocal(broken))
        failed = await session.event()
        assert isinstance(failed, Failed)
        assert failed.code is Code.INVALID_ARGUMENT
        assert reason in failed.message
        assert (await answers(session, spec("next", None)))["next"]
        await running.settled()


async def test_grammars_are_compiled_for_each_salt(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the time would tell one tenant that another uses a schema."""
    tried: list[Guidance] = []
    async with workers(model, config(), "decode-0") as running:
        monkeypatch.setattr(GrammarTrial, "check", lambda _, guidance: tried.append(guidance))
        session = await running.session("decode-0")
        found = [
            (await answers(session, replace(spec(f"{number}"), salt=salt)))[f"{number}"]
            for number, salt in enumerate(("x", "y", "x", "y"))
        ]
        assert len(set(found)) == 1
        await running.settled()
    assert tried == [LIST, LIST]


async def test_a_sequence_is_aborted_while_its_grammar_is_compiled_and_others_run_on(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, go_on = threading.Event(), threading.Event()
    check = GrammarTrial.check

    def slow(trial: GrammarTrial, guidance: Guidance) -> None:
        compiling.set()
        assert go_on.wait(60)
        check(trial, guidance)

    async with workers(model, config(), "decode-0") as running:
        # The worker has warmed up.
        monkeypatch.setattr(GrammarTrial, "check", slow)
        session = await running.session("decode-0")
        for attempt in range(2):
            await session.send(RunLocal(replace(spec("r"), attempt=attempt)))
        # A repeated command runs once.
        await session.send(RunLocal(replace(spec("r"), attempt=1)))
        assert await asyncio.to_thread(compiling.wait, 60)
        assert len((await answers(session, spec("free", None)))["free"]) == 40
        await session.send(Abort("r", 0))
        # An event of this sequence shows that the worker has read the abort.
        assert len((await answers(session, spec("free again", None)))["free again"]) == 40
        go_on.set()
        event: Event = await session.event()
        while isinstance(event, TokenBatch):
            (tokens,) = event.sequences
            assert tokens.attempt == 1
            if tokens.finish_reason is not None:
                break
            event = await session.event()
        await running.settled()


async def test_a_grammar_that_fails_in_an_unknown_way_fails_its_sequence_alone() -> None:
    """As a panic of llguidance does, which is no Exception."""

    class Panic(BaseException):
        pass

    def fails(*_: object) -> None:
        raise Panic("index out of bounds")

    grammars = SimpleNamespace(open=fails)
    starts = GuidedStarts(SimpleNamespace(grammars=grammars))  # type: ignore[arg-type]
    failed: asyncio.Future[KvRelayError] = asyncio.get_running_loop().create_future()
    sampling = SamplingParams(guidance=Guidance("regex", "a"))
    starts.add(SequenceSpec("r", 1, (1, 2), 2, sampling), lambda _: None, failed.set_result)
    async with asyncio.timeout(60):
        error = await failed
    assert (type(error), "index out of bounds" in error.message) == (Internal, True)
    assert not starts._tasks
    starts.close()
