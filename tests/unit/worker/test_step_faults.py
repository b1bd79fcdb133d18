"""A sequence that a step goes wrong for ends alone: its neighbours' answers are what they are
without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.step_faults import LOGITS, RAISED, Kind, StepFaults
from support.worker_harness import Session, Workers, load_of, workers

from kv_transfer.blocks.plan import Layers
from kv_transfer.push import Push
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.errors import Code
from kvrelay.types.requests import SamplingParams, SequenceSpec, ThinkingMarkers, TokenLogprobs
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
from prefill_worker import prefill_stage as prefill_stage

MARK = 120
PATHS: dict[str, dict[str, Any]] = {
    "native": {"kv": {"block_size": 16}},
    "torch": {"kv": {"block_size": 8}},
    "int8 kv": {"kv": {"block_size": 16, "dtype": "int8"}},
    "int8 weights": {
        "kv": {"block_size": 16},
        "decode": {"weights": "int8"},
        "prefill": {"weights": "int8"},
    },
    "speculation": {
        "kv": {"block_size": 16},
        "decode": {"speculation": {"kind": "ngram", "tokens": 4, "min_ngram": 1, "max_batch": 12}},
    },
}
PARAMS = [
    SamplingParams(temperature=0.0, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=1.0, seed=3, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, top_p=0.9, frequency_penalty=0.4, ignore_eos=True),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, min_tokens=10),
]
Answers = dict[str, tuple[list[int], list[TokenLogprobs]]]


def config(path: str) -> ClusterConfig:
    values: dict[str, Any] = {"model": {"dtype": "float32"}, "prefill": {"chunk_tokens": 256}}
    decode = {"max_batch": 16, "chunk_tokens": 256} | PATHS[path].get("decode", {})
    kv = {"memory": "4MiB"} | PATHS[path]["kv"]
    return ClusterConfig.model_validate(values | PATHS[path] | {"kv": kv, "decode": decode})


def neighbours(max_tokens: int = 24) -> list[SequenceSpec]:
    return [
        spec(
            f"good-{n}", tuple(range(2 + n, 12 + 3 * n)) * 2, replace(params, max_tokens=max_tokens)
        )
        for n, params in enumerate(PARAMS)
    ]


def poisoned(count: int = 1) -> list[SequenceSpec]:
    params = replace(PARAMS[1], max_tokens=30)
    return [spec(f"bad-{n}", (MARK, 7 + n, *range(40, 60)), params) for n in range(count)]


def spec(request_id: str, token_ids: tuple[int, ...], params: SamplingParams) -> SequenceSpec:
    return SequenceSpec(
        request_id, 0, token_ids, len(token_ids), replace(params, seed=params.seed or 0)
    )


@asynccontextmanager
async def running_workers(model: Path, path: str, *names: str) -> AsyncIterator[Workers]:
    async with workers(model, config(path), *names) as running:
        yield running
        for info in await running.settled():  # every block is back, and the books say so
            assert info.load.integrity_ok, info.load.integrity_error
            assert info.load.blocks_held == 0


async def collect(session: Session, specs: list[SequenceSpec]) -> tuple[Answers, dict[str, Failed]]:
    """Until each has one end; none has two."""
    answers: Answers = {one.request_id: ([], []) for one in specs}
    failures: dict[str, Failed] = {}
    left = set(answers)
    while left:
        event = await session.event()
        if isinstance(event, Failed):
            assert event.request_id in left, event
            failures[event.request_id] = event
            left.discard(event.request_id)
            continue
        assert isinstance(event, TokenBatch), event
        for tokens in event.sequences:
            assert tokens.request_id in left, tokens
            answers[tokens.request_id][0].extend(tokens.token_ids)
            answers[tokens.request_id][1].extend(tokens.logprobs)
            if tokens.finish_reason is not None:
                left.discard(tokens.request_id)
    return answers, failures


async def run_local(
    session: Session, specs: list[SequenceSpec]
) -> tuple[Answers, dict[str, Failed]]:
    for one in specs:
        await session.send(RunLocal(one))
    return await collect(session, specs)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> StepFaults:
    return StepFaults().install(monkeypatch)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.long) if "int8" in path else path for path in PATHS],
)
async def test_each_kind_of_fault_ends_its_sequence_alone(
    tiny_model: Callable[..., Path], faults: StepFaults, path: str
) -> None:
    good = neighbours()
    async with running_workers(tiny_model("llama"), path, "decode-0") as running:
        decode = await running.session("decode-0")
        expected, none = await run_local(decode, good)
        assert none == {}
        for attempt, (kind, at) in enumerate(
            ((kind, at) for kind in LOGITS + RAISED for at in (0, 6)), 1
        ):
            faults.marks, faults.seen = {MARK: (kind, at)}, {}
            mixed = [replace(one, attempt=attempt) for one in (*good[:2], *poisoned(), *good[2:])]
            answers, failures = await run_local(decode, mixed)
            assert set(failures) == {"bad-0"}, (kind, at, failures)
            assert faults.seen[kind], "the fault happened"
            assert failures["bad-0"].of_sequence
            assert len(answers.pop("bad-0")[0]) == at, "what it had got before stands"
            assert {one: tokens for one, (tokens, _) in answers.items()} == {
                one: tokens for one, (tokens, _) in expected.items()
            }
            if path != "torch":  # whose products may differ in the last bit with other neighbours
                assert answers == expected


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", LOGITS + RAISED)
async def test_prompts_that_prefill_workers_cannot_compute_fail_alone(
    tiny_model: Callable[..., Path], faults: StepFaults, kind: Kind
) -> None:
    good, bad = neighbours(), poisoned(2)
    async with running_workers(tiny_model("llama"), "native", "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        expected, _ = await run_local(decode, [replace(one, attempt=1) for one in good])
        faults.marks = {MARK: (kind, 0)}
        batch = [good[0], bad[0], *good[1:], bad[1]]
        targets = {}
        for one in batch:
            await decode.send(Reserve(one, 30.0, "prefill-0"))
            reserved = await decode.event()
            assert isinstance(reserved, Reserved)
            targets[one.request_id] = reserved.target
        for one in batch:
            await prefill.send(Prefill(one, targets[one.request_id]))
        first: dict[str, list[int]] = {}
        failures: dict[str, Failed] = {}
        handed_off: set[str] = set()
        while len(handed_off) + len(failures) < len(batch):
            match await prefill.event():
                case Failed() as failed:
                    assert failed.request_id not in failures
                    failures[failed.request_id] = failed
                case HandedOff(request_id):
                    handed_off.add(request_id)
                case TokenBatch(sequences):
                    first |= {one.request_id: list(one.token_ids) for one in sequences}
        assert set(failures) == {"bad-0", "bad-1"}
        assert all(one.of_sequence for one in failures.values())
        assert faults.seen[kind]
        for one in bad:
            await decode.send(Abort(one.request_id, one.attempt))
        answers, none = await collect(decode, good)
        assert none == {}
        assert {one: first[one] + tokens for one, (tokens, _) in answers.items()} == {
            one: tokens for one, (tokens, _) in expected.items()
        }


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_layers_that_left_before_a_step_raised_are_those_of_the_step_that_worked(
    tiny_model: Callable[..., Path],
    faults: StepFaults,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushed: list[int] = []
    send = Push.send

    def noted(
        push: Push, first: int, blocks: SequenceOf[int], layers: Layers | None = None
    ) -> None:
        pushed.append(len(faults.prompt_steps))
        send(push, first, blocks, layers)

    monkeypatch.setattr(prefill_stage, "LARGE", 1)
    monkeypatch.setattr(Push, "send", noted)
    params = replace(PARAMS[1], max_tokens=12)
    plug, bad, good = (
        spec(name, (first, *(3 + n % 80 for n in range(100))), params)
        for name, first in (("plug", 119), ("bad", MARK), ("good", 2))
    )
    async with running_workers(tiny_model("llama"), "native", "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        expected, _ = await run_local(decode, [replace(good, attempt=1)])
        targets = []
        for one in (plug, bad, good):
            await decode.send(Reserve(one, 60.0, "prefill-0"))
            reserved = await decode.event()
            assert isinstance(reserved, Reserved)
            targets.append(replace(reserved.target, transport=transport))
        # The plug keeps the engine busy until the two others wait for one step.
        faults.marks = {119: ("hang", 0), MARK: ("raise late", 0)}
        await prefill.send(Prefill(plug, targets[0]))
        assert await asyncio.to_thread(faults.hanging.wait, 60)
        await prefill.send(Prefill(bad, targets[1]))
        await prefill.send(Prefill(good, targets[2]))
        async with asyncio.timeout(60):
            while (await load_of(prefill.info)).waiting < 2:
                await asyncio.sleep(0.01)
        faults.prompt_steps.clear()
        pushed.clear()
        faults.released.set()
        answers: dict[str, list[int]] = {}
        failures = set()
        while len(answers) + len(failures) < 5:
            match await prefill.event():
                case Failed(request_id):
                    failures.add(request_id)
                case TokenBatch(sequences):
                    answers |= {one.request_id: list(one.token_ids) for one in sequences}
                case HandedOff(request_id):
                    answers[f"{request_id} was handed off"] = []
        assert failures == {"bad"}
        assert faults.prompt_steps[:3] == [2, 1, 1], "the step of both, and each of them alone"
        await decode.send(Abort("bad", 0))
        later, none = await collect(decode, [plug, good])
        assert none == {}
        assert answers["good"] + later["good"][0] == expected["good"][0]
    if 1 not in pushed:
        pytest.skip("the event loop was so busy that no layer left while the step of both ran")


async def test_nobody_finds_the_kv_of_a_sequence_that_failed(
    tiny_model: Callable[..., Path], faults: StepFaults
) -> None:
    """It may be what the step failed on. What others hold of it stays theirs."""
    (bad,) = poisoned()
    bad = replace(bad, token_ids=(MARK, *range(2, 60)), prompt_len=59)
    async with running_workers(tiny_model("llama"), "native", "decode-0") as running:
        decode = await running.session("decode-0")
        expected, _ = await run_local(decode, [bad])
        for attempt, (kind, cached) in enumerate(
            (("nan", 48), (None, 0), ("raise", 48), (None, 0)), 1
        ):
            faults.marks = {MARK: (kind, 4)} if kind else {}
            again = replace(bad, attempt=attempt)
            await decode.send(RunLocal(again))
            tokens = await decode.tokens()
            assert tokens.prefill is not None
            assert tokens.prefill.cached_tokens == cached
            answers, failures = await collect(decode, [again])
            assert bool(failures) is bool(kind)
            if not kind:
                assert [*tokens.token_ids, *answers["bad-0"][0]] == expected["bad-0"][0]


async def test_a_batch_is_split_in_few_steps_and_a_failing_engine_not_to_the_end(
    tiny_model: Callable[..., Path], faults: StepFaults
) -> None:
    good = [
        spec(f"good-{n}", (2 + n, *range(60, 70)), replace(PARAMS[0], logprobs=None, max_tokens=3))
        for n in range(15)
    ]
    async with running_workers(tiny_model("llama"), "native", "decode-0") as running:
        decode = await running.session("decode-0")
        faults.marks, faults.fewest = {MARK: ("raise", 1)}, 1
        faults.steps.clear()
        answers, failures = await run_local(decode, [*good[:9], *poisoned(), *good[9:]])
        assert set(failures) == {"bad-0"}
        assert all(
            len(tokens) == 3 for one, (tokens, _) in answers.items() if one.startswith("good")
        )
        plain = len(faults.steps)
        assert plain <= 20, faults.steps  # a few to take all in, three of all, and 2 log2(16) more
        faults.marks = {one.token_ids[0]: ("raise", 0) for one in good}
        faults.steps.clear()
        again = [replace(one, attempt=1) for one in good]
        _, failures = await run_local(decode, again)
        assert len(failures) == len(good)
        assert len(faults.steps) < 2 * len(good)


async def test_less_memory_than_a_step_needs_fails_nobody(
    tiny_model: Callable[..., Path], faults: StepFaults
) -> None:
    good = neighbours()
    async with running_workers(tiny_model("llama"), "native", "decode-0") as running:
        decode = await running.session("decode-0")
        expected, _ = await run_local(decode, good)
        faults.marks, faults.fewest = {good[0].token_ids[0]: ("out of memory", 0)}, 3
        answers, failures = await run_local(decode, [replace(one, attempt=1) for one in good])
        assert failures == {}
        assert faults.seen["out of memory"]
        assert {one: tokens for one, (tokens, _) in answers.items()} == {
            one: tokens for one, (tokens, _) in expected.items()
        }


FLAWS: list[dict[str, Any]] = [
    *({"temperature": one} for one in (float("nan"), float("inf"), -1.0, -5e-324)),
    *(
        {name: one}
        for name in ("top_p", "min_p")
        for one in (float("nan"), float("inf"), -1e-300, 1.5)
    ),
    {"top_p": 0.0},
    *({"repetition_penalty": one} for one in (float("nan"), 0.0, 1e-38, 5e-324, -1.0, 1e38)),
    *(
        {name: one}
        for name in ("presence_penalty", "frequency_penalty")
        for one in (float("nan"), float("-inf"), 1e308)
    ),
    {"top_k": -1},
    {"max_tokens": 0},
    {"max_tokens": -(2**31)},
    {"min_tokens": -5},
    {"logprobs": -1},
    {"logprobs": 2**31 - 1},
    {"seed": None},
    *(
        {"logit_bias": (one,)}
        for one in ((128, 1.0), (2**31 - 1, 1.0), (-1, 1.0), (5, float("nan")), (5, 1e300))
    ),
    *({"stop_token_ids": one} for one in ((128,), (-1,), (2**31 - 1,), (5,) * 2000)),
    *({"thinking": one} for one in (ThinkingMarkers(None, 128), ThinkingMarkers(-1, 5))),
    {"thinking_token_budget": -1, "thinking": ThinkingMarkers(None, 5)},
]


async def test_no_value_that_a_peer_sends_reaches_the_others(
    tiny_model: Callable[..., Path],
) -> None:
    """Each in a command of its own, among neighbours; as the wire carries it."""
    good = neighbours(max_tokens=60)
    bad = [
        replace(spec(f"bad-{n}", (9, 8, 7), PARAMS[1]), sampling=replace(PARAMS[1], **flaw))
        for n, flaw in enumerate(FLAWS)
    ]
    bad += [
        replace(spec(f"bad-len-{n}", (9, 8, 7), PARAMS[1]), prompt_len=n) for n in (-1, 0, 4, 2**30)
    ]
    async with running_workers(tiny_model("llama"), "native", "decode-0", "prefill-0") as running:
        decode, prefill = await running.session("decode-0"), await running.session("prefill-0")
        expected, _ = await run_local(decode, good)
        again = [replace(one, attempt=1) for one in good]
        for one in again:
            await decode.send(RunLocal(one))
        for one in bad:
            await decode.send(RunLocal(one))
        answers, failures = await collect(decode, [*again, *bad])
        assert {one: failed.code for one, failed in failures.items()} == {
            one.request_id: Code.INVALID_ARGUMENT for one in bad
        }
        for flaw, one in zip(FLAWS, bad, strict=False):
            if flaw != {"max_tokens": 0}:
                assert next(iter(flaw)) in failures[one.request_id].message
        assert {one: got for one, got in answers.items() if one in expected} == expected
        await decode.send(Reserve(spec("asked", (9, 8, 7), PARAMS[1]), 30.0, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        for one in bad:
            await decode.send(Reserve(one, 30.0, "prefill-0"))
            await prefill.send(Prefill(one, reserved.target))
            for session in (decode, prefill):
                failed = await session.event()
                assert isinstance(failed, Failed)
                assert failed.code is Code.INVALID_ARGUMENT
        await decode.send(Abort("asked", 0))


@pytest.mark.parametrize("at", [0, 3, 20])
async def test_a_fault_harms_none_that_share_its_prefix(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The blocks of the prefix are withdrawn while others hold them, and fill further blocks."""
    logits_of = ModelRunner._logits
    poison = 666

    def faulty(runner: ModelRunner, segments: SequenceOf[Segment], *more: Any) -> torch.Tensor:
        logits = logits_of(runner, segments, *more)
        draws = [draw for segment in segments for draw in segment.draws]
        for row, draw in enumerate(draws):
            if draw.params.seed == poison and draw.num_output >= at:
                logits = logits.clone()
                logits[row] = float("nan")
        return logits

    monkeypatch.setattr(ModelRunner, "_logits", faulty)
    shared = tuple(range(10, 58))
    good = [replace(one, prompt_len=len(shared) + one.prompt_len) for one in neighbours(40)]
    good = [replace(one, token_ids=shared + one.token_ids) for one in good]
    bad = spec("bad", (*shared, 99), replace(PARAMS[1], seed=poison, max_tokens=60))
    async with running_workers(tiny_model("llama"), "native", "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        expected, none = await run_local(decode, good)
        assert none == {}
        later = spec("later", (*shared, *range(20, 60)), replace(PARAMS[1], max_tokens=30))
        await decode.send(Reserve(later, 30.0, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        assert reserved.target.cached_tokens == len(shared)
        answers, failures = await run_local(
            decode, [replace(one, attempt=1) for one in (*good[:2], bad, *good[2:])]
        )
        assert set(failures) == {"bad"}
        assert len(answers.pop("bad")[0]) == at
        assert answers == expected
        await prefill.send(Prefill(later, reserved.target))
        await prefill.tokens()
        assert isinstance(await prefill.event(), HandedOff)
        assert len(await decode.answer()) == 29
