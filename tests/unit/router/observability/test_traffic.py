"""The traffic of several processes, against that of one that had all of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.percentiles import percentile
from kvrelay.types.control_plane import RouterLoad
from router.observability.history import History
from router.observability.traffic import (
    MOST_LATENCIES,
    Latencies,
    RouterTraffic,
    Traffic,
    percentiles,
)

PERCENTS = (1, 50, 95, 99, 100)
seconds = st.floats(0, 100, allow_nan=False)
counts = st.integers(0, 99)


def latencies(values: list[float]) -> Latencies:
    return Latencies(tuple(sorted(values)))


@given(st.lists(st.lists(seconds, max_size=MOST_LATENCIES), max_size=5))
def test_percentiles_of_few_latencies_are_exact(parts: list[list[float]]) -> None:
    together = sorted(value for one in parts for value in one)
    found = percentiles([latencies(one).thinned() for one in parts], *PERCENTS)
    assert found == tuple(percentile(together, one) if together else None for one in PERCENTS)


@pytest.mark.parametrize("seed", range(20))
def test_percentiles_of_many_are_near(seed: int) -> None:
    """The rank that a percentile has among all values is off by less than the steps of thinning."""
    random_ = random.Random(seed)
    parts = [
        [random_.expovariate(1 / (1 + number)) for _ in range(random_.choice((3, 300, 4096)))]
        for number in range(random_.randint(1, 5))
    ]
    together = sorted(value for one in parts for value in one)
    for percent in PERCENTS:
        (found,) = percentiles([latencies(one).thinned() for one in parts], percent)
        rank = sum(value <= found for value in together)
        off = abs(rank - percent * len(together) / 100)
        assert off <= 1 + sum(len(one) / MOST_LATENCIES for one in parts)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 99),
            st.integers(0, 99),
            st.lists(seconds, max_size=9),
            st.text(max_size=3),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_load_of_all_processes(parts: list[tuple[int, int, list[float], str]]) -> None:
    traffic = [
        Traffic(
            RouterLoad(f"r{number}", running=running, waiting=waiting, certificate_note=note),
            {"finished": running},
            latencies(values),
            latencies(values[:1]),
        )
        for number, (running, waiting, values, note) in enumerate(parts)
    ]
    told = [traffic[0], *(Traffic.from_json(one.to_json()) for one in traffic[1:])]
    whole = RouterTraffic(tuple(told))
    assert whole.load.router_id == "r0"
    assert whole.load.processes == len(parts)
    assert whole.load.running == whole.totals["finished"] == sum(one[0] for one in parts)
    assert whole.load.waiting == sum(one[1] for one in parts)
    notes = {one[3] for one in parts if one[3]}
    assert all(one in whole.load.certificate_note for one in notes)
    values = sorted(value for one in parts for value in one[2])
    assert whole.ttft(95) == ((percentile(values, 95),) if values else (None,))
    if len(parts) > 1:
        p95 = whole.load.ttft_p95_ms
        assert p95 == (percentile(values, 95) * 1000 if values else None)


@pytest.mark.parametrize("seed", range(10))
def test_rates_of_processes_that_come_and_go(seed: int) -> None:
    """A process that was away or is new neither adds what it had counted nor subtracts it."""
    random_ = random.Random(seed)
    history = History()
    names = [f"{number}" for number in range(4)]
    counts = {name: random_.randint(0, 10**6) for name in names}
    before: dict[str, int] = {}
    for step in range(30):
        for place, name in enumerate(names):
            counts[name] += random_.randint(0, 50)
            if random_.random() < 0.1:
                names[place] = f"{name}'"
                counts[names[place]] = random_.randint(0, 9)
        now = {name: counts[name] for name in names if random_.random() < 0.7}
        rate = history.rate({name: {"tokens": count} for name, count in now.items()}, 2.0 * step)
        grown = sum(now[name] - before[name] for name in now.keys() & before.keys())
        assert rate.get("tokens", 0) == (grown / 2 if step else 0)
        before = now
