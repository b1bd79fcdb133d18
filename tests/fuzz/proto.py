"""Protobuf messages, spoiled field by field."""

from __future__ import annotations

import random
from typing import Any

from fuzz.spoil import FLOATS, NUMBERS, TEXTS, garbled, text
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INT = FieldDescriptor
_RANGES = {
    _INT.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _INT.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _INT.CPPTYPE_UINT32: (0, 2**32 - 1),
    _INT.CPPTYPE_UINT64: (0, 2**64 - 1),
    _INT.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
_WHOLE = [one for one in NUMBERS if isinstance(one, int)]
_TEXTS = [one for one in TEXTS if one.isascii() or "\ud800" not in one]


def spoiled_bytes(draw: random.Random, message: Message) -> bytes:
    """A copy with some fields changed, on the wire; sometimes with some bytes changed there."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        _change(draw, copy)
    data = copy.SerializeToString()
    return garbled(draw, data) if draw.random() < 0.2 else data


def _change(draw: random.Random, message: Message) -> None:
    """One field of the message, or of one below it."""
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = draw.choice(fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        for _ in range(draw.choice([0, 1, 400])):
            getattr(message, field.name)[_scalar(draw, key)] = _scalar(draw, value)
    elif field.is_repeated:
        _change_repeated(draw, getattr(message, field.name), field)
    elif field.message_type is not None:
        if draw.random() < 0.15:
            message.ClearField(field.name)
        else:
            below = getattr(message, field.name)
            below.SetInParent()
            _change(draw, below)
    elif draw.random() < 0.1:
        message.ClearField(field.name)
    elif (
        field.cpp_type == FieldDescriptor.CPPTYPE_STRING
        and field.type == FieldDescriptor.TYPE_STRING
        and draw.random() < 0.4
    ):
        setattr(message, field.name, _unicode(text(draw, getattr(message, field.name))))
    else:
        setattr(message, field.name, _scalar(draw, field))


def _change_repeated(draw: random.Random, values: Any, field: FieldDescriptor) -> None:
    match draw.randrange(4):
        case 0:
            del values[:]
        case 1 if len(values):
            values.extend(list(values) * draw.choice([1, 50]))
        case 2 if len(values) and field.message_type is not None:
            _change(draw, values[draw.randrange(len(values))])
        case _ if field.message_type is not None:
            _change(draw, values.add())
        case _:
            values.extend(_scalar(draw, field) for _ in range(draw.choice([1, 1, 300])))


def _scalar(draw: random.Random, field: FieldDescriptor) -> Any:
    if field.cpp_type in _RANGES:
        least, most = _RANGES[field.cpp_type]
        return min(most, max(least, draw.choice([*_WHOLE, draw.randrange(-5, 400)])))
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return float(draw.choice(FLOATS))
        case FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
        case _ if field.type == FieldDescriptor.TYPE_BYTES:
            return draw.randbytes(draw.choice([0, 1, 10_000]))
        case _:
            return _unicode(draw.choice(_TEXTS))


def _unicode(value: str) -> str:
    return value.encode(errors="replace").decode()
