"""Sizes in bytes, with a unit."""

from __future__ import annotations

import re

_SIZE = re.compile(r"^([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(B|KiB|MiB|GiB|TiB|kB|KB|MB|GB|TB)?$")
_UNIT = {
    None: 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def parse_size(text: str | int) -> int:
    """Returns the bytes of `1GiB`, `512 MB` or a plain number. Raises ValueError with the allowed
    units.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.match(str(text).strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a size; write a number with one of {', '.join(filter(None, _UNIT))}"
        )
    return int(float(match[1]) * _UNIT[match[2]])


def exact_size(num_bytes: int) -> str | int:
    """Returns the bytes with the largest binary unit that divides them, 256MiB for instance; the
    number if none does.
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes % _UNIT[unit] == 0:
            return f"{num_bytes // _UNIT[unit]}{unit}"
    return num_bytes
