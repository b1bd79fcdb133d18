"""Writes values of a request as JSON within bounds. Pure.

`json.dumps` runs from the first value to the last and holds the event loop meanwhile: 0.1 s for
half a million numbers. These functions give up on a large value after a work that depends on the
bound only.
"""

from __future__ import annotations

import json
from typing import Any


def written(value: Any, most: int) -> str | None:
    """Returns the JSON text of a parsed value; None if it has more than `most` characters."""
    if is_longer(value, most):
        return None
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else None


def has_more_values(value: Any, most: int) -> bool:
    """Returns whether a parsed value has more than `most` values in lists and objects, at any
    depth.
    """
    count, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, dict | list):
            count += len(one)
            if count > most:
                return True
            left += one.values() if isinstance(one, dict) else one
    return False


def is_longer(value: Any, most: int) -> bool:
    """Returns whether the JSON text of a parsed value has more than `most` characters in any way of
    writing it. If not, the text of `json.dumps` has a few times as many at most.
    """
    # A value that is not looked at yet counts as one character.
    length, left = 1, [value]
    while left:
        one = left.pop()
        length -= 1
        if isinstance(one, str):
            length += len(one) + 2
        elif isinstance(one, dict):
            # Braces, and for each member quotes, a colon, a comma and a value.
            length += max(2, 5 * len(one) + 1)
            if length <= most:
                length += sum(map(len, one))
                left += one.values()
        elif isinstance(one, list):
            length += max(2, 2 * len(one) + 1)
            if length <= most:
                left += one
        elif isinstance(one, int):
            # A decimal digit has more than three bits.
            length += 1 + one.bit_length() // 4
        else:
            length += 3
        if length > most:
            return True
    return False
