"""Prompts beside a decode batch take what its ITL leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.chunk_budget import ChunkBudget
from decode_worker.scheduler import DecodeScheduler
from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.engine.kvcache.prefix_cache import KvCache
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.sequence import Sequence, Work

BLOCK = 4
MOST, LEAST = 256, 32
ITL_S = 0.1


def seconds_of(decoding: bool, prompt_tokens: int, step_s: float, token_s: float) -> float:
    return step_s * decoding + token_s * prompt_tokens


@given(step_s=st.floats(0.001, 0.2), token_s=st.floats(1e-6, 0.01), more=st.floats(0.2, 4.0))
def test_steps_take_the_itl_or_the_least_or_the_most(
    step_s: float, token_s: float, more: float
) -> None:
    budget = ChunkBudget(MOST, LEAST)
    assert budget.tokens(ITL_S) == LEAST, "nothing is known yet"
    budget.ended(True, 0, step_s)
    # The batch grows or shrinks while prompts share all its steps.
    for cost in (step_s, step_s * more):
        for _ in range(400):
            tokens = budget.tokens(ITL_S)
            budget.ended(True, tokens, seconds_of(True, tokens, cost, token_s))
        seconds = seconds_of(True, tokens, cost, token_s)
        if tokens == LEAST:
            assert seconds_of(True, LEAST + 2, cost, token_s) >= 0.85 * ITL_S
        else:
            assert seconds <= ITL_S
            assert tokens == MOST or seconds >= 0.8 * ITL_S


def test_prompts_alone_take_whole_chunks() -> None:
    budget = ChunkBudget(MOST, LEAST)
    budget.ended(True, 0, 0.09)
    budget.ended(False, MOST, 10.0)
    assert budget.tokens(None) == MOST
    assert budget.tokens(ITL_S) == LEAST


def test_without_an_slo_chunks_are_whole() -> None:
    budget = ChunkBudget(MOST, LEAST)
    budget.ended(True, 0, 10.0)
    assert budget.tokens(None) == MOST


def test_the_costs_are_those_of_the_steps() -> None:
    budget = ChunkBudget(MOST, LEAST)
    assert (budget.step_s, budget.tokens_per_second) == (0.0, 0.0)
    for _ in range(50):
        budget.ended(True, 0, 0.02)
        budget.ended(True, 100, 0.07)
        budget.ended(False, 200, 0.1)
    assert budget.step_s == pytest.approx(0.02)
    assert budget.tokens_per_second == pytest.approx(2000)


def sequence(name: str, num_tokens: int, arrived: float, itl_s: float | None = None) -> Sequence:
    sampling = SamplingParams(seed=0, max_tokens=10_000)
    spec = SequenceSpec(name, 0, tuple(range(num_tokens)), num_tokens, sampling, itl_s=itl_s)
    return Sequence(spec, arrived, BlockHasher(BLOCK))


def run(scheduler: DecodeScheduler) -> list[Work]:
    """A step in which each sequence that decodes takes 10 ms and each prompt token 1 ms."""
    batch = scheduler.next(now=0.0)
    scheduler.ran(
        batch, sum(0.01 if one.num_tokens == 1 else 0.001 * one.num_tokens for one in batch)
    )
    scheduler.complete(batch)
    for work in batch:
        if work.sample:
            work.sequence.tokens.append(7)
    return batch


def test_a_prompt_leaves_the_answers_their_itl() -> None:
    scheduler = DecodeScheduler(KvCache(4096, BLOCK), chunk_tokens=MOST, itl_s=ITL_S)
    for number in range(3):
        scheduler.add(sequence(f"answer{number}", 8, arrived=number))
    for _ in range(10):
        run(scheduler)
    assert all(work.num_tokens == 1 for work in run(scheduler))
    scheduler.add(sequence("long", 5000, arrived=9.0))
    chunks = [work.num_tokens for _ in range(40) for work in run(scheduler) if work.num_tokens > 1]
    assert all(55 <= chunk <= 60 for chunk in chunks), "90 ms without 30 ms for the answers"


@pytest.mark.parametrize("configured", [ITL_S, None])
@pytest.mark.parametrize(("asked", "chunk"), [(0.07, 33), (0.2, 150), (1e-9, LEAST)])
def test_the_answer_that_asks_for_the_smallest_itl_bounds_the_chunks(
    configured: float | None, asked: float, chunk: int
) -> None:
    """Down to a least chunk, so that no answer keeps the prompts of others from running."""
    scheduler = DecodeScheduler(KvCache(4096, BLOCK), chunk_tokens=MOST, itl_s=configured)
    for number in range(3):
        scheduler.add(sequence(f"answer{number}", 8, number, itl_s=asked if number < 2 else 0.5))
    for _ in range(10):
        run(scheduler)
    assert scheduler.itl_s == asked
    scheduler.add(sequence("long", 2500, arrived=9.0, itl_s=1e-9))
    chunks = [work.num_tokens for _ in range(10) for work in run(scheduler) if work.num_tokens > 1]
    assert chunks
    assert all(chunk - 2 <= one <= chunk for one in chunks)
