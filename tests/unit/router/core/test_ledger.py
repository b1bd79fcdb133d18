"""Where a request's time went: what holds of every ledger."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.types.requests import PrefillTimings
from router.core.ledger import Timeline

gap = st.floats(0, 10)


@given(arrival=gap, queue=gap, first=gap, more=st.lists(gap, max_size=3), handed=gap, ended=gap)
def test_no_part_is_longer_than_the_whole(
    arrival: float, queue: float, first: float, more: list[float], handed: float, ended: float
) -> None:
    """Whether the client takes the first token before or after the last one came: one-token answers
    end at once.
    """
    timeline = Timeline(arrival)
    now = arrival + queue
    timeline.mark("queue", now)
    now += first
    timeline.tokens(now, 1, PrefillTimings(queue, first, 0, 1))
    emitted = now + handed
    for one in more:
        now += one
        timeline.tokens(now, 1, None)
    ledger = timeline.ledger(emitted, now + ended, None, ())
    slack = 1e-9 * (1 + now + handed)
    assert ledger.ttft_seconds <= ledger.e2e_seconds + slack
    assert ledger.second_token_gap_seconds <= ledger.decode_seconds + slack
    assert ledger.decode_seconds <= ledger.e2e_seconds + slack
    assert abs(sum(seconds for _, seconds in ledger.phases) - ledger.ttft_seconds) <= slack
