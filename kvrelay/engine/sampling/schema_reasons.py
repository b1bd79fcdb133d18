"""Why llguidance does not follow a JSON schema, as the schema's author needs it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from kvrelay.engine.sampling.schema_keywords import NAMED_SCHEMAS, VALUES

_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: (\[.*\])", re.DOTALL)
_UNKNOWN_VALUE = re.compile(r"(?:Unknown (format)|Invalid (type)): (.*)", re.DOTALL)
_ELSEWHERE = re.compile(r"Resource '(.*)' is not present in a registry.*", re.DOTALL)
# The address of a schema that has none.
_BASE = "json-schema:///"
_ONE_OF = "oneOf constraints are not supported"

# A part of a schema: itself, the key of its parent that has it, and the parent.
_Part = tuple[Any, str, "_Part | None"]


def explained_schema(reason: str, source: str) -> str:
    """Returns llguidance's reason with the place of the keyword, if only one can be meant, and what
    to do. `source`: begins with the schema that it refused; otherwise no place is told.
    """
    if reason.startswith(_ONE_OF):
        place = _place(source, lambda part: "oneOf" in part)
        return (
            f'"oneOf"{place} has alternatives that may hold for the same value, which cannot be '
            "ruled out; use anyOf"
        )
    if (unknown := _UNKNOWN_KEYS.fullmatch(reason)) is not None:
        keys = set(json.loads(unknown[1]))
        place = _place(source, lambda part: keys <= part.keys())
        named = " and ".join(json.dumps(key) for key in sorted(keys))
        return f"{named}{place} cannot be followed; leave {'it' if len(keys) == 1 else 'them'} out"
    if (unknown := _UNKNOWN_VALUE.fullmatch(reason)) is not None:
        keyword, value = unknown[1] or unknown[2], unknown[3]
        place = _place(source, lambda part: _has(part.get(keyword), value))
        return f'"{keyword}"{place} is unknown: {value}'
    if (elsewhere := _ELSEWHERE.fullmatch(reason)) is not None:
        document = elsewhere[1].removeprefix(_BASE)
        place = _place(source, lambda part: _document(part.get("$ref")) == document)
        return (
            f'"$ref"{place} is to another document, which is not fetched: {document}; put what it '
            'refers to into "$defs"'
        )
    return reason.replace(_BASE, "")


def _document(reference: Any) -> str:
    return reference.partition("#")[0] if isinstance(reference, str) else ""


def _has(value: Any, text: str) -> bool:
    return text in value if isinstance(value, list) else value == text


def _place(source: str, is_meant: Callable[[dict[str, Any]], bool]) -> str:
    """Returns where the only such part of the schema is, as a JSON pointer (RFC 6901)."""
    try:
        schema, _ = json.JSONDecoder().raw_decode(source.lstrip())
    except ValueError:
        return ""
    found = [part for part in _parts(schema) if is_meant(part[0])]
    if len(found) != 1:
        return ""
    keys: list[str] = []
    part: _Part | None = found[0]
    while part is not None:
        keys.append(part[1])
        part = part[2]
    return f" at {'/'.join(reversed(keys))}" if keys[1:] else " at the root"


def _parts(schema: Any) -> Iterator[_Part]:
    """Yields the parts of a schema that are objects."""
    left: list[_Part] = [(schema, "", None)]
    while left:
        part = left.pop()
        value = part[0]
        if isinstance(value, list):
            left += [(one, str(number), part) for number, one in enumerate(value)]
        if not isinstance(value, dict):
            continue
        yield part
        for name, inner in value.items():
            if name in NAMED_SCHEMAS and isinstance(inner, dict):
                names: _Part = (None, _escaped(name), part)
                left += [(one, _escaped(key), names) for key, one in inner.items()]
            elif name not in VALUES:
                left.append((inner, _escaped(name), part))


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
