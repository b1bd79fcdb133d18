"""Keywords of a JSON schema that bind no value. Pure.

llguidance refuses what it does not know, also where that allows everything.
"""

from __future__ import annotations

from typing import Any

from kvrelay.engine.sampling.schema_keywords import NAMED_SCHEMAS, VALUES

# The formats of strings that llguidance follows. By JSON Schema, a format is an annotation.
FORMATS = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri"),
        "uuid",
    }
)
_ANY_NAME: tuple[object, ...] = (True, {}, {"type": "string"})


def without_annotations(schema: Any) -> Any:
    """Returns the schema without formats that are not followed, `uniqueItems: false`, and
    `propertyNames` that allow each name.
    """
    if isinstance(schema, list):
        return [without_annotations(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in NAMED_SCHEMAS and isinstance(value, dict):
            found[name] = {key: without_annotations(one) for key, one in value.items()}
        elif name in VALUES:
            found[name] = value
        elif not _binds_nothing(name, value):
            found[name] = without_annotations(value)
    return found


def _binds_nothing(name: str, value: Any) -> bool:
    match name:
        case "format":
            return isinstance(value, str) and value not in FORMATS
        case "uniqueItems":
            return value is False
        case "propertyNames":
            return value in _ANY_NAME
    return False
