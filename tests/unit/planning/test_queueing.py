"""The formulas of waiting, beside exact sums and a simulation."""

from __future__ import annotations

import heapq
import math
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.planning.sizing.queueing import Wait, erlang_c, square_root_servers


def exact_erlang_c(servers: int, offered: Fraction) -> float:
    """Erlang's formula as its sum."""
    terms = [offered**n / math.factorial(n) for n in range(servers)]
    last = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return float(last / (sum(terms) + last))


@given(st.integers(1, 60), st.fractions(Fraction(1, 100), Fraction(99, 100), max_denominator=100))
def test_erlang_c_is_its_sum(servers: int, share: Fraction) -> None:
    assert erlang_c(servers, float(share * servers)) == pytest.approx(
        exact_erlang_c(servers, share * servers), rel=1e-9
    )


@given(st.integers(1, 5000), st.floats(0, 6000))
def test_more_servers_never_wait_longer(servers: int, offered: float) -> None:
    one, more = erlang_c(servers, offered), erlang_c(servers + 1, offered)
    assert 0 <= more <= one * (1 + 2e-2) + 1e-12
    assert one <= 1


@pytest.mark.parametrize("share", [0.9, 0.97, 0.99])
def test_the_limit_of_many_servers_meets_the_recursion(share: float) -> None:
    assert erlang_c(2001, share * 2001) == pytest.approx(
        erlang_c(2000, share * 2000), rel=0.05, abs=1e-4
    )


@given(st.floats(1, 2000), st.floats(0.01, 0.9))
def test_square_root_staffing_meets_erlang(offered: float, share: float) -> None:
    """Within two servers of the exact number."""
    servers = square_root_servers(offered, share)
    exact = math.floor(offered) + 1
    while erlang_c(exact, offered) > share:
        exact += 1
    assert abs(servers - exact) <= 2


def simulated(servers: int, rate: float, service: list[float], number: int) -> list[float]:
    """Waits of Poisson arrivals before the first free server."""
    random, now = Random(7), 0.0
    free = [0.0] * servers
    waits = []
    for _ in range(number):
        now += random.expovariate(rate)
        start = max(now, heapq.heappop(free))
        waits.append(start - now)
        heapq.heappush(free, start + random.choice(service))
    return waits


@pytest.mark.parametrize(
    ("servers", "share", "service"),
    [(1, 0.7, [1.0]), (4, 0.8, [1.0]), (8, 0.85, [0.2] * 9 + [8.2]), (3, 0.6, [0.5, 1.5])],
)
def test_the_wait_meets_a_simulation(servers: int, share: float, service: list[float]) -> None:
    mean = sum(service) / len(service)
    scv = sum((one - mean) ** 2 for one in service) / len(service) / mean**2
    rate = share * servers / mean
    waits = simulated(servers, rate, service, 60_000)
    wait = Wait(servers, rate, mean, 1.0, scv)
    assert wait.mean_s == pytest.approx(sum(waits) / len(waits), rel=0.25)
    for seconds in (mean, 3 * mean):
        found = sum(one > seconds for one in waits) / len(waits)
        assert wait.beyond(seconds) == pytest.approx(found, abs=0.06)


@given(st.integers(1, 50), st.floats(0.1, 100), st.floats(0.001, 10), st.floats(0, 5))
def test_a_wait_is_a_distribution(servers: int, rate: float, service: float, scv: float) -> None:
    wait = Wait(servers, rate, service, 1.0, scv)
    assert wait.beyond(-1) == 1
    values = [wait.beyond(seconds) for seconds in (0.0, 0.1, 1.0, 10.0)]
    assert values == sorted(values, reverse=True)
    assert all(0 <= one <= 1 for one in values)
    if rate * service >= servers:
        assert values == [1.0] * 4
