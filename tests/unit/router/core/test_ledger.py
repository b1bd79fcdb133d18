"""Where a request's time went: what holds of every ledger."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.types.requests import Attempt, PrefillTimings
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
    assert ledger.ttft_seconds + ledger.decode_seconds <= ledger.e2e_seconds + slack
    assert abs(sum(seconds for _, seconds in ledger.phases) - ledger.ttft_seconds) <= slack


STEPS = st.lists(
    st.tuples(st.sampled_from(["mark", "tokens", "prefilled"]), st.integers(0, 64)), max_size=8
)


@given(attempts=st.lists(STEPS, min_size=2, max_size=4))
def test_the_attempts_divide_the_time_without_gaps(
    attempts: list[list[tuple[str, int]]],
) -> None:
    """Whatever happens in each of them, in sixteenths of a second, which floats add exactly."""
    timeline, now, ends = Timeline(0.0), 0.0, [0.0]
    for steps in attempts:
        now += 1.0
        timeline.mark("queue", now)
        for step, wait in steps:
            now += wait / 16
            if step == "mark":
                timeline.mark("reserve", now)
            else:
                timings = PrefillTimings(wait / 32, wait / 32, 0, 1)
                timeline.tokens(now, 1, timings if step == "prefilled" else None)
        timeline.end_attempt()
        ends.append(now)
    recorded = tuple(Attempt("local", "", "", "d", str(number)) for number in range(len(attempts)))
    ledger = timeline.ledger(None, now, None, recorded)
    spent = [sum(seconds for _, seconds in one.phases) for one in ledger.attempts]
    assert spent == [end - start for start, end in pairwise(ends)]
    assert all(seconds >= 0 for one in ledger.attempts for _, seconds in one.phases)


def test_the_ledger_counts_what_the_last_token_did_not_attend_to() -> None:
    timeline = Timeline(0.0)
    timeline.tokens(1.0, 1, PrefillTimings(0.5, 0.5, 0, 1))
    timeline.tokens(2.0, 1, None, 16)
    timeline.tokens(3.0, 1, None, 48)
    assert timeline.ledger(1.0, 3.0, None, ()).dropped_tokens == 48
