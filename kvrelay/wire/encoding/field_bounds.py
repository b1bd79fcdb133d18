"""Counts the fields of a serialized message before it is parsed. Pure.

The parser creates an object for each entry of a repeated field. An empty entry takes two bytes on
the wire, but dozens in memory.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvrelay.errors import InvalidArgument
from kvrelay.wire.encoding.varint import Malformed, decode

# Including nested messages. 4096 chat messages have 12,288 fields.
MAX_FIELDS = 2**14
# Levels of nested messages.
MAX_DEPTH = 16
# Bytes that take as long to inspect as one field.
FIELD_COST = 64

_VARINT, _FIXED64, _BYTES, _GROUP, _FIXED32 = 0, 1, 2, 3, 5
# Varint bytes that are followed by another byte.
_CONTINUED = bytes(range(0x80, 0x100))
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}
_FIXED_KINDS = {
    **dict.fromkeys(
        (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64),
        8,
    ),
    **dict.fromkeys(
        (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), 4
    ),
}
_NOT_PACKED = (
    FieldDescriptor.TYPE_STRING,
    FieldDescriptor.TYPE_BYTES,
    FieldDescriptor.TYPE_MESSAGE,
    FieldDescriptor.TYPE_GROUP,
)
# Most entries of a repeated or map field, by its full name.
Bounds = Mapping[str, int]


def repeated_fields(
    message: Descriptor, _seen: frozenset[str] = frozenset()
) -> Iterator[FieldDescriptor]:
    """Yields the repeated fields of the message and of its nested messages. Map fields are repeated
    fields too.
    """
    for field in message.fields:
        if field.is_repeated:
            yield field
        if field.message_type is not None and field.message_type.full_name not in _seen:
            yield from repeated_fields(field.message_type, _seen | {message.full_name})


def check_fields(data: bytes, message: Descriptor, bounds: Bounds) -> Generator[int, None, None]:
    """Checks the fields of a serialized message. Yields the work since the last yield, in bytes or
    their equivalent.

    Raises InvalidArgument, naming the field, for a repeated field with more entries than its bound,
    or with entries but no bound. Raises InvalidArgument for a message with too many fields, or with
    a group. Bytes that are not a message of this type are left to the parser, which rejects them
    cheaply.
    """
    try:
        yield from _check(data, message, bounds)
    except Malformed:
        return


def _check(data: bytes, message: Descriptor, bounds: Bounds) -> Generator[int, None, None]:
    view = memoryview(data)
    stack = [(0, len(data), message)]
    counts: dict[str, int] = {}
    fields, told = 0, 0
    while stack:
        at, end, kind = stack.pop()
        while at < end:
            fields += 1
            if fields > MAX_FIELDS:
                raise InvalidArgument(
                    f"the message has more than {MAX_FIELDS} fields; send repeated numbers packed, "
                    "and each other field once"
                )
            if fields - told >= 128:
                yield (fields - told) * FIELD_COST
                told = fields
            tag, at = decode(view, at)
            number, wire_type = tag >> 3, tag & 7
            size = _FIXED_SIZES.get(wire_type, 0)
            if wire_type == _BYTES:
                size, at = decode(view, at)
            elif wire_type == _VARINT:
                _, at = decode(view, at)
            elif wire_type == _GROUP:
                # The parser would skip it and read what follows, unbounded.
                raise InvalidArgument("the message contains a group, which is not supported")
            elif not size:
                raise Malformed("the message has a field of an unknown type")
            if at + size > end:
                raise Malformed("a field is cut off")
            field = kind.fields_by_number.get(number)
            if field is not None:
                if field.is_repeated:
                    packed = wire_type == _BYTES and field.type not in _NOT_PACKED
                    if packed:
                        yield size
                    entries = _packed(data[at : at + size], field) if packed else 1
                    _count(entries, field, bounds, counts)
                if field.message_type is not None and wire_type == _BYTES:
                    if len(stack) >= MAX_DEPTH:
                        raise InvalidArgument(
                            f"messages are nested too deeply; allowed are {MAX_DEPTH} levels"
                        )
                    stack.append((at + size, end, kind))
                    at, end, kind = at, at + size, field.message_type
                    continue
            at += size
    yield (fields - told) * FIELD_COST


def _packed(data: bytes, field: FieldDescriptor) -> int:
    """Returns the entries in one packed occurrence. Only the last byte of a varint has its highest
    bit unset.
    """
    size = _FIXED_KINDS.get(field.type)
    return len(data.translate(None, _CONTINUED)) if size is None else len(data) // size


def _count(entries: int, field: FieldDescriptor, bounds: Bounds, counts: dict[str, int]) -> None:
    name = field.full_name
    bound = bounds.get(name, 0)
    counts[name] = counts.get(name, 0) + entries
    if counts[name] > bound:
        raise InvalidArgument(
            f"{field.name} has more than the allowed {bound} entries; send fewer",
            field=field.name,
        )
