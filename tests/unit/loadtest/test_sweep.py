from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.report.tables import sweep_table
from kvrelay.loadtest.slo import parse_slos
from kvrelay.loadtest.sweep import Sweep, bisect, try_rates

SLOS = parse_slos(["ttft:100"])


def report(share: float, interrupted: bool = False) -> Report:
    rows = tuple(
        Row(0.0, 0.0, ttft_s=0.05 if place < share * 100 else 5.0, index=place)
        for place in range(100)
    )
    return Report({}, SLOS, rows, interrupted=interrupted)


class Target:
    """Good up to a rate."""

    def __init__(self, limit: float, interrupt_at: int = 10**6) -> None:
        self.limit, self.interrupt_at = limit, interrupt_at
        self.tried: list[float] = []

    async def offer(self, rate: float) -> Report:
        self.tried.append(rate)
        return report(
            0.95 if rate <= self.limit else 0.5, interrupted=len(self.tried) >= self.interrupt_at
        )


def test_a_sweep_fits_80_columns() -> None:
    slow = Report({}, SLOS, (Row(0.0, 0.0, 98.7, (12.3456, 54.3211), 99.9, output_tokens=3),))
    file = io.StringIO()
    Console(file=file, width=80).print(sweep_table(Sweep(0.9, ((1234.5, slow),))))
    lines = [line.split() for line in file.getvalue().splitlines()]
    assert ["within", "TTFT", "TTFT", "TPOT", "ITL"] in lines
    assert ["requests/s", "SLOs", "goodput/s", "errors", "p50", "p99", "p50", "p99"] in lines
    assert not any("…" in word for line in lines for word in line)


@given(limit=st.floats(1, 32), precision=st.floats(0.02, 0.5))
async def test_a_search_finds_the_rate_as_closely_as_asked(limit: float, precision: float) -> None:
    target = Target(limit)
    sweep = await bisect(target.offer, 1.0, 32.0, precision, 0.9)
    best = sweep.best_rate
    assert best is not None
    assert best <= limit
    assert limit <= best * (1 + precision)
    assert len(target.tried) <= 3 + math.log2(math.log(32) / math.log1p(precision))
    assert [rate for rate, _ in sweep.runs] == sorted(target.tried)


@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (5e-324, 1e-300), (1e200, 1e300)])
async def test_a_search_ends_however_closely_it_is_to_find_the_rate(
    low: float, high: float
) -> None:
    target = Target(low * 1.5, interrupt_at=200)
    sweep = await bisect(target.offer, low, high, 1e-17, 0.9)
    assert sweep.best_rate is not None
    assert not any(report.interrupted for _, report in sweep.runs)


@pytest.mark.parametrize(
    ("limit", "tried", "best"), [(0.5, [1.0], None), (99.0, [1.0, 32.0], 32.0)]
)
async def test_a_search_ends_at_bounds_that_tell_all(
    limit: float, tried: list[float], best: float | None
) -> None:
    target = Target(limit)
    assert (await bisect(target.offer, 1.0, 32.0, 0.1, 0.9)).best_rate == best
    assert target.tried == tried


async def test_given_rates_are_tried_in_order() -> None:
    target = Target(3.0)
    sweep = await try_rates(target.offer, [4.0, 1.0, 2.0], 0.9)
    assert target.tried == [1.0, 2.0, 4.0]
    assert sweep.best_rate == 2.0


async def test_an_interruption_ends_a_sweep() -> None:
    target = Target(99.0, interrupt_at=2)
    assert len((await try_rates(target.offer, [1.0, 2.0, 4.0], 0.9)).runs) == 2
    target = Target(3.0, interrupt_at=3)
    assert len((await bisect(target.offer, 1.0, 32.0, 0.01, 0.9)).runs) == 3


def test_the_share_asked_for_is_enough() -> None:
    assert Sweep(0.9, ((1.0, report(0.9)), (2.0, report(0.89)))).best_rate == 1.0


def test_an_interrupted_run_is_no_verdict() -> None:
    assert Sweep(0.9, ((1.0, report(1.0)), (2.0, report(1.0, interrupted=True)))).best_rate == 1.0


async def test_a_dead_target_ends_a_sweep() -> None:
    tried: list[float] = []
    gone = Report({}, SLOS, (Row(0.0, 0.0, e2e_s=0.0, error="UNAVAILABLE", message="refused"),))

    async def offer(rate: float) -> Report:
        tried.append(rate)
        return report(1.0) if len(tried) < 2 else gone

    sweep = await try_rates(offer, [1.0, 2.0, 4.0], 0.9)
    assert (tried, sweep.best_rate, sweep.dead) == ([1.0, 2.0], 1.0, ((2.0, gone),))
    tried.clear()
    sweep = await bisect(offer, 1.0, 32.0, 0.1, 0.9)
    assert (tried, sweep.best_rate, sweep.dead) == ([1.0, 32.0], 1.0, ((32.0, gone),))


@pytest.mark.parametrize(
    ("options", "last", "warned"),
    [
        ({}, 0.9, True),
        ({}, 1.0, False),
        ({"duration": 1.0}, 0.5, False),
        ({"duration": 9, "num_requests": 3}, 0.5, True),
    ],
)
def test_a_run_that_was_too_short_says_so(
    options: dict[str, float], last: float, warned: bool
) -> None:
    rows = (Row(0.0, 0.0, ttft_s=0.05), Row(last, 0.0, ttft_s=0.05, index=1))
    warnings = Sweep(0.9, ((3.0, Report(options, SLOS, rows)),)).warnings
    assert bool(warnings) is warned
    if warned:
        assert warnings[0].startswith(
            f"at 3/s: the run sent requests for {last:g} s, less than 10 times"
        )
