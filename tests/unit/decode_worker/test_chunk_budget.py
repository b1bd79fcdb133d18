"""Prompts beside a decode batch take what its ITL leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.chunk_budget import ChunkBudget
from decode_worker.scheduler import DecodeScheduler
from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.sequence import Sequence, Work

BLOCK = 4
MOST, LEAST = 256, 32
ITL_S = 0.1


class Machine:
    """Steps that take `step_s` for their answers and `token_s` for each prompt token."""

    def __init__(self, step_s: float, token_s: float) -> None:
        self.budget = ChunkBudget(MOST, LEAST)
        self.step_s = step_s
        self.token_s = token_s
        self.now = 0.0

    def tokens(self, waited_s: float = 0.0) -> int:
        return self.budget.tokens(ITL_S, waited_s, self.now)

    def step(self, prompt_tokens: int, decoding: bool = True) -> float:
        seconds = self.step_s * decoding + self.token_s * prompt_tokens
        self.now += seconds
        self.budget.ended(decoding, prompt_tokens, seconds, self.now)
        return seconds


@given(
    st.floats(0.001, 0.2),
    st.floats(1e-6, 0.01),
    st.lists(st.floats(0.2, 4.0), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_steps_take_the_itl_or_the_least_or_the_most(
    step_s: float, token_s: float, changes: list[float], pause: int
) -> None:
    """Also if the batch grows or shrinks while prompts share all its steps."""
    machine = Machine(step_s, token_s)
    assert machine.tokens() == LEAST, "nothing is known yet"
    for change in changes:
        machine.step_s = step_s * change
        for _ in range(pause):
            machine.step(0)
        for _ in range(40):
            tokens = machine.tokens()
            seconds = machine.step(tokens)
        if tokens == LEAST:
            assert machine.step_s + token_s * 2 * LEAST >= 0.8 * ITL_S
        else:
            assert seconds <= ITL_S
            more_s = machine.step_s + token_s * (tokens + LEAST)
            assert tokens == MOST or more_s >= 0.8 * ITL_S


def test_a_batch_that_grows_is_late_for_a_few_steps_only() -> None:
    machine = Machine(0.005, 0.001)
    machine.step(0)
    late = 0
    for batch in [0.005, 0.05] * 10:
        machine.step_s = batch
        late += sum(machine.step(machine.tokens()) > ITL_S for _ in range(50))
    assert late <= 25


def test_a_short_prompt_leaves_the_budget_as_it_was() -> None:
    machine = Machine(0.01, 0.001)
    for _ in range(10):
        machine.step(machine.tokens())
    before = machine.tokens()
    machine.step(3)
    assert machine.tokens() == before


@given(
    st.floats(0.001, 0.04),
    st.floats(1e-5, 0.0012),
    st.lists(st.floats(0.01, 0.99), min_size=1, max_size=10),
)
def test_a_sequence_that_joins_keeps_its_itl_and_prompts_go_on(
    step_s: float, token_s: float, places: list[float]
) -> None:
    """It waits from some place within a step for the end of that step."""
    machine = Machine(step_s, token_s)
    machine.step(0)
    for _ in range(20):
        usual = machine.tokens()
        machine.step(usual)
    tokens = usual
    for place in places:
        left_s = machine.step(tokens) * (1 - place)
        before, tokens = tokens, machine.tokens(left_s)
        assert tokens <= usual + LEAST
        assert left_s + step_s + token_s * tokens <= ITL_S or tokens == 0 or before == 0
        assert tokens or before, "two steps without prompt tokens"
    machine.step(tokens)
    # Once the sequence has had its first step, all is as before.
    assert machine.tokens() >= usual - LEAST


def test_a_chunk_that_keeps_the_itl_anyway_stays_whole() -> None:
    machine = Machine(0.01, 0.0001)
    for _ in range(10):
        machine.step(machine.tokens())
    assert machine.tokens() == MOST, "26 of 75 ms"
    assert machine.tokens(0.03) == MOST
    assert 0 < machine.tokens(0.06) < MOST


@pytest.mark.parametrize("waited_s", [0.0, 0.07])
def test_one_odd_step_halves_the_budget_at_most(waited_s: float) -> None:
    """Also the step after a hand-off, which has fewer tokens than the budget."""
    machine = Machine(step_s=0.005, token_s=0.0003)
    machine.step(MOST, decoding=False)
    for _ in range(8):
        machine.step(0)
        machine.step(machine.tokens())
    usual = machine.tokens()
    beside = machine.tokens(waited_s)
    assert beside < usual or not waited_s
    machine.budget.ended(True, beside, 2 * ITL_S, machine.now)
    assert machine.tokens() >= usual / 2


def test_a_step_without_an_itl_ends_what_a_hand_off_began() -> None:
    machine = Machine(step_s=0.005, token_s=0.0003)
    machine.step(MOST, decoding=False)
    for _ in range(8):
        machine.step(0)
        machine.step(machine.tokens())
    assert machine.tokens(ITL_S) == 0
    machine.step(0)
    assert machine.budget.tokens(None, 0.0, machine.now) == MOST
    assert machine.tokens(ITL_S) == 0


def test_a_short_prompt_in_a_step_that_took_too_long_is_no_reason_for_a_large_chunk() -> None:
    machine = Machine(step_s=0.005, token_s=0.0003)
    machine.step(MOST, decoding=False)
    for _ in range(8):
        machine.step(0)
        machine.step(machine.tokens())
    assert machine.tokens() == MOST
    machine.budget.ended(True, LEAST, 1.2 * ITL_S, machine.now)
    assert machine.tokens() == LEAST


def test_answers_that_lose_their_itl_anyway_hold_back_no_prompt() -> None:
    machine = Machine(0.09, 0.001)
    for _ in range(10):
        machine.step(0)
    assert machine.tokens(0.05) == LEAST


def test_a_rate_that_was_measured_long_ago_counts_with_the_answers_of_now() -> None:
    machine = Machine(0.02, 0.001)
    machine.step(100, decoding=False)
    machine.now += 1000.0
    assert machine.budget.tokens_per_second(ITL_S, 0.0, machine.now) == pytest.approx(1000)
    machine.step_s = 0.08
    for _ in range(30):
        machine.step(0)
    beside = machine.budget.tokens_per_second(ITL_S, 1.0, machine.now)
    assert beside == pytest.approx(LEAST / (0.08 + 0.001 * LEAST), rel=0.01)


def test_prompts_alone_take_whole_chunks() -> None:
    machine = Machine(0.09, 0.01)
    machine.step(0)
    machine.step(MOST, decoding=False)
    assert machine.budget.tokens(None, 0.0, machine.now) == MOST
    assert machine.tokens() == LEAST


def test_the_rate_is_that_of_a_prompt_beside_the_answers() -> None:
    machine = Machine(0.02, 0.001)
    budget = machine.budget

    def rate(answering: float = 1.0) -> float | None:
        return budget.tokens_per_second(ITL_S, answering, machine.now)

    assert rate() is None, "unknown"
    machine.step(100, decoding=False)
    assert budget.tokens_per_second(None, 1.0, machine.now) == pytest.approx(1000), "no SLO"
    machine.step(0)
    assert rate() == pytest.approx(65 / 0.085)
    assert rate(0.0) == pytest.approx(1000)
    assert rate(0.5) == pytest.approx((1000 + 65 / 0.085) / 2)
    for _ in range(5):
        machine.step(machine.tokens())
    assert rate() == pytest.approx(64 / 0.084)


@pytest.mark.parametrize("with_prompts", [False, True])
def test_answers_that_need_all_their_time_leave_none_to_prompts(with_prompts: bool) -> None:
    machine = Machine(0.095, 0.001)
    machine.step(100, decoding=False)
    for _ in range(20):
        machine.step(machine.tokens() if with_prompts else 0)
    for answering in (0.0, 0.5, 1.0):
        assert machine.budget.tokens_per_second(ITL_S, answering, machine.now) == 0


def sequence(name: str, num_tokens: int, arrived: float, itl_s: float | None = None) -> Sequence:
    sampling = SamplingParams(seed=0, max_tokens=10_000)
    spec = SequenceSpec(name, 0, tuple(range(num_tokens)), num_tokens, sampling, itl_s=itl_s)
    return Sequence(spec, arrived, BlockHasher(BLOCK))


def run(scheduler: DecodeScheduler) -> list[Work]:
    """A step in which each sequence that decodes takes 10 ms and each prompt token 1 ms."""
    batch = scheduler.next(now=0.0)
    seconds = sum(0.01 if one.num_tokens == 1 else 0.001 * one.num_tokens for one in batch)
    scheduler.ran(batch, seconds, now=seconds)
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
    assert all(50 <= chunk <= 55 for chunk in chunks[3:]), "85 ms without 30 ms for the answers"


def handed_over(cache: KvCache, name: str) -> Sequence:
    one = sequence(name, 9, arrived=2.0)
    one.take_blocks(cache, 9)
    one.advance(cache, 8)
    return one


def busy(cache: KvCache) -> DecodeScheduler:
    """A scheduler with an answer and a long prompt beside it."""
    scheduler = DecodeScheduler(cache, chunk_tokens=MOST, itl_s=ITL_S)
    scheduler.add(sequence("answer", 8, arrived=0.0))
    for _ in range(10):
        run(scheduler)
    scheduler.add(sequence("long", 9000, arrived=1.0))
    for _ in range(10):
        run(scheduler)
    return scheduler


def test_the_first_step_after_a_hand_off_has_fewer_prompt_tokens() -> None:
    cache = KvCache(4096, BLOCK)
    scheduler = busy(cache)
    usual = max(work.num_tokens for work in run(scheduler))
    scheduler.join(handed_over(cache, "a"), now=-0.04)
    chunks = [max(work.num_tokens for work in run(scheduler)) for _ in range(2)]
    assert 0.25 * usual < chunks[0] < 0.75 * usual
    assert chunks[1] >= 0.8 * usual


def test_each_of_two_hand_offs_in_succession_keeps_its_itl() -> None:
    """The second one comes while the first one has its first step."""
    cache = KvCache(4096, BLOCK)
    scheduler = busy(cache)
    usual = max(work.num_tokens for work in run(scheduler))
    chunks = []
    scheduler.join(handed_over(cache, "a"), now=-0.03)
    for name in "bc":
        batch = scheduler.next(now=0.0)
        chunks.append(max(work.num_tokens for work in batch))
        scheduler.join(handed_over(cache, name), now=-0.03)
        scheduler.ran(batch, 0.05, now=0.05)
        scheduler.complete(batch)
    chunks.append(max(work.num_tokens for work in run(scheduler)))
    assert all(0 < chunk < 0.75 * usual for chunk in chunks)


def test_a_hand_off_that_ends_before_its_first_step_holds_back_no_prompt() -> None:
    cache = KvCache(4096, BLOCK)
    scheduler = busy(cache)
    usual = max(work.num_tokens for work in run(scheduler))
    (answer,) = (one for one in scheduler if one.spec.request_id == "answer")
    scheduler.remove(answer)
    gone = handed_over(cache, "gone")
    scheduler.join(gone, now=-20.0)
    scheduler.remove(gone)
    assert max(work.num_tokens for work in run(scheduler)) == MOST
    scheduler.join(handed_over(cache, "next"), now=0.0)
    assert max(work.num_tokens for work in run(scheduler)) >= 0.5 * usual


@pytest.mark.parametrize(
    ("configured", "asked", "chunk"),
    [(ITL_S, 0.2, 140), (ITL_S, 1e-9, 55), (None, 1e-9, MOST)],
    ids=["more", "less than configured", "no SLO"],
)
def test_the_smallest_itl_of_the_batch_bounds_the_chunks(
    configured: float | None, asked: float, chunk: int
) -> None:
    """An answer may ask for more than the configured ITL, and for nothing that slows others."""
    scheduler = DecodeScheduler(KvCache(4096, BLOCK), chunk_tokens=MOST, itl_s=configured)
    for number in range(3):
        scheduler.add(sequence(f"answer{number}", 8, number, itl_s=asked if number < 2 else 0.5))
    for _ in range(10):
        run(scheduler)
    scheduler.add(sequence("long", 6000, arrived=9.0, itl_s=1e-9))
    chunks = [work.num_tokens for _ in range(20) for work in run(scheduler) if work.num_tokens > 1]
    assert all(chunk - 4 <= one <= chunk for one in chunks[-5:])
