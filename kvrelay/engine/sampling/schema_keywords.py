"""Keywords of JSON schemas whose values are no schemas themselves. Pure."""

from __future__ import annotations

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
