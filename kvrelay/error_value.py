"""A user's value in an error message: short, and with JSON's words for true, false and null."""

from __future__ import annotations

import reprlib

# Characters of a value.
MOST = 80


class _Repr(reprlib.Repr):
    """Shows a value of any size at the cost of a few characters."""

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"

    def repr_int(self, value: int, level: int) -> str:
        # Python turns integers of at most 4,300 digits into text.
        if value.bit_length() > 2**10:
            return f"an integer of {value.bit_length()} bits"
        return super().repr_int(value, level)

    def repr_tuple(self, value: tuple[object, ...], level: int) -> str:
        return self.repr_list(list(value), level)


_SHORT = _Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60


def shown(value: object) -> str:
    """Returns at most MOST characters of the value."""
    return _SHORT.repr(value)[:MOST]
