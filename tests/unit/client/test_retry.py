from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.client.retry import Retry, RetryPolicy
from kvrelay.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    FailedPrecondition,
    KvRelayError,
    ResourceExhausted,
    Unavailable,
    error_for,
)

DOWN = Unavailable("down")


def make(
    num_targets: int = 1, timeout: float = 1000.0, draw: float = 1.0, **policy: float
) -> Retry:
    return Retry(RetryPolicy(**policy), num_targets, timeout, draw=lambda: draw)  # type: ignore[arg-type]


def test_waits_double_up_to_the_limit() -> None:
    retry = make(max_attempts=8, initial_backoff_s=0.1, max_backoff_s=1.0)
    assert [retry.failed(DOWN, 0.0) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_jitter_is_full() -> None:
    assert make(draw=0.0).failed(DOWN, 0.0) == 0.0
    assert make(draw=0.25, initial_backoff_s=0.1).failed(DOWN, 0.0) == 0.025


@given(draw=st.floats(0, 1), delay=st.floats(0, 100), failures=st.integers(0, 3))
def test_never_before_the_servers_delay(draw: float, delay: float, failures: int) -> None:
    retry = make(draw=draw)
    for _ in range(failures):
        retry.failed(DOWN, 0.0)
    assert retry.failed(ResourceExhausted("full", retry_after_s=delay), 0.0) >= delay


def test_the_shortest_delay_of_a_round_counts_whichever_target_asked_for_it() -> None:
    full = ResourceExhausted("full", retry_after_s=30.0)
    less = ResourceExhausted("full", retry_after_s=2.0)
    retry = make(num_targets=2, max_attempts=10, draw=0.0)
    rounds = [(full, DOWN), (full, less), (DOWN, less), (DOWN, DOWN)]
    waits = [retry.failed(error, 0.0) for one in rounds for error in one]
    assert waits == [0.0, 30.0, 0.0, 2.0, 0.0, 2.0, 0.0, 0.0]


def test_a_delay_beyond_the_deadline_ends_the_call_only_if_all_targets_ask_for_one() -> None:
    full = ResourceExhausted("full", retry_after_s=10_000.0)
    retry = make(num_targets=2, max_attempts=10, draw=0.0)
    retry.begin(0.0)
    assert [retry.failed(one, 0.0) for one in (full, DOWN, full)] == [0.0, 0.0, 0.0]
    with pytest.raises(ResourceExhausted):
        retry.failed(full, 0.0)


def test_a_delay_from_before_the_progress_does_not_count() -> None:
    retry = make(num_targets=2, draw=0.0)
    retry.failed(ResourceExhausted("full", retry_after_s=30.0), 0.0)
    retry.progress()
    assert [retry.failed(DOWN, 0.0) for _ in range(2)] == [0.0, 0.0]


def test_attempts_are_bounded_and_the_last_error_is_raised() -> None:
    retry = make(max_attempts=3)
    retry.failed(DOWN, 0.0)
    retry.failed(DOWN, 0.0)
    with pytest.raises(Unavailable, match="the third"):
        retry.failed(Unavailable("the third"), 0.0)


@given(max_attempts=st.integers(1, 20), max_reconnects=st.integers(1, 20), lost=st.integers(0, 3))
def test_a_router_that_has_answered_is_worth_more_attempts(
    max_attempts: int, max_reconnects: int, lost: int
) -> None:
    retry = make(max_attempts=max_attempts, max_reconnects=max_reconnects)
    for _ in range(min(lost, max_attempts - 1)):
        retry.failed(DOWN, 0.0)
    retry.progress()
    attempts = max(max_attempts, max_reconnects) if max_attempts > 1 else 1
    for _ in range(attempts - 1):
        retry.failed(DOWN, 0.0)
    with pytest.raises(Unavailable):
        retry.failed(DOWN, 0.0)


def test_progress_starts_the_count_again() -> None:
    retry = make(max_attempts=2, max_reconnects=1)
    for _ in range(5):
        retry.failed(DOWN, 0.0)
        retry.progress()
    retry.failed(DOWN, 0.0)
    with pytest.raises(Unavailable):
        retry.failed(DOWN, 0.0)


def test_each_target_is_tried_before_any_waiting() -> None:
    retry = make(num_targets=3, max_attempts=10, initial_backoff_s=0.1)
    assert [(retry.target, retry.failed(DOWN, 0.0)) for _ in range(6)] == [
        (0, 0.0),
        (1, 0.0),
        (2, 0.1),
        (0, 0.0),
        (1, 0.0),
        (2, 0.2),
    ]


@pytest.mark.parametrize(
    "code", [one for one in Code if one not in (Code.UNAVAILABLE, Code.DATA_LOSS)]
)
def test_other_errors_are_final(code: Code) -> None:
    with pytest.raises(KvRelayError) as caught:
        make().failed(error_for(code, "final"), 0.0)
    assert caught.value.code is code


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.DATA_LOSS])
def test_passing_errors_are_tried_again(code: Code) -> None:
    assert make(draw=0.0).failed(error_for(code, "passing"), 0.0) == 0.0


def test_a_request_id_still_in_use_is_ours_after_a_retry_only() -> None:
    in_use = FailedPrecondition("request id in use")
    first = make()
    first.begin(0.0)
    with pytest.raises(FailedPrecondition):
        first.failed(in_use, 0.0)
    second = make(draw=0.0)
    second.begin(0.0)
    second.failed(DOWN, 0.0)
    second.begin(0.0)
    assert second.failed(in_use, 0.0) == 0.0


def test_no_wait_reaches_over_the_deadline() -> None:
    retry = make(timeout=10.0)
    retry.begin(100.0)
    with pytest.raises(ResourceExhausted):
        retry.failed(ResourceExhausted("full", retry_after_s=4.0), 106.0)


def test_each_call_gets_what_is_left_since_the_first() -> None:
    retry = make(timeout=10.0)
    assert (retry.begin(100.0), retry.begin(109.5), retry.calls) == (10.0, 0.5, 2)
    with pytest.raises(DeadlineExceeded):
        retry.begin(110.0)


def test_endless_timeout_s_does_not_overflow() -> None:
    retry = make(max_attempts=10**6, max_backoff_s=0.5)
    assert max(retry.failed(DOWN, 0.0) for _ in range(3000)) == 0.5


def test_cancellation_is_final() -> None:
    with pytest.raises(Cancelled):
        make().failed(Cancelled("by the user"), 0.0)


@given(num_targets=st.integers(1, 20), max_attempts=st.integers(1, 20))
def test_every_target_is_tried_unless_there_are_no_retries(
    num_targets: int, max_attempts: int
) -> None:
    retry, tried = make(num_targets=num_targets, max_attempts=max_attempts), list[int]()
    with suppress(Unavailable):
        while True:
            tried.append(retry.target)
            retry.failed(DOWN, 0.0)
    assert len(tried) == (max(num_targets, max_attempts) if max_attempts > 1 else 1)
    assert set(tried) == set(range(min(num_targets, len(tried))))
