"""The schema of a function's parameters without undeclared ones. Pure."""

from __future__ import annotations

from typing import Any

from kvrelay.engine.sampling.schema_keywords import REMARKS, inner_schemas

_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})

# With these, several subschemas may apply to one object.
_COMBINED = frozenset(
    {
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef"),
        *("dependentSchemas", "dependencies", "unevaluatedProperties", "patternProperties"),
        # Counts values, of which a closed schema has fewer.
        "contains",
    }
)
# An object with one of these may need properties that it does not declare, or says which others it
# has.
_OPEN = _COMBINED | {
    *("additionalProperties", "minProperties", "propertyNames"),
    *("dependentRequired", "const", "enum"),
}
# Keywords with one subschema, with a list of them, and with a mapping of them.
_ONE = ("items", "additionalProperties")
_LISTS = ("prefixItems", "anyOf")
_MAPPINGS = ("properties", "$defs", "definitions")
# Beside a reference or alternatives, they declare no properties.
_BESIDE = REMARKS | {"type"}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with `additionalProperties: false` in the objects that only declare
    properties, so that an answer has no others.

    A part in which an object may be declared in several places stays as it is: a value that one of
    them declares would be forbidden by another. If such a part refers to others, the whole schema
    does. The values of the result are values of the schema.
    """
    combined: list[dict[str, Any]] = []
    found = _closed(schema, combined)
    return dict(schema) if any(map(_refers, combined)) else found


def _refers(part: Any) -> bool:
    """Whether there is a reference anywhere in the part."""
    if isinstance(part, list):
        return any(map(_refers, part))
    if not isinstance(part, dict):
        return False
    return not _REFERENCES.isdisjoint(part) or any(map(_refers, inner_schemas(part)))


def _combines(schema: dict[str, Any]) -> bool:
    """Whether parts of the schema may apply beside others to the same object."""
    if _COMBINED.isdisjoint(schema):
        return _prescribes_parts(schema.get("const")) or _prescribes_parts(schema.get("enum"))
    found = _COMBINED & schema.keys()
    # A reference, or alternatives, beside nothing that says more about the value.
    alone = len(found) == 1 and found <= {"$ref", "anyOf"}
    others = schema.keys() - _BESIDE - found
    return not alone or not all(name.startswith("x-") for name in others)


def _prescribes_parts(value: Any) -> bool:
    """Whether the value of const or enum has objects, which schemas beside it describe too."""
    if isinstance(value, list):
        return any(map(_prescribes_parts, value))
    return isinstance(value, dict)


def _closed(schema: Any, combined: list[dict[str, Any]]) -> Any:
    """Adds the parts that stay as they are to `combined`."""
    if not schema or not isinstance(schema, dict):
        return schema
    if _combines(schema):
        combined.append(schema)
        return schema
    found = dict(schema)
    for name in _ONE:
        if name in found:
            found[name] = _closed(found[name], combined)
    for name in _LISTS:
        if isinstance(found.get(name), list):
            found[name] = [_closed(one, combined) for one in found[name]]
    for name in _MAPPINGS:
        if isinstance(found.get(name), dict):
            found[name] = {key: _closed(one, combined) for key, one in found[name].items()}
    declared, required = found.get("properties"), found.get("required")
    if (
        declared
        and isinstance(declared, dict)
        and _OPEN.isdisjoint(found)
        and (not isinstance(required, list) or _declares(declared, required))
    ):
        found["additionalProperties"] = False
    return found


def _declares(declared: dict[str, Any], required: list[Any]) -> bool:
    return all(isinstance(one, str) and one in declared for one in required)
