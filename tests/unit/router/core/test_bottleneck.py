"""The share of the waiting time that is for prefill workers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.queueing.bottleneck import MEAN_S, MINOR, Bottleneck

# Seconds, whether requests wait, whether they wait for prefill workers.
SPANS = st.lists(st.tuples(st.floats(0.0, 20.0), st.booleans(), st.booleans()), max_size=30)


@given(SPANS)
def test_it_is_the_mean_with_weights_that_fade(spans: list[tuple[float, bool, bool]]) -> None:
    bottleneck, now = Bottleneck(), 0.0
    times = []
    for seconds, waits, for_prefill in spans:
        bottleneck.note(waits, for_prefill, now)
        times.append((now, now + seconds, waits, for_prefill))
        now += seconds
    bottleneck.note(waits=False, for_prefill=False, now=now)

    def weight(begin: float, end: float) -> float:
        return math.exp((end - now) / MEAN_S) - math.exp((begin - now) / MEAN_S)

    waited = sum(weight(begin, end) for begin, end, waits, _ in times if waits)
    for_prefill = sum(weight(begin, end) for begin, end, waits, it in times if waits and it)
    if waited > 1e-6:
        share = for_prefill / waited
        expected = 0.0 if share < MINOR else 1.0 if share > 1 - MINOR else share
        if min(abs(share - MINOR), abs(share - 1 + MINOR)) > 1e-6:
            assert bottleneck.prefill_share == pytest.approx(expected, abs=1e-6)
    assert 0.0 <= bottleneck.prefill_share <= 1.0


def test_without_a_past_it_is_the_present() -> None:
    bottleneck = Bottleneck()
    assert bottleneck.prefill_share == 0.0
    bottleneck.note(waits=True, for_prefill=True, now=3.0)
    assert bottleneck.prefill_share == 1.0


def test_what_was_long_ago_does_not_count() -> None:
    bottleneck = Bottleneck()
    bottleneck.note(waits=True, for_prefill=False, now=0.0)
    bottleneck.note(waits=False, for_prefill=False, now=60.0)
    bottleneck.note(waits=True, for_prefill=True, now=1e6)
    bottleneck.note(waits=True, for_prefill=True, now=1e6 + 0.01)
    assert bottleneck.prefill_share == pytest.approx(1.0)
