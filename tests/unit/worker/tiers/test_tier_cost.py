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


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**40), st.floats(0, 1e4), st.floats(0, 1e9), st.integers(1, 2**40)
        )
    )
)
def test_any_measurements_leave_a_rate(measured: list[tuple[int, float, float, int]]) -> None:
    cost = TierCost()
    for num_bytes, seconds, now, wanted in measured:
        cost.add_read(num_bytes, seconds, now, wanted=wanted)
        assert 0 < cost.expected_rate(now) <= 1e12
        # Also if a clock went back.
        assert 0 < cost.expected_rate(now - 1e6) <= 1e12
        assert 0 < cost.expected_rate(now + 1e9) <= 1e12


def reads_until(cost: TierCost, faster: bool, num_bytes: int, seconds: float) -> int:
    """How many such reads it takes until reading counts as faster, or as slower."""
    for count in range(100):
        if cost.is_read_faster(900, WANTED, 0.0) is faster:
            return count
        cost.add_read(num_bytes, seconds, 0.0, wanted=WANTED)
    raise AssertionError("it never does")


# The KV of a prompt that takes 75 ms to compute, as in a cluster of the bundled model.
WANTED, COMPUTE_S = 4_600_000, 0.075


@given(st.floats(1e6, 1e12), st.floats(0.2, 5.0))
def test_a_store_that_becomes_slow_is_noticed_soon(fast: float, slow_s: float) -> None:
    """However fast it was measured before, where a short time is measured inexactly."""
    cost = TierCost()
    cost.add_compute(900, COMPUTE_S)
    for _ in range(50):
        cost.add_read(WANTED, WANTED / fast, 0.0, wanted=WANTED)
    assert reads_until(cost, False, 0, slow_s) <= 6


@given(st.floats(0.05, 5.0), st.integers(0, WANTED - 1))
def test_one_slow_moment_is_forgotten_within_minutes(seconds: float, arrived: int) -> None:
    """Also if it was the first measurement."""
    cost = TierCost()
    cost.add_compute(900, COMPUTE_S)
    cost.add_read(arrived, seconds, 0.0, wanted=WANTED)
    assert cost.is_read_faster(900, WANTED, 10 * DOUBLING_S)
    assert reads_until(cost, True, WANTED, 0.01) <= 3


def test_a_slow_disk_is_tried_again_later() -> None:
    cost = TierCost()
    cost.add_compute(1000, 1.0)
    cost.add_read(0, 5.0, 0.0, wanted=10**6)
    assert not cost.is_read_faster(100, 10**6, 0.0)
    assert cost.expected_rate(1e9) == FIRST_GUESS
    assert cost.is_read_faster(100, 10**6, 1e9)
    cost.bytes_per_second = 1e6
    assert cost.expected_rate(DOUBLING_S) == 2e6
