from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.series import MAX_BINS, binned, first_tokens, token_gaps
from kvrelay.loadtest.report.sweep_report import Report


def test_arrivals_and_gaps_are_in_the_part_of_the_test_in_which_they_were() -> None:
    rows = (
        Row(0.0, 0.0, ttft_s=0.1, itl_s=(0.1, 0.2), e2e_s=0.4, output_tokens=3),
        Row(0.4, 0.0, error="UNAVAILABLE", e2e_s=0.1),
        Row(1.2, 0.0, ttft_s=0.4, itl_s=(0.3,), e2e_s=0.7, output_tokens=2),
    )
    found = binned(Report({}, (), rows))
    assert found.bin_s == 0.5
    assert found.arrivals == (4.0, 0.0, 2.0, 0.0), "per second, those that failed too"
    assert found.itl_p95_ms == (pytest.approx(200), None, None, pytest.approx(300))
    assert first_tokens(rows) == [(0.1, 0.1), (pytest.approx(1.6), 0.4)]
    assert token_gaps(rows[2:]) == [(pytest.approx(1.9), 0.3)]


def test_nothing_sent_is_no_series() -> None:
    found = binned(Report({}, (), ()))
    assert (found.arrivals, found.itl_p95_ms) == ((0.0,), (None,))


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=50))
def test_every_arrival_is_in_one_part(times: list[float]) -> None:
    found = binned(Report({}, (), tuple(Row(at, 0.0) for at in times)))
    assert len(found.arrivals) <= MAX_BINS
    assert math.isclose(sum(found.arrivals) * found.bin_s, len(times))
