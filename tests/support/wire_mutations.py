"""Every way in which a peer of another version may spell a message, generated from its
descriptor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvrelay.wire.encoding import varint

_FIELD = FieldDescriptor
_INTEGERS = {
    _FIELD.CPPTYPE_INT32: (-(2**31), -1, 0, 2**31 - 1),
    _FIELD.CPPTYPE_INT64: (-(2**63), -1, 0, 2**63 - 1),
    _FIELD.CPPTYPE_UINT32: (0, 2**32 - 1),
    _FIELD.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_TEXTS = ("", "x" * 10_000, "a word of the future", "\x1b[2J\n")
# A field of each kind whose number nobody uses: number, zero, text, 8 bytes, 4 bytes, and a group.
UNKNOWN = (
    varint.encoded(1000 << 3) + b"\x05",
    varint.tag(1001) + b"\x00",
    varint.tag(1002) + b"\x03abc",
    varint.encoded(1003 << 3 | 1) + bytes(8),
    varint.encoded(1004 << 3 | 5) + bytes(4),
    varint.encoded(1005 << 3 | 3) + b"\x08\x01" + varint.encoded(1005 << 3 | 4),
)


def mutations(message: Message) -> Iterator[tuple[str, Message]]:
    """(what is odd, a copy of the message with that oddity): of each field of it and of the
    messages in it.
    """
    yield from _mutations(message, message, message.DESCRIPTOR.name)


def _mutations(whole: Message, part: Message, where: str) -> Iterator[tuple[str, Message]]:
    """`part` lies in `whole`; it is changed, `whole` is copied, and the change is taken back."""
    before = type(part)()
    before.CopyFrom(part)

    def changed(what: str) -> tuple[str, Message]:
        copy = type(whole)()
        copy.CopyFrom(whole)
        part.CopyFrom(before)
        return f"{where}{what}", copy

    for unknown in UNKNOWN:
        part.MergeFromString(unknown)
        yield changed(f" with unknown field {unknown.hex()}")
    for field in part.DESCRIPTOR.fields:
        name = f".{field.name}"
        part.ClearField(field.name)
        yield changed(f"{name} missing")
        kind = 5 if field.type in (_FIELD.TYPE_FIXED64, _FIELD.TYPE_DOUBLE) else 1
        part.ClearField(field.name)
        part.MergeFromString(
            varint.encoded(field.number << 3 | kind) + bytes(4 if kind == 5 else 8)
        )
        yield changed(f"{name} of another type")
        for value in _values(field):
            _assign(part, field, value)
            yield changed(f"{name} = {value!r:.40}")
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            below = getattr(part, field.name)
            for one in (
                list(below)[:1]
                if field.is_repeated
                else [below]
                if part.HasField(field.name)
                else []
            ):
                yield from _mutations(whole, one, f"{where}{name}")


def _values(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.message_type is not None:
        return ()
    if field.cpp_type in _INTEGERS:
        return _INTEGERS[field.cpp_type]
    match field.cpp_type:
        case _FIELD.CPPTYPE_DOUBLE | _FIELD.CPPTYPE_FLOAT:
            return (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308)
        case _FIELD.CPPTYPE_BOOL:
            return (False, True)
        case _ if field.type == _FIELD.TYPE_BYTES:
            return (b"", bytes(10_000))
        case _:
            return _TEXTS


def _assign(message: Message, field: FieldDescriptor, value: Any) -> None:
    message.ClearField(field.name)
    if field.is_repeated:
        getattr(message, field.name).extend([value])
    else:
        setattr(message, field.name, value)
