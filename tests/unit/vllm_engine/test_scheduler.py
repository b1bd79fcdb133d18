"""Sequences that come and go around steps that a model of vLLM runs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.engine.sampling.sampler import Sampled
from kvrelay.errors import Internal
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.vllm_engine.engine import Start, StepResult
from kvrelay.vllm_engine.exchange import Exchange
from kvrelay.vllm_engine.scheduler import Limits, VllmScheduler
from kvrelay.worker.sequence import Sequence

SIZE, STAGING, BUDGET = 4, 12, 10
LIMITS = Limits(64, frozenset({1}), BUDGET, 40)


@dataclass
class PlayedVllm:
    """Computes up to BUDGET tokens of a step, in order, and draws after the last token of each
    sequence. Forgets one that has had all of its tokens, and starts anew one that it preempts.
    """

    computed: dict[str, int] = field(default_factory=dict)
    starts: dict[str, Start] = field(default_factory=dict)
    drawn: dict[str, int] = field(default_factory=dict)
    preempted: dict[str, int] = field(default_factory=dict)

    def step(self, starts: list[Start], aborts: list[str], draw: random.Random) -> StepResult:
        for name in aborts:
            self.computed.pop(name, None)
        for start in starts:
            assert start.name not in self.starts, "a name is used once"
            self.starts[start.name], self.computed[start.name] = start, 0
            self.drawn[start.name] = self.preempted[start.name] = 0
        result, left = StepResult(), BUDGET
        for name in list(self.computed):
            if draw.random() < 0.1:
                self.computed[name] = 0
                self.preempted[name] += 1
                continue
            length = len(self.starts[name].token_ids) + self.drawn[name]
            chunk = min(left, length - self.computed[name])
            left -= chunk
            self.computed[name] += chunk
            if chunk and self.computed[name] == length:
                if draw.random() < 0.1:
                    result.failed[name] = Internal("no token")
                    del self.computed[name]
                    continue
                result.drawn[name] = Sampled(7)
                self.drawn[name] += 1
                if self.drawn[name] == self.starts[name].max_tokens:
                    del self.computed[name]
        result.progress = {
            name: (done, self.preempted[name]) for name, done in self.computed.items()
        }
        return result


def sequence(cache: KvCache, number: int, length: int, max_tokens: int) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    spec = SequenceSpec(f"r{number}", 0, tuple(range(2, 2 + length)), length, params)
    return Sequence(spec, 0.0, cache.hasher(""))


@given(st.randoms(use_true_random=False), st.booleans())
def test_every_sequence_gets_its_tokens_and_all_blocks_come_back(
    draw: random.Random, leaves: bool
) -> None:
    cache, exchange, vllm = KvCache(STAGING, SIZE, prefix_cache=False), Exchange(), PlayedVllm()
    scheduler = VllmScheduler(cache, exchange, LIMITS, leaves=leaves)
    live: dict[Sequence, int] = {}

    def end(one: Sequence) -> None:
        scheduler.remove(one)
        del live[one]

    for number in range(40):
        for _ in range(draw.randrange(3)):
            one = sequence(cache, number, draw.randrange(1, 20), draw.randrange(1, 4))
            if not leaves and draw.random() < 0.5 and cache.pool.units_available >= 6:
                # Its KV came from a prefill worker.
                one.take_blocks(cache, len(one.tokens))
                one.num_computed = len(one.tokens)
                one.append(5, LIMITS.eos_token_ids, LIMITS.max_model_len)
                scheduler.join(one, now=0.0)
            else:
                scheduler.add(one)
            live[one] = 0
        if live and draw.random() < 0.2:
            end(draw.choice(list(live)))
        starts, aborts = scheduler.next()
        # While the step runs, its staging blocks stay whoever leaves.
        used = {block for one in exchange.sequences.values() for block in one.sequence.blocks}
        gone = draw.choice(list(live)) if live and draw.random() < 0.2 else None
        if gone is not None:
            end(gone)
        assert not used & _free(cache), "a block that vLLM may read or write is free"
        batch, sampled, failures = scheduler.complete(vllm.step(starts, aborts, draw), 1.0)
        for work, _ in failures:
            end(work.sequence)
        for work, draws in zip(batch, sampled, strict=True):
            one = work.sequence
            assert one is not gone
            assert one.started is not None
            assert work.sample == bool(draws)
            if not draws:
                continue
            assert one.num_computed == len(one.tokens), "a token follows the KV of all others"
            finish = one.append(7, LIMITS.eos_token_ids, LIMITS.max_model_len)
            live[one] += 1
            if finish is not None or leaves:
                end(one)
        assert len(scheduler) == len(live)
        cache.check_integrity()
    for one in list(live):
        end(one)
    scheduler.complete(vllm.step(*scheduler.next(), draw), 1.0)
    assert not exchange.sequences
    assert not vllm.computed
    assert cache.pool.num_free == STAGING
    assert not scheduler.has_work


def _free(cache: KvCache) -> set[int]:
    pool = cache.pool
    return {block for block in range(pool.num_blocks) if pool._references[block] == 0}


def test_a_prompt_without_staging_blocks_waits_with_those_behind_it() -> None:
    cache = KvCache(4, SIZE, prefix_cache=False)
    scheduler = VllmScheduler(cache, Exchange(), LIMITS, leaves=True)
    first, long, short = (sequence(cache, n, length, 1) for n, length in enumerate((8, 12, 1)))
    for one in (first, long, short):
        scheduler.add(one)
    assert [start.token_ids for start in scheduler.next()[0]] == [tuple(first.tokens)]
    assert not scheduler.next()[0], "a short prompt does not pass the long one"
    scheduler.complete(StepResult(), 1.0)
    scheduler.remove(first)
    assert [len(start.token_ids) for start in scheduler.next()[0]] == [12, 1]


def test_reservations_leave_room_in_vllms_memory() -> None:
    """Staging has room for more than vLLM has: what is asked to be left free is the difference."""
    cache = KvCache(60, SIZE, prefix_cache=False)
    scheduler = VllmScheduler(cache, Exchange(), LIMITS)
    assert scheduler.units_awaited(0) == 60 - LIMITS.total_blocks
    one = sequence(cache, 0, 16, 4)
    scheduler.add(one)
    assert scheduler.units_awaited(0) == 60 - LIMITS.total_blocks + 5
    scheduler.remove(one)
    assert scheduler.units_awaited(0) == 60 - LIMITS.total_blocks


@pytest.mark.parametrize(
    ("max_tokens", "emitted", "expected"), [(10, 0, 10), (10, 3, 7), (1000, 0, 60), (3, 3, 1)]
)
def test_vllm_ends_an_answer_that_the_worker_does_not(
    max_tokens: int, emitted: int, expected: int
) -> None:
    cache = KvCache(STAGING, SIZE, prefix_cache=False)
    scheduler = VllmScheduler(cache, Exchange(), LIMITS)
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    spec = SequenceSpec("r", 0, tuple(range(4 + emitted)), 4, params)
    scheduler.add(Sequence(spec, 0.0, cache.hasher("")))
    (start,), _ = scheduler.next()
    assert start.max_tokens == expected
