"""Writes the text of a parameter as JSON, with a type that the parameter's JSON schema allows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import NoReturn

# How Python writes JSON's literals.
_LITERALS = {"True": "true", "False": "false", "None": "null"}


def escape(text: str) -> str:
    """Returns the text as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_string(schema: object) -> bool:
    """Whether any text is a string. True for a parameter without a schema."""
    return not isinstance(schema, Mapping) or set(_types(schema)) == {"string"}


def value_json(text: str, schema: object) -> str:
    """Returns the text as JSON. Text that does not fit the schema becomes a string.

    If the schema allows strings, all text but "null" is a string. If it names no type, only an
    object and an array are not strings.
    """
    types = set(_types(schema))
    value = text.strip()
    value = _LITERALS.get(value, value)
    if "string" in types:
        is_json = value == "null" and "null" in types
    else:
        is_json = bool(types) or value.startswith(("{", "["))
    return value if is_json and _is_valid(value) else f'"{escape(text)}"'


def _types(schema: object) -> Iterator[str]:
    """Yields the types of a schema and of its alternatives."""
    if not isinstance(schema, Mapping):
        return
    alternatives = [
        alternative
        for key in ("anyOf", "oneOf")
        if isinstance(schema.get(key), list)
        for alternative in schema[key]
        if isinstance(alternative, Mapping)
    ]
    for part in (schema, *alternatives):
        types = part.get("type")
        names = types if isinstance(types, list) else [types]
        yield from (name for name in names if isinstance(name, str))


def _is_valid(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
