"""The part of protobuf's encoding that is needed to find a large field without copying it.

https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10


class Malformed(ValueError):
    """The bytes are not valid protobuf."""


def encoded(value: int) -> bytes:
    """Encodes a non-negative number as a varint."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(field: int) -> bytes:
    """Returns the tag of a length-delimited field."""
    return encoded(field << 3 | _LENGTH)


def decode(data: memoryview, at: int) -> tuple[int, int]:
    """Decodes the varint at `at`. Returns (number, end position). Raises Malformed."""
    value = 0
    for i in range(_MAX_VARINT_BYTES):
        if at + i >= len(data):
            raise Malformed("a number is cut off")
        byte = data[at + i]
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, at + i + 1
    raise Malformed("a number has no end")


def fields(data: memoryview, at: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (field number, start of the field, start of its value, end of its value), from `at` to
    the end of `data`. Raises Malformed.
    """
    while at < len(data):
        key, first = decode(data, at)
        kind = key & 7
        if kind == _VARINT:
            last = decode(data, first)[1]
        elif kind == _LENGTH:
            length, first = decode(data, first)
            last = first + length
        elif kind in _FIXED_BYTES:
            last = first + _FIXED_BYTES[kind]
        else:
            raise Malformed(f"a field of kind {kind}")
        if last > len(data):
            raise Malformed(f"field {key >> 3} is cut off")
        yield key >> 3, at, first, last
        at = last
