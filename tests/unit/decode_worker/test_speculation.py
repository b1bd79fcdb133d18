"""Speculation changes how many tokens a step gives and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.speculation import (
    ALWAYS_FIVE,
    PLAIN,
    answers,
    check_aborts,
    check_moves,
    config,
    local,
    settled,
    specs,
    tokens_until,
)
from support.tiny_models import EOS
from support.worker_harness import load_of, workers

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import Sampled
from kvrelay.engine.sequence_segment import Segment
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker_messages import RunLocal

SPECULATING = config(tokens=5, min_ngram=1, max_ngram=3, max_batch=12)
SUFFIX = config(kind="suffix", tokens=5, min_ngram=1, max_batch=12)
KINDS = pytest.mark.parametrize("settings", [SPECULATING, SUFFIX], ids=["ngram", "suffix"])


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "settings",
    [
        SPECULATING,
        config(tokens=1),
        config("76KiB", tokens=5, min_ngram=1, max_batch=12),
        SUFFIX,
        config("76KiB", kind="suffix", tokens=5, min_ngram=1, max_batch=12),
    ],
    ids=["many", "one", "few blocks", "suffix", "suffix, few blocks"],
)
async def test_answers_are_the_same_as_without(
    tiny_model: Callable[..., Path], settings: ClusterConfig
) -> None:
    requests = specs(36)
    expected, none, _ = await local(tiny_model("llama"), PLAIN, requests)
    assert none == 0
    found, drafted, accepted = await local(tiny_model("llama"), settings, requests)
    assert found == expected
    assert 0 < accepted < drafted
    assert {reason for _, reason in expected.values()} == {"stop", "length"}


async def test_few_steps_give_many_tokens(tiny_model: Callable[..., Path]) -> None:
    async with workers(tiny_model("llama"), SPECULATING, "decode-0") as running:
        session = await running.session("decode-0")
        await session.send(RunLocal(SequenceSpec("fives", 0, (2, 3), 2, ALWAYS_FIVE)))
        runs = []
        while sum(runs) < 60:
            runs.append(len((await session.tokens()).token_ids))
        assert runs == [1, 1, *[6] * 9, 4], (
            "five guesses and the token after them, but no more than asked for"
        )
        load = await load_of(session.info)
        assert load.draft_tokens == load.accepted_tokens == 60 - len(runs)


@pytest.mark.parametrize("salt", ["", "another"])
async def test_an_earlier_answer_is_drafted_from_if_its_salt_is_the_same(
    tiny_model: Callable[..., Path], salt: str
) -> None:
    """Random tokens at temperature 1 do not repeat within the answer; the same seed does."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=25, ignore_eos=True)
    first = SequenceSpec("first", 0, (2, 3), 2, params)
    second = replace(first, request_id="second", salt=salt)
    async with workers(tiny_model("llama"), SUFFIX, "decode-0") as running:
        session = await running.session("decode-0")
        await session.send(RunLocal(first))
        expected = (await answers(session, 1))["first"]
        await session.send(RunLocal(second))
        tokens, runs = list[int](), 0
        while len(tokens) < 25:
            tokens += (await session.tokens()).token_ids
            runs += 1
        assert tuple(tokens) == expected[0]
        assert runs > 15 if salt else runs < 10
        await settled(running)


@pytest.mark.parametrize(
    ("sampling", "answer", "reason"),
    [
        ({}, (11, 12, EOS), "stop"),
        ({"ignore_eos": True, "stop_token_ids": (7,)}, (11, 12, EOS, 7), "stop"),
        ({"ignore_eos": True, "max_tokens": 5}, (11, 12, EOS, 7, 10), "length"),
        ({"min_tokens": 4}, (11, 12, EOS, 7, 10, 11, 12, EOS), "stop"),
    ],
)
async def test_an_answer_ends_in_the_middle_of_right_guesses(
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    sampling: dict[str, object],
    answer: tuple[int, ...],
    reason: str,
) -> None:
    """Of a model that says five tokens again and again, so that every guess is right, beyond the
    end too.
    """
    cycle = (10, 11, 12, EOS, 7)

    def says_the_cycle(
        _: ModelRunner, segments: Sequence[Segment], on_layer: object = None
    ) -> list[list[Sampled]]:
        return [
            one.accepted([Sampled(cycle[len(draw.token_ids) % len(cycle)]) for draw in one.draws])
            for one in segments
        ]

    monkeypatch.setattr(ModelRunner, "run", says_the_cycle)
    async with workers(tiny_model("llama"), SPECULATING, "decode-0") as running:
        session = await running.session("decode-0")
        params = SamplingParams(temperature=0.0, seed=0, **sampling)  # type: ignore[arg-type]
        await session.send(RunLocal(SequenceSpec("a", 0, (*cycle, 10), 6, params)))
        assert await answers(session, 1) == {"a": (answer, reason)}
        assert (await load_of(session.info)).accepted_tokens >= len(answer) - 2
        await settled(running)


@pytest.mark.sweep(3)
@KINDS
@pytest.mark.parametrize("seed", range(3))
async def test_a_sequence_that_moves_in_the_middle_goes_on_as_it_would_have(
    tiny_model: Callable[..., Path], settings: ClusterConfig, seed: int
) -> None:
    """By hand-off from a prefill worker, then after any number of tokens to another decode worker,
    and back.
    """
    await check_moves(tiny_model("llama"), settings, specs(16, seed), seed)


@pytest.mark.long
@KINDS
async def test_blocks_that_were_guessed_into_are_found_with_the_right_tokens(
    tiny_model: Callable[..., Path], settings: ClusterConfig
) -> None:
    """Follow-up prompts begin with earlier answers, whose blocks the prefix cache has kept."""
    requests = [one for one in specs(24) if one.sampling.max_tokens >= 20]
    answered, _, accepted = await local(tiny_model("llama"), PLAIN, requests)
    assert accepted == 0
    follow_ups = []
    for one in requests:
        prompt = (*one.token_ids, *answered[one.request_id][0], 7, 8, 9)
        follow_ups.append(
            replace(
                one, request_id=f"{one.request_id}-next", token_ids=prompt, prompt_len=len(prompt)
            )
        )
    expected, _, _ = await local(tiny_model("llama"), PLAIN, follow_ups)
    async with workers(tiny_model("llama"), settings, "decode-0") as running:
        session = await running.session("decode-0")
        for one, after in zip(requests, follow_ups, strict=True):
            await session.send(RunLocal(one))
            await answers(session, 1)
            await session.send(RunLocal(after))
            first = await session.tokens()
            assert first.prefill is not None
            answer_len = len(answered[one.request_id][0])
            assert first.prefill.cached_tokens >= len(one.token_ids) + answer_len - 4, (
                "all full blocks before the tail"
            )
            rest, finish = (
                ([], first.finish_reason)
                if first.finish_reason
                else await tokens_until(session, after, 10**6)
            )
            assert ((*first.token_ids, *rest), finish) == expected[after.request_id]
        await settled(running)


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
async def test_aborts_in_the_middle_leave_nothing_behind(
    tiny_model: Callable[..., Path], kind: str
) -> None:
    settings = config("80KiB", kind=kind, tokens=5, min_ngram=1, max_batch=12)
    await check_aborts(tiny_model("llama"), settings)
