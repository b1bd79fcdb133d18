"""Quantities with units, as people write and read them. Pure."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from kvrelay.errors import InvalidArgument

_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,12})?(?:e[0-9]{1,2})?)\s*([kmgtp]?i?)b?(?:/s)?")
# Bytes, or bytes per second: no cluster has more.
_LARGEST = 1e18


def parse_bytes(text: str, option: str, default_unit: str = "g") -> float:
    """Returns the bytes of `80GB`, `64GiB` or `3.35TB/s`. A plain number has `default_unit`.

    Raises InvalidArgument, which names the option, unless the result is from 1 byte to `_LARGEST`.
    """
    match = _QUANTITY.fullmatch(text.strip().lower())
    if match:
        prefix = match[2] or ("" if text.strip().lower().endswith("b") else default_unit)
        factor = _BINARY.get(prefix) or _PREFIX.get(prefix)
        if factor and 1 <= (found := float(match[1]) * factor) <= _LARGEST:
            return found
    raise InvalidArgument(
        f"{option} {text!r:.40} is not a size from 1 B to {_LARGEST / 1e15:,.0f} PB; write a "
        "number with a unit, such as 80GB, 64GiB or 3.35TB; a number alone is in "
        f"{default_unit.upper()}B",
        field=option,
    )


def check_number(value: float, option: str, low: float, high: float) -> float:
    """Returns the number. Raises InvalidArgument, which names the option, unless it is from low to
    high.
    """
    if math.isnan(value) or not low <= value <= high:
        raise InvalidArgument(
            f"{option} is {plain(value)}; allowed are {plain(low)} to {plain(high)}", field=option
        )
    return value


def plain(value: float, digits: int = 6) -> str:
    """Formats a number with at most that many significant digits: 1030. Only numbers that no figure
    has, below a billionth or above 10^15, have an exponent.
    """
    return grouped(value, digits).replace(",", "")


def grouped(value: float, digits: int) -> str:
    """Formats a number like `plain`, with thousands for a table: 1,030."""
    text = f"{value:.{digits}g}"
    return f"{Decimal(text):,f}" if value == 0 or 1e-9 <= abs(value) < 1e15 else text


def number_of(value: float, digits: int) -> str:
    """Formats a number of parameters in words: 8.03 billion, 3.72 million."""
    for limit, word in ((1e9, "billion"), (1e6, "million")):
        if value >= limit:
            return f"{plain(value / limit, digits)} {word}"
    return f"{value:,.0f}"


def decimal_bytes(value: float) -> str:
    """Formats bytes with a decimal unit and three digits: 141 GB."""
    return f"{_scaled(value, 'kMGTP')}B"


def size(value: float) -> str:
    """Formats bytes with a binary unit and three digits: 512 B, 1.21 GiB."""
    if value < 1024:
        return f"{value:.0f} B"
    value, unit = value / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{plain(value, 3)} {unit}"


def kib(value: float) -> str:
    """Formats bytes per token: 320 KiB, 68.6 KiB."""
    return f"{grouped(value / 1024, 4)} KiB"


def rate_of(value: float, unit: str) -> str:
    """Formats a rate with a decimal prefix and three digits: 989 TFLOP/s."""
    return f"{_scaled(value, 'kMGTP')}{unit}"


def seconds(value: float) -> str:
    """Formats seconds with three digits: 8.2 us, 7.04 ms, 1.2 s."""
    if math.isinf(value):
        return "never"
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if value < limit:
            return f"{plain(value * factor, 3)} {unit}"
    return f"{plain(value, 3)} s" if value < 1000 else f"{value:,.0f} s"


def _scaled(value: float, prefixes: str) -> str:
    prefix = ""
    for larger in prefixes:
        if value < 999.5:
            break
        value, prefix = value / 1000, larger
    return f"{plain(value, 3)} {prefix}"
