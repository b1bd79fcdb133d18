"""Keywords that bind no value are left out, and all others bind as before."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from support.guided_model import DEMO, EOS, VOCAB

from kvrelay.engine.sampling.grammar import GrammarCompiler
from kvrelay.errors import InvalidArgument
from kvrelay.types.requests import Guidance
from router.api.http.annotations import FORMATS, without_annotations

OTHERS = (
    *("password", "path", "binary", "byte", "regex", "json-pointer", "relative-json-pointer"),
    *("uri-reference", "uri-template", "iri", "iri-reference", "idn-email", "idn-hostname"),
    *("int32", "int64", "float", "double", "decimal", "file-path", "directory-path", "color", ""),
)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(str(DEMO), VOCAB, frozenset({EOS}))


def compiles(schema: Any) -> bool:
    try:
        compiler().compile(Guidance("json_schema", json.dumps(schema)))
    except InvalidArgument:
        return False
    return True


@pytest.mark.parametrize("name", [*sorted(FORMATS), *OTHERS])
def test_formats_stay_that_are_followed(name: str) -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": name}}}
    followed = name in FORMATS
    assert compiles(schema) == followed
    found = without_annotations(schema)
    assert (found == schema) == followed
    assert compiles(found)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False},
        {"type": "object", "propertyNames": {"type": "string"}},
        {"type": "object", "propertyNames": True},
        {"type": "object", "propertyNames": {}},
        {"anyOf": [{"type": "string", "format": "password"}, {"type": "null"}]},
        {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"format": "byte"}}},
    ],
)
def test_what_allows_everything_is_left_out(schema: dict[str, Any]) -> None:
    assert not compiles(schema)
    assert compiles(without_annotations(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"const": {"format": "password", "uniqueItems": False}},
        {"properties": {"format": {"type": "string"}, "uniqueItems": {"const": False}}},
        {"default": [{"format": "x"}], "type": "string"},
        {"format": 5},
    ],
)
def test_what_binds_or_is_a_value_stays(schema: dict[str, Any]) -> None:
    assert without_annotations(schema) == schema
