"""A client's JSON schema as llguidance takes it, with the same answers. Pure.

llguidance refuses keywords that it does not know, also where they allow everything, and references
that are no URIs.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

from kvrelay.engine.sampling.schema_keywords import NAMED_SCHEMAS, REMARKS, VALUES

# The formats of strings that llguidance follows. By JSON Schema, a format is an annotation.
FORMATS = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri"),
        "uuid",
    }
)
# Characters of a URI besides letters and digits, without those of a host only (RFC 3986).
_MARKS = "-._~:/?@!$&'()*+,;=%"
# A percent sign that encodes no character.
_PERCENT = re.compile("%(?![0-9A-Fa-f]{2})")
# Keywords that give a part a name to refer to.
_NAMES = frozenset({"$id", "$anchor", "$defs", "definitions"})
# Beginnings of references for which LiteLLM omits the # for Anthropic's API.
_WITHOUT_FRAGMENT = ("/$defs/", "/definitions/")


def adapted_schema(schema: Any, to: str = "#", anchors: str = "") -> Any:
    """Returns the schema without formats that are not followed, `uniqueItems: false`, and
    `propertyNames` that allow each name. Its references hold where it is moved to.

    - to: a reference to the place of the schema in another one; "#" if it stands alone
    - anchors: put before its anchors, so that those of several schemas differ
    """
    if isinstance(schema, list):
        return [adapted_schema(one, to, anchors) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("$id"), str):
        # What is in it refers to its own parts.
        to, anchors = "#", ""
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in VALUES:
            found[name] = value
        elif name in NAMED_SCHEMAS and isinstance(value, dict):
            found[name] = {key: adapted_schema(one, to, anchors) for key, one in value.items()}
        elif name == "$ref" and isinstance(value, str):
            found[name] = _reference(value, to, anchors)
        elif name == "$anchor" and isinstance(value, str):
            found[name] = anchors + value
        elif not _binds_nothing(name, value):
            found[name] = adapted_schema(value, to, anchors)
    return found


def _binds_nothing(name: str, value: Any) -> bool:
    match name:
        case "format":
            return isinstance(value, str) and value not in FORMATS
        case "uniqueItems":
            return value is False
        case "propertyNames":
            return value is True or (isinstance(value, dict) and _allows_each_name(value))
    return False


def _allows_each_name(schema: dict[str, Any]) -> bool:
    """Whether each string is a value of the schema, and nothing can refer to a part of it."""
    if not _NAMES.isdisjoint(schema):
        return False
    binding = {name: value for name, value in schema.items() if name not in REMARKS}
    return binding.items() <= {"type": "string", "minLength": 0}.items()


def _reference(value: str, to: str, anchors: str) -> str:
    if value in ("", "#") or value.startswith("#/"):
        value = to + value[1:]
    elif value.startswith(_WITHOUT_FRAGMENT):
        value = to + value
    elif value.startswith("#"):
        value = f"#{anchors}{value[1:]}"
    value = _PERCENT.sub("%25", value)
    return "#".join(quote(part, safe=_MARKS) for part in value.split("#", 1))
