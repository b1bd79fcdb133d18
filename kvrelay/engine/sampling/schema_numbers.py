"""The numbers of a JSON schema, as llguidance reads them. Pure.

llguidance reads numbers with serde_json, which computes digits * 10^exponent in 64-bit floats. With
more than 15 digits, the result may be a float beside the nearest one: a value of `enum` that no
answer could have. The same float is written in other digits then, from which it results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# llguidance computes with 64-bit floats, which represent the integers up to this one.
_MAX_INTEGER = 2**53
# Digits are read as an integer below this one. So many digits always are.
_MAX_NUMBER = 2**64
_MOST_DIGITS = 19
# The largest power of ten of a 64-bit float.
_MAX_POWER = 308
# Strings come first, because there may be digits in them.
_PARTS = re.compile(
    r'"[^"\\]*(?:\\.[^"\\]*)*"?|(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?', re.DOTALL
)


def exact_integer(digits: str) -> int:
    """Returns the integer. Raises ValueError for one that would be replaced by another."""
    if len(digits) > len(str(-_MAX_INTEGER)) or abs(int(digits)) > _MAX_INTEGER:
        raise ValueError(
            f"the integer {digits:.40} in the schema is beyond 2^53; use a string instead"
        )
    return int(digits)


def with_exact_numbers(schema: str) -> str:
    """Returns a valid JSON text in which each number is read as the float that is nearest to it.
    Raises ValueError for a number that cannot be written in that way.
    """
    return _PARTS.sub(_rewritten, schema)


def _rewritten(found: re.Match[str]) -> str:
    sign, whole, fraction, exponent = found.groups()
    text = found[0]
    if whole is None or (fraction is None and exponent is None):
        return text
    digits = (whole + (fraction or "")).lstrip("0")
    value = abs(float(text))
    # Exponents of any length are valid JSON.
    if value == float("inf"):
        raise ValueError(f"the number {text:.40} in the schema is beyond 64-bit floats")
    if not value:
        return f"{sign}0.0"
    if len(digits) <= _MOST_DIGITS and len(exponent or "") <= 4:
        power = int(exponent or 0) - len(fraction or "")
        if abs(power) <= _MAX_POWER and _read(int(digits), power) == value:
            return text
    usable = ""
    for number, power in _spellings(value):
        if _read(number, power) == value:
            usable = f"{number}e{power}"
            # If possible, digits that others read in the same way.
            if float(usable) == value:
                break
    if not usable:
        raise ValueError(
            f"the number {text:.40} in the schema cannot be read exactly; use fewer digits or a "
            "string"
        )
    return sign + usable


def _spellings(value: float) -> Iterator[tuple[int, int]]:
    """Yields digits and exponents that stand for nearly this float, shorter ones first."""
    numerator, denominator = value.as_integer_ratio()
    exponent = int(f"{value:e}".partition("e")[2])
    for length in range(16, 21):
        # The first digit stands for 10^exponent.
        power = exponent - length + 1
        ten = 10 ** abs(power)
        middle = numerator * ten // denominator if power < 0 else numerator // (denominator * ten)
        # As an integer becomes a float, its last bits are lost.
        step = max(1, middle >> 53)
        for offset in (0, 1, -1, 2, -2):
            number = middle + offset * step
            if 0 < number < _MAX_NUMBER:
                yield number, power


def _read(number: int, power: int) -> float:
    """Returns the float that serde_json computes from these digits."""
    value = float(number)
    while power < -_MAX_POWER:
        value /= 1e308
        power += _MAX_POWER
    return value * float(f"1e{power}") if power >= 0 else value / float(f"1e{-power}")
