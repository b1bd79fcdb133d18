from __future__ import annotations

import pytest

from router.core.throughput import EVIDENCE, WINDOW_S, Throughput


def leave(made: Throughput, begin: float, number: int, every_s: float) -> float:
    """So many requests leave the queue, which is never empty; returns when the last one did."""
    now = begin
    made.watch(now, queued=True)
    for _ in range(number):
        now += every_s
        made.advance(now)
        made.left_queue()
        made.watch(now, queued=True)
    return now


def test_the_rate_is_that_of_the_time_with_a_queue() -> None:
    made = Throughput()
    assert made.per_second is None
    now = leave(made, 0.0, 100, 0.1)
    assert made.per_second == pytest.approx(10, rel=0.05)
    made.watch(now, queued=False)
    now = leave(made, now + 1000.0, 20, 0.1)
    assert made.per_second == pytest.approx(10, rel=0.05), "the time without one does not count"


def test_it_follows_what_the_cluster_does_now() -> None:
    made = Throughput()
    now = leave(made, 0.0, 100, 0.1)
    leave(made, now, int(3 * WINDOW_S / 0.5), 0.5)
    assert made.per_second == pytest.approx(2, rel=0.25)


def test_too_little_is_no_measure() -> None:
    made = Throughput()
    leave(made, 0.0, int(EVIDENCE) - 1, 0.1)
    assert made.per_second is None
    leave(made, 1.0, 10, 0.1)
    assert made.per_second is not None
    made.forget_rate()
    assert made.per_second is None


def test_requests_that_did_not_wait_are_not_counted() -> None:
    made = Throughput()
    for _ in range(100):
        made.left_queue()
    assert made.per_second is None


@pytest.mark.parametrize(
    ("answers", "max_tokens", "expected"),
    [
        ([], 64, 0.0),
        ([(64, 64)], 64, 6.4),
        ([(64, 64)], 32, 3.2),
        ([(64, 64)], 128, 12.8),  # answers use all the room that they have
        ([(50, 4096)], 4096, 5.0),  # answers end long before that
        ([(50, 4096)], 10, 1.0),
        ([(50, 4096), (64, 64)] * 100, 64, 5.7),  # as long as answers are
    ],
)
def test_how_long_a_request_will_be_served(
    answers: list[tuple[int, int]], max_tokens: int, expected: float
) -> None:
    made = Throughput()
    for tokens, room in answers:
        made.finished(0.1 * tokens, 10, tokens, room)
    assert made.service_s(max_tokens) == pytest.approx(expected, rel=0.05)


def test_an_answer_without_a_bound_takes_the_mean_time() -> None:
    made = Throughput()
    for _ in range(200):
        made.finished(2.0, 10, 20, None)
    assert made.service_s(None) == pytest.approx(2.0)
    assert made.service_s(20) == pytest.approx(2.0)
