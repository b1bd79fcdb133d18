"""Keywords of JSON schemas whose values are no schemas, and those that bind no value. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# The values are the application's.
VALUES = ("const", "default", "enum", "examples")
# The values are schemas by name. The names are no keywords.
NAMED_SCHEMAS = (
    "properties",
    "patternProperties",
    "dependentSchemas",
    "dependencies",
    "$defs",
    "definitions",
)
# They say nothing about a value.
REMARKS = frozenset(
    {
        *("title", "description", "default", "example", "examples", "deprecated", "$comment"),
        *("readOnly", "writeOnly", "externalDocs", "xml", "discriminator", "nullable"),
        *("contentMediaType", "contentEncoding", "$id", "$anchor", "$schema"),
        *("$defs", "definitions"),
    }
)


def inner_schemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yields what stands where a schema may have schemas, or lists of them."""
    for name, value in schema.items():
        if name in NAMED_SCHEMAS and isinstance(value, Mapping):
            yield from value.values()
        elif name not in VALUES:
            yield value
