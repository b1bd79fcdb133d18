"""When blocks are read, and when they are computed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.worker.tiers.tier_cost import DOUBLING_S, FIRST_GUESS, TierCost

rates = st.floats(1e3, 1e11)


@given(rates, st.floats(1, 1e6), st.integers(1, 100_000), st.integers(1, 2**40))
def test_the_sooner_way_is_taken(
    bytes_per_second: float, tokens_per_second: float, tokens: int, num_bytes: int
) -> None:
    cost = TierCost()
    assert cost.is_read_faster(tokens, num_bytes, 0.0), "nothing is known of computing"
    assert not cost.is_read_faster(0, num_bytes, 0.0)
    cost.add_compute(int(tokens_per_second * 1000), 1000.0)
    cost.bytes_per_second, cost.measured_at = bytes_per_second, 5.0
    read, computed = num_bytes / bytes_per_second, tokens / cost.tokens_per_second
    if read < 0.9 * computed - 0.002:
        assert cost.is_read_faster(tokens, num_bytes, 5.0)
    if read > 1.1 * computed:
        assert not cost.is_read_faster(tokens, num_bytes, 5.0)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.floats(0, 1e4), st.floats(0, 1e9))))
def test_any_measurements_leave_a_rate(measured: list[tuple[int, float, float]]) -> None:
    cost = TierCost()
    for num_bytes, seconds, now in measured:
        cost.add_read(num_bytes, seconds, now)
        assert 0 < cost.expected_rate(now) <= 1e12
        # Also if a clock went back.
        assert 0 < cost.expected_rate(now - 1e6) <= 1e12
        assert 0 < cost.expected_rate(now + 1e9) <= 1e12


def test_a_slow_disk_is_tried_again_later() -> None:
    cost = TierCost()
    cost.add_compute(1000, 1.0)
    cost.add_read(0, 5.0, 0.0)
    assert not cost.is_read_faster(100, 10**6, 0.0)
    assert cost.expected_rate(1e9) == FIRST_GUESS
    assert cost.is_read_faster(100, 10**6, 1e9)
    cost.bytes_per_second = 1e6
    assert cost.expected_rate(DOUBLING_S) == 2e6
