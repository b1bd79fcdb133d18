"""Figures as people read them: three or so digits, and no exponents."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidArgument
from kvrelay.planning.quantity import (
    check_number,
    decimal_bytes,
    grouped,
    kib,
    plain,
    rate_of,
    seconds,
)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (1032.4, 3, "1030"),
        (8737, 3, "8740"),
        (0.000012345, 3, "0.0000123"),
        (1e6, 6, "1000000"),
        (2.50, 6, "2.5"),
        (0, 6, "0"),
        (-12345, 2, "-12000"),
        (float("inf"), 6, "inf"),
    ],
)
def test_a_figure_has_no_exponent(value: float, digits: int, text: str) -> None:
    assert plain(value, digits) == text
    assert grouped(value, digits).replace(",", "") == text


def test_thousands_are_grouped_in_a_table() -> None:
    assert grouped(1032.4, 3) == "1,030"


@given(st.floats(1e-5, 1e14))
def test_no_quantity_has_an_exponent(value: float) -> None:
    shown = [plain(value), seconds(value), kib(value), decimal_bytes(value), rate_of(value, "B/s")]
    assert not any("e+" in text or "e-" in text for text in shown)
    assert float(plain(value)) == pytest.approx(value, rel=1e-5)


def test_a_bound_is_told_in_plain_figures() -> None:
    with pytest.raises(InvalidArgument, match=r"^--rate is 0; allowed are 0.000001 to 1000000$"):
        check_number(0, "--rate", 1e-6, 1e6)
