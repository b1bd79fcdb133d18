"""Writes the text of a parameter as JSON, with a type that the parameter's JSON schema allows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn
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
# How Python writes JSON's literals.
_LITERALS = {"True": "true", "False": "false", "None": "null"}


def escape(text: str) -> str:
    """Returns the text as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_string(schema: object, whole: object) -> bool:
    """Whether any text is a string. True for a parameter without a schema. `whole`: the schema of
    all parameters, to which references refer.
    """
    return not isinstance(schema, Mapping) or set(_types(schema, whole)) == {"string"}


def value_json(text: str, schema: object, whole: object) -> str:
    """Returns the text as JSON. Text that does not fit the schema becomes a string. `whole`: the
    schema of all parameters, to which references refer.

    If the schema allows strings, all text but "null" is a string. If it names no type, only an
    object and an array are not strings.
    """
    types = set(_types(schema, whole))
    value = text.strip()
    value = _LITERALS.get(value, value)
    if "string" in types:
        is_json = value == "null" and "null" in types
    else:
        is_json = bool(types) or value.startswith(("{", "["))
    return value if is_json and _is_valid(value) else f'"{escape(text)}"'


def _types(schema: object, whole: object) -> Iterator[str]:
    """Yields the types of a schema and of its alternatives. If these name none: the types of the
    schemas that also apply, or else of the allowed values.
    """
    alternatives = ("anyOf", "oneOf")
    found = [*_named_types(_parts(schema, whole, alternatives))]
    parts = [*_parts(schema, whole, (*alternatives, "allOf"))]
    yield from found or [*_named_types(parts)] or _types_of_values(parts)


def _named_types(parts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for part in parts:
        types = part.get("type")
        names = types if isinstance(types, list) else [types]
        yield from (name for name in names if isinstance(name, str))


def _types_of_values(parts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for part in parts:
        values = part["enum"] if isinstance(part.get("enum"), list) else []
        values = [part["const"]] if "const" in part else values[:_MOST_PARTS]
        yield from (_TYPES[type(value)] for value in values)


def _parts(schema: object, whole: object, keywords: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yields a schema, those under the keywords, and what they refer to. References may be in a
    circle.
    """
    left = [schema]
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
        if isinstance(part.get("$ref"), str):
            left.append(_referred(part["$ref"], whole))


def _referred(reference: str, whole: object) -> object:
    """Returns the part of the schema that a JSON pointer names; None if there is none."""
    # LiteLLM omits the #.
    start, *steps = unquote(reference).split("/", _MOST_PARTS)
    if start not in ("#", ""):
        return None
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        whole = whole.get(name) if isinstance(whole, Mapping) else None
    return whole


def _is_valid(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
