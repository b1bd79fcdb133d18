from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import Internal
from kvrelay.loadtest.counters import PrefixCache, read_counters
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.reuse import measure_reuse

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12)


def row(index: int, at: float = 0.0, ttft: float = 1.0, cached: int = 0) -> Row:
    return Row(at, 0.0, ttft_s=ttft, cached_tokens=cached, index=index)


def naive(prompts: list[list[int]], block: int) -> int:
    """Each prompt against all before it, prefix by prefix."""
    total = 0
    for place, prompt in enumerate(prompts):
        ends = [
            end
            for end in range(block, len(prompt), block)
            if any(prompt[:end] == one[:end] for one in prompts[:place])
        ]
        total += max(ends, default=0)
    return total


@given(PROMPTS, st.integers(1, 4))
def test_an_unlimited_cache_holds_what_came_before(prompts: list[list[int]], block: int) -> None:
    rows = [row(index, at=float(index), ttft=0.5) for index in range(len(prompts))]
    reuse = measure_reuse(dict(enumerate(prompts)), rows, block)
    assert reuse.unlimited == reuse.computed == naive(prompts, block)
    assert reuse.prompt == sum(map(len, prompts))


def test_what_is_not_yet_computed_cannot_be_reused() -> None:
    prompts = {place: [1, 2, 3, 4, 5] for place in range(3)}
    rows = [row(0, at=0.0, ttft=1.0), row(1, at=0.5), row(2, at=1.5)]
    reuse = measure_reuse(prompts, rows, 2)
    assert (reuse.unlimited, reuse.computed) == (8, 4)


def test_failed_requests_do_not_count() -> None:
    rows = [row(0, cached=4), Row(1.0, 0.0, error="UNAVAILABLE", index=1)]
    reuse = measure_reuse({0: [1] * 8, 1: [1] * 8}, rows, 4, PrefixCache(3, 12))
    assert (reuse.prompt, reuse.reported) == (8, 4)
    assert reuse.shares() == {"unlimited": 0.0, "computed": 0.0, "reported": 0.5, "counters": 0.25}


def test_nothing_sent_has_no_share() -> None:
    assert set(measure_reuse({}, [], 16).shares().values()) == {0.0}


@pytest.mark.parametrize("prefix", ["kvrelay_", "vllm:"])
def test_counters_of_all_engines_are_added(prefix: str) -> None:
    text = (
        f"# TYPE {prefix}prefix_cache_hits counter\n"
        f'{prefix}prefix_cache_hits_total{{model_name="a"}} '
        f'12.0\n{prefix}prefix_cache_hits_total{{model_name="b"}} 3\n'
        f'{prefix}prefix_cache_queries_total{{model_name="a"}} 1e2\n'
        f'{prefix}prefix_cache_queries_created{{model_name="a"}} 1.7e9\n'
    )
    assert read_counters(text) == PrefixCache(15, 100)
    assert PrefixCache(15, 100).since(PrefixCache(5, 40)) == PrefixCache(10, 60)


def test_a_server_without_these_counters_has_none() -> None:
    assert read_counters("process_cpu_seconds_total 3\n") is None


def test_counters_that_went_backwards_say_nothing() -> None:
    assert PrefixCache(2, 100).since(PrefixCache(5, 40)) is None
    assert PrefixCache(9, 30).since(PrefixCache(5, 40)) is None


def test_a_counter_that_is_no_number_is_an_error() -> None:
    with pytest.raises(Internal, match="prefix_cache_hits is 'NaN'"):
        read_counters("vllm:prefix_cache_hits_total NaN\n")
