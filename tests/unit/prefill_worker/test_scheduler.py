from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.sequence import Sequence
from prefill_worker.scheduler import PrefillScheduler

BLOCK = 4


def sequence(
    name: str,
    num_tokens: int,
    *,
    arrived: float = 0.0,
    priority: int = 0,
    first: int = 0,
    tenant: str = "",
    weight: float = 1.0,
) -> Sequence:
    tokens = tuple(range(first, first + num_tokens))
    spec = SequenceSpec(
        name,
        0,
        tokens,
        num_tokens,
        SamplingParams(seed=0),
        priority=priority,
        tenant=tenant,
        weight=weight,
    )
    return Sequence(spec, arrived, BlockHasher(BLOCK))


def shape(scheduler: PrefillScheduler) -> list[tuple[str, int, bool]]:
    batch = scheduler.next(now=1.0)
    scheduler.complete(batch)
    return [(work.sequence.spec.request_id, work.num_tokens, work.sample) for work in batch]


def test_a_long_prompt_goes_chunk_by_chunk_and_the_budget_is_filled_with_the_next() -> None:
    cache = KvCache(64, BLOCK)
    scheduler = PrefillScheduler(cache, chunk_tokens=10)
    long = sequence("long", 19)
    short = sequence("short", 3, arrived=1.0, first=100)
    scheduler.add(long)
    scheduler.add(short)
    assert shape(scheduler) == [("long", 8, False)], (
        "a chunk that is not the last ends with a full block"
    )
    assert shape(scheduler) == [("long", 8, False)]
    assert shape(scheduler) == [("long", 3, True), ("short", 3, True)]


def test_priority_goes_first_then_arrival() -> None:
    cache = KvCache(64, BLOCK)
    scheduler = PrefillScheduler(cache, chunk_tokens=100)
    for one in (
        sequence("late", 5, arrived=2.0, first=0),
        sequence("early", 5, arrived=1.0, first=10),
        sequence("urgent", 5, arrived=3.0, priority=-1, first=20),
    ):
        scheduler.add(one)
    assert [name for name, _, _ in shape(scheduler)] == ["urgent", "early", "late"]


def test_an_urgent_prompt_that_waits_for_blocks_does_not_stop_the_one_that_holds_them() -> None:
    cache = KvCache(8, BLOCK)
    scheduler = PrefillScheduler(cache, chunk_tokens=8)
    slow = sequence("slow", 20)
    scheduler.add(slow)
    assert shape(scheduler) == [("slow", 8, False)]
    scheduler.add(sequence("urgent", 20, arrived=1.0, priority=-1, first=50))
    scheduler.add(sequence("small", 2, arrived=2.0, first=100))
    assert shape(scheduler) == [("slow", 8, False)]
    assert shape(scheduler) == [("slow", 4, True)]
    scheduler.remove(slow)
    assert shape(scheduler) == [("urgent", 8, False)]


def test_a_prompt_that_waits_for_blocks_is_not_overtaken() -> None:
    cache = KvCache(4, BLOCK)
    scheduler = PrefillScheduler(cache, chunk_tokens=100)
    big, small = sequence("big", 16, arrived=1.0), sequence("small", 2, arrived=2.0, first=50)
    blocks = cache.allocate(1)
    scheduler.add(big)
    scheduler.add(small)
    assert shape(scheduler) == []
    cache.release(blocks)
    assert shape(scheduler) == [("big", 16, True)]


def test_a_cached_prefix_is_not_computed_again() -> None:
    cache = KvCache(64, BLOCK)
    scheduler = PrefillScheduler(cache, chunk_tokens=100)
    first, second = sequence("first", 18), sequence("second", 18)
    scheduler.add(first)
    assert shape(scheduler) == [("first", 18, True)]
    scheduler.remove(first)
    scheduler.add(second)
    assert shape(scheduler) == [("second", 2, True)]
    assert second.cached_tokens == 16


def test_blocks_of_a_sequence_that_is_removed_in_mid_step_are_freed_after_the_step() -> None:
    cache = KvCache(8, BLOCK)
    scheduler = PrefillScheduler(cache, chunk_tokens=100)
    one = sequence("one", 7)
    scheduler.add(one)
    batch = scheduler.next(now=0.0)
    scheduler.remove(one)
    assert cache.pool.num_held == 2, "the step still writes to them"
    scheduler.complete(batch)
    assert cache.pool.num_held == 0
    cache.check_integrity()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_prompt_is_computed_once_in_order_within_the_budget(data: st.DataObject) -> None:
    chunk = data.draw(st.integers(BLOCK, 24), label="chunk")
    cache = KvCache(16, BLOCK)
    scheduler = PrefillScheduler(cache, chunk)
    lengths = data.draw(
        st.lists(st.integers(1, 16 * BLOCK), min_size=1, max_size=8), label="lengths"
    )
    waiting = [sequence(str(i), n, arrived=float(i), first=1000 * i) for i, n in enumerate(lengths)]
    removed: set[str] = set()
    started: list[str] = []
    finished: set[str] = set()
    computed: dict[str, int] = {}
    for one in waiting:
        scheduler.add(one)
    for _ in range(1000):
        batch = scheduler.next(now=0.0)
        if not batch:
            break
        assert sum(work.num_tokens for work in batch) <= chunk
        started += [work.sequence.spec.request_id for work in batch if work.sequence.chunks == 1]
        if len(scheduler) > 1 and data.draw(st.integers(0, 9), label="remove") == 0:
            victim = data.draw(st.sampled_from(list(scheduler)), label="victim")
            scheduler.remove(victim)
            removed.add(victim.spec.request_id)
        scheduler.complete(batch)
        for work in batch:
            name = work.sequence.spec.request_id
            computed[name] = computed.get(name, 0) + work.num_tokens
            if work.sample and name not in removed:
                finished.add(name)
                scheduler.remove(work.sequence)
        cache.check_integrity()
    survivors = [one for one in waiting if one.spec.request_id not in removed]
    assert started == sorted(started, key=int), "first come, first served"
    assert finished == {one.spec.request_id for one in survivors}
    assert all(computed[one.spec.request_id] == len(one.tokens) for one in survivors)
    assert cache.pool.num_held == 0


def test_a_prompt_starts_when_another_has_computed_what_it_lacks() -> None:
    cache = KvCache(12, BLOCK)
    scheduler = PrefillScheduler(cache, chunk_tokens=2 * BLOCK)
    first = sequence("first", 10 * BLOCK, tenant="one")
    # It has the first eight blocks in common with the other, and room for two more.
    alike = sequence("alike", 8 * BLOCK, arrived=1.0, tenant="two")
    alike.tokens.extend(range(900, 900 + 2 * BLOCK))
    scheduler.add(first)
    shape(scheduler)
    scheduler.add(alike)
    names = [[name for name, _, _ in shape(scheduler)] for _ in range(5)]
    assert names.index(["alike"]) == 3, names


def test_a_short_prompt_does_not_wait_for_the_end_of_another_tenants_long_ones() -> None:
    cache = KvCache(256, BLOCK)
    scheduler = PrefillScheduler(cache, chunk_tokens=8)
    for number in range(5):
        scheduler.add(
            sequence(f"long{number}", 160, arrived=float(number), first=1000 * number, tenant="hog")
        )
    assert shape(scheduler) == [("long0", 8, False)]
    short = sequence("short", 5, arrived=9.0, first=9000, tenant="other")
    scheduler.add(short)
    assert shape(scheduler) == [("short", 5, True)]
    scheduler.remove(short)
    assert shape(scheduler)[0][0] == "long0"


def test_time_that_other_tenants_take_is_no_time_of_its_own() -> None:
    """So a worker with prompts of many tenants does not look slow."""
    cache = KvCache(256, BLOCK)
    scheduler = PrefillScheduler(cache, chunk_tokens=8)
    ours = sequence("ours", 16, tenant="a")
    scheduler.add(ours)
    scheduler.complete(scheduler.next(now=1.0))
    scheduler.add(sequence("theirs", 8, first=100, tenant="b"))
    (theirs,) = batch = scheduler.next(now=2.0)
    scheduler.complete(batch)
    scheduler.remove(theirs.sequence)
    scheduler.complete(scheduler.next(now=5.0))
    timings = ours.timings(now=6.0)
    assert (timings.queue_seconds, timings.compute_seconds) == (1.0 + 3.0, 2.0)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_prompts_of_tenants_that_wait_are_computed_by_weight(data: st.DataObject) -> None:
    """Whatever comes when: no tenant with prompts falls behind another by more than three chunks
    for its weight. One of them is for the remains of chunks, which go to whoever can use them.
    """
    chunk = 16
    weights = {name: data.draw(st.sampled_from((0.5, 1.0, 4.0)), label=name) for name in "abc"}
    cache = KvCache(4096, BLOCK, prefix_cache=False)
    scheduler = PrefillScheduler(cache, chunk)
    served = dict.fromkeys(weights, 0.0)
    together: tuple[frozenset[str], dict[str, float]] = frozenset(), {}
    for number in range(data.draw(st.integers(1, 60), label="steps")):
        for name in data.draw(st.lists(st.sampled_from("abc"), max_size=3), label="come"):
            length = data.draw(st.integers(1, 100), label="length")
            one = sequence(
                f"{name}{number}", length, arrived=float(number), tenant=name, weight=weights[name]
            )
            scheduler.add(one)
        present = frozenset(one.spec.tenant for one in scheduler)
        if present != together[0]:
            together = present, dict(served)  # they are compared from here on
        batch = scheduler.next(now=0.0)
        assert bool(batch) == bool(present)
        assert sum(work.num_tokens for work in batch) <= chunk
        scheduler.complete(batch)
        for work in batch:
            served[work.sequence.spec.tenant] += work.num_tokens / work.sequence.weight
            if work.sample:
                scheduler.remove(work.sequence)
        still = {one.spec.tenant for one in scheduler} & together[0]
        gained = {name: served[name] - together[1][name] for name in still}
        for name in gained:
            for other in gained:
                assert gained[other] - gained[name] <= 3 * chunk / min(
                    weights[name], weights[other]
                )
