"""What a router tells the autoscaler of its last requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.types.control_plane import RECENT, RequestShape
from router.core.recent_requests import RecentRequests

COUNTS = st.integers(0, 10_000)


def test_rare_large_requests_count_as_often_as_they_come() -> None:
    requests = RecentRequests()
    for number in range(1000):
        requests.ended(8000 if number % 32 == 0 else 100, 0, 20, number / 100)
    sample = requests.sample(10.0)
    assert len(sample) == RECENT
    assert sum(one.prompt_tokens == 8000 for one in sample) == 2


def test_a_cancelled_prompt_was_no_work() -> None:
    requests = RecentRequests()
    requests.ended(700, 0, 0, 1.0)
    requests.ended(700, 64, 1, 1.0)
    assert requests.sample(1.0) == (RequestShape(700, 700, 0), RequestShape(700, 64, 1))


def test_old_requests_are_forgotten_except_for_a_few() -> None:
    requests = RecentRequests()
    for number in range(1000):
        requests.ended(100, 0, 1, float(number))
    for number in range(30):
        requests.ended(900, 0, 1, 2000.0 + number)
    sample = requests.sample(2050.0)
    assert sum(one.prompt_tokens == 900 for one in sample) == 30
    assert len(sample) == RECENT


@given(st.lists(st.tuples(COUNTS, COUNTS, COUNTS), max_size=1500))
def test_a_sample_is_of_the_requests(shapes: list[tuple[int, int, int]]) -> None:
    requests = RecentRequests()
    for number, (prompt, cached, output) in enumerate(shapes):
        requests.ended(prompt, cached, output, number / 100)
    sample = requests.sample(15.0)
    assert len(sample) == min(RECENT, len(shapes))
    kept = {(one.prompt_tokens, one.output_tokens) for one in sample}
    assert kept <= {(prompt, output) for prompt, _, output in shapes}
