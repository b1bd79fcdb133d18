"""Copies fields of the same name between dataclasses and protobuf messages."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvrelay.error_value import shown
from kvrelay.errors import FailedPrecondition, InvalidArgument

MessageT = TypeVar("MessageT", bound=Message)
ValueT = TypeVar("ValueT")


# protobuf's words, and what they mean.
_WORDS = (
    ("bad argument type for built-in operation", "it must be text"),
    ("cannot be interpreted as an integer", "it must be a whole number"),
    ("must be real number", "it must be a number"),
    ("Value out of range", "it is out of range; give a smaller number"),
    ("surrogates not allowed", "it is not valid text; convert it to UTF-8"),
)


def answered(message: MessageT | None, peer: str) -> MessageT:
    """Returns the answer of a call. gRPC gives None for bytes that are not the expected message;
    raises FailedPrecondition for that.
    """
    if message is None:
        raise FailedPrecondition(f"{peer} sent an answer that cannot be read")
    return message


def to_message(kind: type[MessageT], value: object, **converted: Any) -> MessageT:
    """Builds a message that has the fields of the dataclass. `converted` replaces the values of
    fields whose types differ. None leaves a field unset.
    """
    return kind(**_copied(type(value), value, converted), **converted)


def to_value(kind: type[ValueT], message: Message, **converted: Any) -> ValueT:
    """Builds a dataclass that has the fields of the message. `converted` replaces the values of
    fields whose types differ.
    """
    return kind(**_copied(kind, message, converted), **converted)


def _copied(kind: Any, source: object, without: Collection[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in _names(kind) if name not in without}


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


def optional(message: Message, name: str) -> Any:
    """Returns the value of a field; None for an unset field that may be unset."""
    unset = message.DESCRIPTOR.fields_by_name[name].has_presence and not message.HasField(name)
    return None if unset else getattr(message, name)


def set_field(message: Message, name: str, value: object) -> None:
    """Sets a scalar field; None leaves it unset. Raises InvalidArgument for a value that does not
    fit.
    """
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{name}: {shown(value)}: {said(error)}", field=name) from error


def extend_field(message: Message, name: str, values: object) -> None:
    """Sets a repeated field. Raises InvalidArgument for a value that does not fit."""
    try:
        getattr(message, name).extend(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{name}: {said(error)}", field=name) from error


def said(error: Exception) -> str:
    """Returns what protobuf says about a value of the wrong type, in words for users."""
    text = str(error)
    for words, said in _WORDS:
        if words in text:
            return said
    return text
