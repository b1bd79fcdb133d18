"""The numbers of a JSON schema, as llguidance reads them. Pure.

llguidance reads numbers with serde_json, which computes digits * 10^exponent in 64-bit floats. With
more than 15 digits, the result may be a float beside the nearest one: a value of `enum` that no
answer could have. The same float is written in other digits then, from which it results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from kvrelay.engine.sampling.schema_keywords import inner_schemas

# llguidance computes with 64-bit floats, which represent the integers up to this one.
_MAX_INTEGER = 2**53
# Digits are read as an integer below this one. So many digits always are.
_MAX_NUMBER = 2**64
_MOST_DIGITS = 19
# Characters of an exponent that is worth a look.
_MOST_EXPONENT = 5
# Numbers of a schema that are rewritten, which takes some 20 microseconds each.
_MOST_REWRITTEN = 1000
# Keywords whose values an answer has to have.
_PRESCRIBING = ("enum", "const")
# The largest power of ten of a 64-bit float.
_MAX_POWER = 308
# Strings come first, because there may be digits in them. Of the numbers, only those with 16
# characters or a large exponent: others are read well.
_PARTS = re.compile(
    r'"[^"\\]*(?:\\.[^"\\]*)*"?'
    r"|(?P<sign>-?)(?=[\d.]{16}|[\d.]+[eE][+-]?\d\d)"
    r"(?P<whole>\d+)(?:\.(?P<fraction>\d+))?(?:[eE](?P<exponent>[+-]?\d+))?",
    re.DOTALL,
)


def exact_integer(digits: str) -> int:
    """Returns the integer. Raises ValueError for one that would be replaced by another."""
    if len(digits) > len(str(-_MAX_INTEGER)) or abs(int(digits)) > _MAX_INTEGER:
        raise ValueError(
            f"the integer {digits:.40} in the schema is beyond 2^53; use a string instead"
        )
    return int(digits)


def check_values(schema: Any) -> None:
    """Raises ValueError if the schema prescribes a number that llguidance cannot read exactly."""
    rewritten = 0
    parts: list[tuple[Any, bool]] = [(schema, False)]
    while parts:
        part, prescribed = parts.pop()
        if isinstance(part, list):
            parts += ((one, prescribed) for one in part)
        elif isinstance(part, dict) and prescribed:
            parts += ((one, True) for one in part.values())
        elif isinstance(part, dict):
            parts += ((part[name], True) for name in _PRESCRIBING if name in part)
            parts += ((one, False) for one in inner_schemas(part))
        elif prescribed and isinstance(part, float) and math.isfinite(part):
            number = _PARTS.fullmatch(repr(part))
            # Short numbers do not match.
            if number is None or _is_read_well(number):
                continue
            rewritten += 1
            _check_cost(rewritten)
            if not _spelled(abs(part)):
                raise ValueError(
                    f"the number {part!r} in the schema cannot be read exactly; use fewer digits "
                    "or a string"
                )


def with_exact_numbers(schema: str) -> str:
    """Returns a valid JSON text in which each number is read as the float that is nearest to it. A
    number for which there are no such digits stays as it is. Raises ValueError for numbers beyond
    64-bit floats, and for more numbers to rewrite than a request may cost.
    """
    rewritten = 0

    def exact(found: re.Match[str]) -> str:
        nonlocal rewritten
        is_float = found["fraction"] is not None or found["exponent"] is not None
        if not is_float or _is_read_well(found):
            return found[0]
        rewritten += 1
        _check_cost(rewritten)
        spelled = _spelled(abs(float(found[0])))
        return found["sign"] + spelled if spelled else found[0]

    return _PARTS.sub(exact, schema)


def _check_cost(rewritten: int) -> None:
    if rewritten > _MOST_REWRITTEN:
        raise ValueError(
            f"the schema has more than {_MOST_REWRITTEN} numbers that need all of their 16 or more "
            "digits; use fewer digits"
        )


def _is_read_well(found: re.Match[str]) -> bool:
    value = abs(float(found[0]))
    if value == math.inf:
        raise ValueError(f"the number {found[0]:.40} in the schema is beyond 64-bit floats")
    fraction, exponent = found["fraction"] or "", found["exponent"] or "0"
    digits = (found["whole"] + fraction).lstrip("0")
    if len(digits) > _MOST_DIGITS or len(exponent) > _MOST_EXPONENT:
        # An exponent may have any number of digits.
        return not value
    return _read(int(digits or "0"), int(exponent) - len(fraction)) == value


@lru_cache(maxsize=1024)
def _spelled(value: float) -> str:
    """Returns digits that are read as this float, which is above 0; empty if there are none."""
    usable = ""
    for number, power in _spellings(value):
        if _read(number, power) == value:
            usable = f"{number}e{power}"
            # If possible, digits that others read in the same way.
            if float(usable) == value:
                break
    return usable


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
    if power > _MAX_POWER:
        return math.inf if number else 0.0
    while power < -_MAX_POWER and value:
        value /= 1e308
        power += _MAX_POWER
    return value * float(f"1e{power}") if power >= 0 else value / float(f"1e{-power}")
