from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.drafter import Drafter
from decode_worker.scheduler import DecodeScheduler
from kvrelay.config.pools import SpeculationConfig
from kvrelay.engine.kvcache.block_hashes import BlockHasher, hashed
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.sequence import Sequence, Work

BLOCK = 4


def sequence(
    name: str, num_tokens: int, *, arrived: float = 0.0, first: int = 0, tenant: str = ""
) -> Sequence:
    tokens = tuple(range(first, first + num_tokens))
    spec = SequenceSpec(
        name, 0, tokens, num_tokens, SamplingParams(seed=0, max_tokens=10_000), tenant=tenant
    )
    return Sequence(spec, arrived, BlockHasher(BLOCK))


def handed_over(
    cache: KvCache,
    name: str,
    num_tokens: int,
    *,
    arrived: float = 0.0,
    first: int = 0,
    tenant: str = "",
) -> Sequence:
    """A sequence as it is after its KV has come and the first token with it."""
    one = sequence(name, num_tokens, arrived=arrived, first=first, tenant=tenant)
    one.take_blocks(cache, num_tokens)
    one.advance(cache, num_tokens)
    one.tokens.append(7)
    return one


def step(scheduler: DecodeScheduler) -> list[tuple[str, int, bool]]:
    batch = scheduler.next(now=0.0)
    finish(scheduler, batch)
    return [(work.sequence.spec.request_id, work.num_tokens, work.sample) for work in batch]


def finish(scheduler: DecodeScheduler, batch: list[Work]) -> None:
    scheduler.complete(batch)
    for work in batch:
        if work.sample and not work.sequence.ended:
            work.sequence.tokens.append(7)


def test_sequences_join_and_leave_at_every_step() -> None:
    cache = KvCache(32, BLOCK)
    scheduler = DecodeScheduler(cache, chunk_tokens=8)
    a, b = handed_over(cache, "a", 5), handed_over(cache, "b", 6, arrived=1.0, first=50)
    scheduler.join(a, now=0.0)
    assert step(scheduler) == [("a", 1, True)]
    scheduler.join(b, now=0.0)
    assert step(scheduler) == [("a", 1, True), ("b", 1, True)]
    scheduler.remove(a)
    assert step(scheduler) == [("b", 1, True)]
    scheduler.remove(b)
    assert step(scheduler) == []
    assert cache.pool.num_held == 0


def test_a_local_prompt_is_prefilled_in_chunks_beside_the_batch() -> None:
    cache = KvCache(32, BLOCK)
    scheduler = DecodeScheduler(cache, chunk_tokens=8)
    scheduler.join(handed_over(cache, "running", 5), now=0.0)
    scheduler.add(sequence("local", 19, arrived=1.0, first=50))
    assert step(scheduler) == [("running", 1, True), ("local", 8, False)]
    assert step(scheduler) == [("running", 1, True), ("local", 8, False)]
    assert step(scheduler) == [("running", 1, True), ("local", 3, True)]
    assert step(scheduler) == [("running", 1, True), ("local", 1, True)]


def test_when_blocks_run_out_the_youngest_is_preempted_and_comes_back() -> None:
    cache = KvCache(4, BLOCK, prefix_cache=False)
    scheduler = DecodeScheduler(cache, chunk_tokens=32)
    old, young = handed_over(cache, "old", 7), handed_over(cache, "young", 7, arrived=1.0, first=50)
    scheduler.join(old, now=0.0)
    scheduler.join(young, now=0.0)
    assert step(scheduler) == [("old", 1, True), ("young", 1, True)]
    assert step(scheduler) == [("old", 1, True)], "one block short: the youngest gives way"
    assert scheduler.preemptions == 1
    assert scheduler.waiting == (young,)
    assert (young.num_computed, young.blocks) == (0, [])
    scheduler.remove(old)
    assert step(scheduler) == [("young", len(young.tokens) - 1, True)], (
        "recomputed from all its tokens"
    )
    cache.check_integrity()


def test_when_blocks_run_out_the_tenant_that_has_most_gives_way() -> None:
    """And not the youngest of all."""
    cache = KvCache(8, BLOCK, prefix_cache=False)
    scheduler = DecodeScheduler(cache, chunk_tokens=32)
    hogs = [
        handed_over(
            cache, f"hog{number}", 7, arrived=float(number), first=100 * number, tenant="hog"
        )
        for number in range(3)
    ]
    other = handed_over(cache, "other", 7, arrived=9.0, first=900, tenant="other")
    for one in (*hogs, other):
        scheduler.join(one, now=0.0)
    assert len(step(scheduler)) == 4
    assert [name for name, _, _ in step(scheduler)] == ["hog0", "other"], "3 blocks for each, of 8"
    assert scheduler.waiting == (hogs[1], hogs[2])
    cache.check_integrity()


def test_a_local_prompt_does_not_wait_for_the_end_of_another_tenants() -> None:
    cache = KvCache(128, BLOCK)
    scheduler = DecodeScheduler(cache, chunk_tokens=8)
    for number in range(3):
        scheduler.add(
            sequence(f"long{number}", 120, arrived=float(number), first=1000 * number, tenant="hog")
        )
    assert step(scheduler) == [("long0", 8, False)]
    scheduler.add(sequence("short", 5, arrived=9.0, first=9000, tenant="other"))
    assert step(scheduler) == [("short", 5, True), ("long0", 3, False)]


def test_blocks_of_a_step_in_flight_are_kept_until_it_is_over() -> None:
    """The engine thread writes to them still; nobody may be given them."""
    cache = KvCache(8, BLOCK, prefix_cache=False)
    scheduler = DecodeScheduler(cache, chunk_tokens=8)
    one = handed_over(cache, "one", 5)
    scheduler.join(one, now=0.0)
    batch = scheduler.next(now=0.0)
    scheduler.remove(one)
    assert (cache.pool.num_held, len(scheduler)) == (2, 0)
    scheduler.complete(batch)
    assert cache.pool.num_held == 0


def test_a_waiting_prompt_leaves_a_spare_block_to_each_active_sequence() -> None:
    cache = KvCache(4, BLOCK, prefix_cache=False)
    scheduler = DecodeScheduler(cache, chunk_tokens=32)
    running = handed_over(cache, "running", 3)
    scheduler.join(running, now=0.0)
    scheduler.add(sequence("local", 12, arrived=1.0, first=50))
    assert step(scheduler) == [("running", 1, True)], (
        "3 blocks are left and needed, none would be spare"
    )
    scheduler.remove(running)
    assert step(scheduler) == [("local", 12, True)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_everything_gets_done_whatever_comes_and_goes(data: st.DataObject) -> None:
    """Random arrivals by both ways, removals, and a pool too small for all: no block leaks, nobody
    starves.
    """
    num_blocks = 12
    cache = KvCache(num_blocks, BLOCK, prefix_cache=data.draw(st.booleans(), label="prefix cache"))
    scheduler = DecodeScheduler(
        cache, chunk_tokens=data.draw(st.integers(BLOCK, 20), label="chunk")
    )
    wanted: dict[str, int] = {}
    done: set[str] = set()
    tenants = data.draw(st.sampled_from(("a", "ab", "abc")), label="tenants")
    for number in range(data.draw(st.integers(1, 8), label="sequences")):
        name = str(number)
        length = data.draw(st.integers(1, 20), label="length")
        wanted[name] = length + data.draw(st.integers(1, 24), label="answer")
        need = -(-length // BLOCK)
        tenant = data.draw(st.sampled_from(tenants), label="tenant")
        if data.draw(st.booleans(), label="handed over") and cache.pool.units_available >= need:
            scheduler.join(
                handed_over(
                    cache, name, length, arrived=float(number), first=1000 * number, tenant=tenant
                ),
                now=0.0,
            )
        else:
            scheduler.add(
                sequence(name, length, arrived=float(number), first=1000 * number, tenant=tenant)
            )
    oldest: Sequence | None = None
    for _ in range(2000):
        batch = scheduler.next(now=0.0)
        if not batch:
            break
        assert oldest is None or oldest.ended or oldest.blocks, "the oldest is not preempted"
        oldest = next(iter(scheduler))
        assert len(tenants) > 1 or oldest in {work.sequence for work in batch}, "and gets on"
        if data.draw(st.integers(0, 19), label="remove") == 0:
            victim = data.draw(st.sampled_from(list(scheduler)), label="victim")
            scheduler.remove(victim)
            done.add(victim.spec.request_id)
        finish(scheduler, batch)
        for work in batch:
            name = work.sequence.spec.request_id
            if not work.sequence.ended and len(work.sequence.tokens) >= wanted[name]:
                scheduler.remove(work.sequence)
                done.add(name)
        cache.check_integrity()
    assert done == wanted.keys()
    assert cache.pool.num_held == 0


MAX_MODEL_LEN = 60


def test_a_large_batch_guesses_nothing() -> None:
    cache = KvCache(32, BLOCK)
    config = SpeculationConfig(tokens=3, min_ngram=1, max_batch=2)
    scheduler = DecodeScheduler(cache, 32, Drafter(config, MAX_MODEL_LEN))
    three = [handed_over(cache, name, 5) for name in "abc"]
    for one in three:
        one.tokens.append(7)  # twice the same token: it may come again
        one.advance(cache, 1)
        scheduler.join(one, now=0.0)
    batch = scheduler.next(now=0.0)
    assert [work.draft for work in batch] == [(), (), ()]
    scheduler.complete(batch)
    scheduler.remove(three[0])
    for one in three[1:]:
        one.tokens.append(7)
    assert [work.draft for work in scheduler.next(now=0.0)] == [(7, 7, 7), (7, 7, 7)]


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_guesses_fit_take_no_block_that_is_needed_and_leave_nothing_to_be_found(
    data: st.DataObject,
) -> None:
    """Sequences of two different tokens, so that there is always something to guess, in a pool of
    any size.
    """
    cache = KvCache(data.draw(st.integers(16, 60), label="blocks"), BLOCK)
    config = SpeculationConfig(
        tokens=data.draw(st.integers(1, 9), label="tokens"), min_ngram=1, max_batch=3
    )
    max_tokens = data.draw(st.integers(1, 90), label="max_tokens")
    scheduler = DecodeScheduler(cache, 32, Drafter(config, MAX_MODEL_LEN))
    for number in range(data.draw(st.integers(1, 5), label="sequences")):
        prompt = tuple(
            data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=10), label="prompt")
        )
        spec = SequenceSpec(
            str(number), 0, prompt, len(prompt), SamplingParams(seed=0, max_tokens=max_tokens)
        )
        scheduler.add(Sequence(spec, float(number), BlockHasher(BLOCK)))
    right_names: set[bytes] = set()
    guessed_names: set[bytes] = set()
    while True:
        num_blocks = {one: len(one.blocks) for one in scheduler}
        batch = scheduler.next(now=0.0)
        if not batch:
            break
        guessing = [work for work in batch if work.draft]
        assert len(guessing) <= config.max_batch
        for work in guessing:
            one = work.sequence
            guessed = [*one.tokens, *work.draft]
            guessed_names.update(hashed(guessed, BLOCK).hashes)
            assert (one.uncomputed, work.num_tokens, work.sample) == (1, 1, True)
            assert len(guessed) < MAX_MODEL_LEN
            assert one.num_emitted + len(work.draft) < max_tokens
            assert len(work.draft) <= config.tokens
            assert len(one.blocks) * BLOCK >= len(guessed)
            if len(one.blocks) > max(num_blocks[one], -(-len(one.tokens) // BLOCK)):
                assert cache.pool.units_available >= len(guessing), "a spare block for each"
        scheduler.complete(batch)
        for work in batch:
            one = work.sequence
            right = data.draw(st.integers(0, len(work.draft)), label="right")
            tokens = (
                [*work.draft[:right], data.draw(st.integers(0, 1), label="token")]
                if work.sample
                else []
            )
            for index, token in enumerate(tokens):
                if index:
                    one.advance(cache, 1)
                one.tokens.append(token)
            right_names.update(hashed(one.tokens[: one.num_computed], BLOCK).hashes)
            if one.num_emitted >= max_tokens or len(one.tokens) >= MAX_MODEL_LEN:
                scheduler.remove(one)
        cache.check_integrity()
    assert not list(scheduler)
    assert cache.pool.num_held == 0
    assert not cache.pool._block_of.keys() & (guessed_names - right_names)


def test_a_sequence_goes_on_when_its_prefix_is_withdrawn() -> None:
    """What it fills from then on is not published, because its beginning is in doubt."""
    cache = KvCache(32, BLOCK)
    scheduler = DecodeScheduler(cache, chunk_tokens=32)
    first, second = sequence("first", 9), sequence("second", 10)
    for one in (first, second):
        scheduler.add(one)
        step(scheduler)
    assert first.blocks[:2] == second.blocks[:2]
    cache.withdraw(first.blocks)
    scheduler.remove(first)
    for _ in range(3 * BLOCK):
        step(scheduler)
    cache.check_integrity()
    assert cache.find(second.tokens, "") == []
    scheduler.remove(second)
    assert cache.pool.num_held == 0


def test_later_arrivals_do_not_take_the_blocks_that_a_waiting_sequence_needs() -> None:
    cache = KvCache(10, BLOCK)
    scheduler = DecodeScheduler(cache, chunk_tokens=64)
    running = handed_over(cache, "running", 4 * BLOCK - 1)
    scheduler.join(running, now=0.0)
    waiting = sequence("waiting", 7 * BLOCK, first=100)
    scheduler.add(waiting)
    step(scheduler)
    assert scheduler.waiting == (waiting,)
    assert scheduler.units_awaited(0) == 7 + 1
    assert scheduler.units_awaited(-1) == 0, "a more urgent one may take them"
    scheduler.remove(running)
    step(scheduler)
    assert scheduler.waiting == ()
    assert scheduler.units_awaited(0) == 0


def test_a_prompt_without_room_is_not_looked_up_in_every_step() -> None:
    cache = KvCache(10, BLOCK)
    scheduler = DecodeScheduler(cache, chunk_tokens=64)
    scheduler.join(handed_over(cache, "running", 4 * BLOCK - 3), now=0.0)
    scheduler.add(sequence("waiting", 7 * BLOCK, first=100))
    lookups = []
    match = cache.match
    cache.match = lambda *given: lookups.append(given) or match(*given)  # type: ignore[method-assign, func-returns-value]
    for _ in range(3):
        step(scheduler)
    assert len(lookups) == 1
    for _ in range(BLOCK):
        step(scheduler)
    assert len(lookups) == 2, "the running sequence has taken a block"
