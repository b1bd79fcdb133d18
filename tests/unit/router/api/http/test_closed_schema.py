"""Closed schemas, against jsonschema as the oracle."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.http.closed_schema import closed

NAMES = ("a", "b", "c")
VALUES = st.recursive(
    st.integers(0, 3) | st.just("x") | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from((*NAMES, "d")), inner)
    ),
    max_leaves=6,
)
LEAVES = st.sampled_from(
    [
        *({}, True, {"type": "integer"}, {"type": "object"}, {"const": "x"}, {"$ref": "#/$defs/d"}),
        *({"const": {"a": {"d": 1}}}, {"enum": [1, {"b": {"c": 1}}]}),
    ]
)


def _wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas with any of these keywords, side by side."""
    lists = st.lists(inner, min_size=1, max_size=2)
    names = st.sampled_from(NAMES)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("object"),
            "properties": st.dictionaries(names, inner, max_size=3),
            "required": st.lists(names, max_size=1),
            "additionalProperties": inner,
            "patternProperties": st.dictionaries(st.just("^[ab]$"), inner, max_size=1),
            "minProperties": st.integers(0, 2),
            "dependentRequired": st.just({"a": ["b"]}),
            "propertyNames": st.just({"enum": ["a", "d"]}),
            "allOf": lists,
            "anyOf": lists,
            "oneOf": lists,
            "not": inner,
            "items": inner,
            "prefixItems": lists,
            "contains": inner,
            "maxContains": st.just(1),
            "title": st.just("t"),
            "readOnly": st.just(True),
            "x-order": st.just(1),
            "const": st.just({"a": {"d": 1}}),
            "enum": st.just([1, {"b": {"c": 1}}]),
        },
    )


SCHEMAS = st.recursive(LEAVES, _wider, max_leaves=6)
ROOTS = st.builds(
    lambda schema, other: {**schema, "$defs": {"d": other}},
    SCHEMAS.filter(lambda one: isinstance(one, dict)),
    _wider(LEAVES.filter(lambda one: one != {"$ref": "#/$defs/d"})),
)


def valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@given(ROOTS, st.lists(VALUES, min_size=20, max_size=20))
def test_its_values_are_values_of_the_schema(schema: dict[str, Any], values: list[Any]) -> None:
    found = closed(schema)
    for value in values:
        assert not valid(found, value) or valid(schema, value), value


def declared(schema: Any) -> st.SearchStrategy[Any]:
    """Values with declared properties only, of schemas as _plain makes them."""
    if "anyOf" in schema:
        return st.one_of(*map(declared, schema["anyOf"]))
    if schema["type"] == "object":
        return st.fixed_dictionaries(
            {name: declared(schema["properties"][name]) for name in schema["required"]},
            optional={
                name: declared(one)
                for name, one in schema["properties"].items()
                if name not in schema["required"]
            },
        )
    if schema["type"] == "array":
        return st.lists(declared(schema["items"]), max_size=2)
    return st.integers(0, 3)


def _plain(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(st.sampled_from(NAMES), inner, min_size=1).flatmap(
        lambda properties: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(properties),
                "required": st.lists(st.sampled_from(sorted(properties)), unique=True),
            }
        )
    )
    return (
        objects
        | st.builds(lambda one: {"type": "array", "items": one}, inner)
        | st.builds(lambda *one: {"anyOf": list(one)}, inner, inner)
    )


def objects_of(schema: Any) -> list[dict[str, Any]]:
    if isinstance(schema, list):
        return [found for one in schema for found in objects_of(one)]
    if not isinstance(schema, dict):
        return []
    inner = [found for one in schema.values() for found in objects_of(one)]
    return [schema, *inner] if schema.get("type") == "object" else inner


@given(st.data(), st.recursive(st.just({"type": "integer"}), _plain, max_leaves=8))
def test_values_with_declared_properties_stay(data: st.DataObject, schema: Any) -> None:
    found = closed(schema)
    assert all(one["additionalProperties"] is False for one in objects_of(found))
    assert valid(found, data.draw(declared(schema)))


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "schema",
    [
        OBJECT | {"additionalProperties": True},
        OBJECT | {"required": ["b"]},
        OBJECT | {"patternProperties": {"^x": {}}},
        OBJECT | {"const": {"b": 1}},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"allOf": [OBJECT, {"properties": {"b": {}}}]},
        {"$ref": "#/$defs/d", "properties": {"b": {}}, "$defs": {"d": OBJECT}},
        {"anyOf": [OBJECT], "required": ["b"]},
        {"properties": {"x": {"allOf": [{"$ref": "#/properties/y"}]}, "y": OBJECT}},
        {"type": "object", "const": {"o": {"b": 1}}, "properties": {"o": OBJECT}},
        {"enum": [1, [{"b": 1}]], "items": OBJECT},
    ],
)
def test_unchanged(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_schema_as_pydantic_writes_it() -> None:
    schema = {
        "$defs": {"Day": OBJECT},
        "properties": {
            "day": {"$ref": "#/$defs/Day", "description": "A day."},
            "days": {"anyOf": [{"items": {"$ref": "#/$defs/Day"}}, {"type": "null"}]},
        },
        "type": "object",
    }
    found = closed(schema)
    assert found["additionalProperties"] is False
    assert found["$defs"]["Day"]["additionalProperties"] is False
    assert "additionalProperties" not in schema


@pytest.mark.parametrize(
    "remark",
    [
        *({"readOnly": True}, {"writeOnly": True}, {"nullable": True}, {"x-order": 1}),
        *({"discriminator": {"propertyName": "a"}}, {"externalDocs": {}}, {"type": "object"}),
        *({"contentMediaType": "text/plain"}, {"$anchor": "a"}, {"description": "d"}),
    ],
)
@pytest.mark.parametrize("combined", [{"$ref": "#/$defs/A"}, {"anyOf": [OBJECT, {"type": "null"}]}])
def test_a_remark_beside_a_reference_opens_nothing(
    combined: dict[str, Any], remark: dict[str, Any]
) -> None:
    schema = {
        "type": "object",
        "properties": {"p": combined | remark, "q": {"$ref": "#/$defs/A"}},
        "$defs": {"A": OBJECT},
    }
    objects = [one for one in objects_of(closed(schema)) if "properties" in one]
    assert len(objects) > 1
    assert all(one["additionalProperties"] is False for one in objects)


def test_names_and_values_are_no_references() -> None:
    """A property may have a keyword's name, and a value may look like a reference."""
    reference = {"$ref": "#/$defs/A"}
    named = {"allOf": [{"properties": {"$ref": {}}, "default": reference, "examples": [reference]}]}
    found = closed({"type": "object", "properties": {"p": named}, "$defs": {"A": OBJECT}})
    assert found["additionalProperties"] is False
    assert found["$defs"]["A"]["additionalProperties"] is False


@pytest.mark.parametrize(
    "combined",
    [
        {"oneOf": [{"const": "a"}, {"const": "b"}]},
        {"anyOf": [{"const": "a"}], "type": "string"},
        {"type": "object", "properties": {"c": {}}, "not": {"required": ["d"]}},
    ],
)
def test_a_combined_part_opens_itself_only(combined: dict[str, Any]) -> None:
    plain = {"type": "object", "properties": {"c": {"const": 1}}}
    found = closed({"type": "object", "properties": {"a": combined, "b": plain}})
    assert found["additionalProperties"] is False
    assert found["properties"]["b"]["additionalProperties"] is False
    assert found["properties"]["a"] == combined
