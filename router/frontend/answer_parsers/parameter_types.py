"""Writes the text of a parameter as JSON, with a type that the parameter's JSON schema allows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote

# JSON's types of Python values.
_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
# Most parts of a schema that are looked at.
_MOST_PARTS = 64
# Most characters of a reference that is followed.
_MOST_REFERENCE = 1000
# How Python writes JSON's literals.
_LITERALS = {"True": "true", "False": "false", "None": "null"}


def escape(text: str) -> str:
    """Returns the text as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Types(NamedTuple):
    """What a parameter's schema allows."""

    names: frozenset[str]
    # Strings that are allowed beside types other than "string".
    words: frozenset[str] = frozenset()
    # Values that an enumeration allows beside strings.
    values: tuple[object, ...] = ()

    @property
    def is_string(self) -> bool:
        """Whether any text is a string."""
        return self.names == {"string"}


def types_of(schema: object, whole: object) -> Types:
    """Returns the types of a schema and of its alternatives. If these name none but null: also
    those of the schemas that apply, too, and of the values that a schema without a type allows.
    Strings that are listed beside other types do not stand for any string. A parameter without a
    schema is a string. `whole`: the schema of all parameters, to which references refer.
    """
    if not isinstance(schema, Mapping):
        return Types(frozenset({"string"}))
    parts = [*_parts(schema, whole, ("anyOf", "oneOf"))]
    names = {*_named_types(parts)}
    words: set[str] = set()
    if names - {"string", "null"}:
        strings = [part for part in parts if "string" in _named_types([part])]
        if all(map(_is_short_list, strings)) and not any(map(_is_free, parts)):
            # Only these strings, not any text.
            names.discard("string")
            words.update(value for value in _listed(strings) if isinstance(value, str))
    others: tuple[object, ...] = ()
    if names <= {"null"}:
        parts = [*_parts(schema, whole, ("anyOf", "oneOf", "allOf"))]
        names.update(_named_types(parts))
        if "string" not in names:
            others = tuple(one for one in _values(parts) if not isinstance(one, str))
        names.update(_TYPES[type(value)] for value in _values(parts))
    words.update(value for value in _values(parts) if isinstance(value, str))
    return Types(frozenset(names), frozenset(words), others)


def value_json(text: str, types: Types) -> str:
    """Returns the text as JSON. Text that does not fit the schema becomes a string.

    If the schema allows strings, all text is a string but "null" and the other values of an
    enumeration. If it names no type, only an object and an array are not strings.
    """
    value = text.strip()
    if "string" not in types.names and value in types.words:
        return f'"{escape(value)}"'
    value = _LITERALS.get(value, value)
    if "string" in types.names:
        is_json = text not in types.words and _is_listed(value, types)
    elif types.names:
        is_json = text not in types.words
    else:
        is_json = value.startswith(("{", "["))
    return value if is_json and _is_valid(value) else f'"{escape(text)}"'


def _is_listed(text: str, types: Types) -> bool:
    """Whether a text stands for null or for a value of the enumeration, beside strings."""
    if text == "null" and "null" in types.names:
        return True
    try:
        value = json.loads(text) if types.values else None
    except (ValueError, RecursionError):
        return False
    # Python's True is 1.
    return any(
        isinstance(one, bool) == isinstance(value, bool) and one == value for one in types.values
    )


def _named_types(parts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for part in parts:
        types = part.get("type")
        names = types[:_MOST_PARTS] if isinstance(types, list) else [types]
        yield from (name for name in names if isinstance(name, str))


def _values(parts: Iterable[Mapping[str, Any]]) -> Iterator[object]:
    """Yields the values that parts without a type allow."""
    return _listed(part for part in parts if not any(_named_types([part])))


def _is_short_list(part: Mapping[str, Any]) -> bool:
    """Whether a part allows only values that are all looked at."""
    enum = part.get("enum")
    return "const" in part or (isinstance(enum, list) and len(enum) <= _MOST_PARTS)


def _is_free(part: Mapping[str, Any]) -> bool:
    """Whether a part may allow any string, although it names no type."""
    return part.keys().isdisjoint(("type", "const", "enum", "anyOf", "oneOf", "$ref"))


def _listed(parts: Iterable[Mapping[str, Any]]) -> Iterator[object]:
    """Yields the values that parts list."""
    for part in parts:
        if "const" in part:
            yield part["const"]
        elif isinstance(part.get("enum"), list):
            yield from part["enum"][:_MOST_PARTS]


def _parts(schema: object, whole: object, keywords: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yields a schema, those under the keywords, and what they refer to. References may be in a
    circle.
    """
    left = [schema]
    followed: set[str] = set()
    for _ in range(_MOST_PARTS):
        if not left:
            return
        part = left.pop()
        if not isinstance(part, Mapping):
            continue
        yield part
        for key in keywords:
            if isinstance(part.get(key), list):
                left += part[key][:_MOST_PARTS]
        reference = part.get("$ref")
        if not isinstance(reference, str) or len(reference) > _MOST_REFERENCE:
            continue
        reference = unquote(reference)
        if reference not in followed:
            followed.add(reference)
            left.append(_referred(reference, whole))


def _referred(reference: str, whole: object) -> object:
    """Returns the part of the schema that a JSON pointer names; None if there is none."""
    # LiteLLM omits the #.
    start, *steps = reference.split("/", _MOST_PARTS)
    if start not in ("#", ""):
        return None
    for step in steps:
        whole = _inner(whole, step)
    return whole


def _inner(part: object, step: str) -> object:
    """Returns what a step of a JSON pointer names; None if there is none."""
    if isinstance(part, Mapping):
        return part.get(step.replace("~1", "/").replace("~0", "~"))
    if isinstance(part, list) and step.isascii() and step.isdecimal() and int(step) < len(part):
        return part[int(step)]
    return None


def _is_valid(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
