"""Converts JSON to frozen dataclasses. Every value must have the type that the dataclass
declares.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
# Largest number. Up to this bound, floats represent whole numbers exactly, and sums of many stay
# finite.
_LARGEST = 2**53


def read(kind: type[T], value: object) -> T:
    """Converts `value`, as json.loads returns it, to a `kind`: a dataclass of numbers, strings,
    tuples, dicts and dataclasses.

    Raises ValueError, naming the location, for a value of another type, an unknown field or a
    missing field.
    """
    found: T = _reader(cast(Any, kind))(value)
    return found


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    inner = get_args(kind)
    match get_origin(kind):
        case origin if origin in (Union, UnionType):
            reads = [_reader(one) for one in inner if one is not NoneType]
            assert len(reads) == 1, f"{kind} is more than one kind or none"
            return lambda value: None if value is None else reads[0](value)
        case origin if origin is tuple and inner[-1] is ...:
            return functools.partial(_tuple, _reader(inner[0]))
        case origin if origin is tuple:
            return functools.partial(_fixed, [_reader(one) for one in inner])
        case origin if origin is dict:
            return functools.partial(_dict, _reader(inner[1]))
        case origin if origin is Literal:
            return functools.partial(_scalar, str)
    if kind is Any:
        return lambda value: value
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return functools.partial(
            _dataclass, kind, {name: _reader(hint) for name, hint in hints.items()}
        )
    return functools.partial(_number if kind in (int, float) else _scalar, kind)


def _scalar(kind: type, value: object) -> object:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is not of type {kind.__name__}")
    return value


def _number(kind: type, value: object) -> object:
    if type(value) is not int and (type(value) is not float or kind is int):
        raise ValueError(f"{value!r:.40} is not of type {kind.__name__}")
    # The comparison also rejects NaN.
    if not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"{value!r:.40} is out of range")
    return kind(value)


def _tuple(read_one: Callable[[Any], Any], value: object) -> tuple[Any, ...]:
    return tuple(_at(index, read_one, one) for index, one in enumerate(_items(value)))


def _fixed(reads: list[Callable[[Any], Any]], value: object) -> tuple[Any, ...]:
    items = _items(value)
    if len(items) != len(reads):
        raise ValueError(f"the list has {len(items)} values; expected {len(reads)}")
    return tuple(_at(index, reads[index], one) for index, one in enumerate(items))


def _items(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.40} is not a list")
    return value


def _dict(read_one: Callable[[Any], Any], value: object) -> dict[str, Any]:
    return {key: _at(key, read_one, one) for key, one in _object(value).items()}


def _dataclass(kind: Any, readers: dict[str, Callable[[Any], Any]], value: object) -> object:
    found = _object(value)
    if unknown := found.keys() - readers.keys():
        raise ValueError(f"{min(unknown)!r:.40} is not a known key")
    try:
        return kind(**{name: _at(name, readers[name], one) for name, one in found.items()})
    except TypeError as error:
        # Raised by the constructor for a missing field without a default.
        raise ValueError(str(error)) from None


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.40} is not an object")
    return value


def _at(place: str | int, read_one: Callable[[Any], Any], value: object) -> object:
    try:
        return read_one(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
