"""Keywords that bind no value are left out, and all others bind as before."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from support.guided_model import DEMO, EOS, VOCAB

from kvrelay.engine.sampling.grammar import GrammarCompiler
from kvrelay.errors import InvalidArgument
from kvrelay.tokenizer.tokenizer import Tokenizer
from kvrelay.types.requests import Guidance
from router.api.http.adapted_schema import FORMATS, adapted_schema

OTHERS = (
    *("password", "path", "binary", "byte", "regex", "json-pointer", "relative-json-pointer"),
    *("uri-reference", "uri-template", "iri", "iri-reference", "idn-email", "idn-hostname"),
    *("int32", "int64", "float", "double", "decimal", "file-path", "directory-path", "color", ""),
)

TOKENIZER = Tokenizer.load(str(DEMO))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(str(DEMO), VOCAB, frozenset({EOS}))


def compiles(schema: Any) -> bool:
    try:
        compiler().compile(Guidance("json_schema", json.dumps(schema)))
    except InvalidArgument:
        return False
    return True


def allows(schema: Any, text: str) -> bool:
    """Whether the text is, or begins, an answer."""
    matcher = compiler().compile(Guidance("json_schema", json.dumps(schema)))
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens))


@pytest.mark.parametrize("name", [*sorted(FORMATS), *OTHERS])
def test_formats_stay_that_are_followed(name: str) -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": name}}}
    followed = name in FORMATS
    assert compiles(schema) == followed
    found = adapted_schema(schema)
    assert (found == schema) == followed
    assert compiles(found)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False},
        {"type": "object", "propertyNames": {"type": "string"}},
        {"type": "object", "propertyNames": True},
        {"type": "object", "propertyNames": {}},
        {"type": "object", "propertyNames": {"type": "string", "description": "A name."}},
        {"type": "object", "propertyNames": {"minLength": 0}},
        {"anyOf": [{"type": "string", "format": "password"}, {"type": "null"}]},
        {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"format": "byte"}}},
    ],
)
def test_what_allows_everything_is_left_out(schema: dict[str, Any]) -> None:
    assert not compiles(schema)
    assert compiles(adapted_schema(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "object", "propertyNames": {"type": "integer"}},
        {"type": "object", "propertyNames": {"minLength": 1}},
        {"const": {"format": "password", "uniqueItems": False}},
        {"properties": {"format": {"type": "string"}, "uniqueItems": {"const": False}}},
        {"default": [{"format": "x"}], "type": "string"},
        {"format": 5},
    ],
)
def test_what_binds_or_is_a_value_stays(schema: dict[str, Any]) -> None:
    assert adapted_schema(schema) == schema


NAMES = ("a", "a b", "é", "Foo[int]", "a|b", "100%", "#", "x.y-z_1", '"', "𝄞")


@pytest.mark.parametrize("beginning", ["#", ""])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_reference_may_have_the_characters_of_any_name(
    name: str, moved: bool, beginning: str
) -> None:
    """Also without the #, as LiteLLM sends it, and where the schema becomes a part of another."""
    part = {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}
    schema = {
        "$ref": f"{beginning}/$defs/{name.replace('%', '%25')}",
        "$defs": {name: part},
    }
    if moved:
        schema = {"$ref": "#/$defs/f", "$defs": {"f": adapted_schema(schema, "#/$defs/f")}}
    else:
        schema = adapted_schema(schema)
    assert allows(schema, '{"v": 5}')
    assert not allows(schema, '{"w": 5}')


def test_anchors_of_several_schemas_do_not_meet() -> None:
    def tool(kind: str) -> dict[str, Any]:
        return {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": kind}}}

    parts = {
        name: adapted_schema(tool(kind), f"#/$defs/{name}", f"_{name}-")
        for name, kind in (("1st", "boolean"), ("2nd", "null"))
    }
    for name, text in (("1st", "true"), ("2nd", "null")):
        schema = {"$ref": f"#/$defs/{name}", "$defs": parts}
        assert allows(schema, text)
        assert not allows(schema, "true" if text == "null" else "null")


def test_a_part_with_an_id_refers_to_its_own_parts() -> None:
    part = {"$id": "http://a/b", "$ref": "#/$defs/y", "$defs": {"y": {"type": "boolean"}}}
    schema = {"$ref": "#/$defs/f", "$defs": {"f": adapted_schema({"items": part}, "#/$defs/f")}}
    assert allows(schema, "[true]")
    assert not allows(schema, "[5]")
    alone = adapted_schema({"properties": {"p": {"$ref": "http://a/b"}}, "$defs": {"b": part}})
    assert allows(alone, '{"p": true}')


def test_values_and_names_of_a_moved_schema_stay() -> None:
    """Only references move: a value may look like one, and a property may have a keyword's name."""
    reference = {"$ref": "#/$defs/a"}
    schema = {
        "const": reference,
        "enum": [reference],
        "default": reference,
        "properties": {"default": reference, "$ref": {"type": "string"}},
        "$defs": {"const": reference},
    }
    moved = {"$ref": "#/to/$defs/a"}
    assert adapted_schema(schema, "#/to") == schema | {
        "properties": {"default": moved, "$ref": {"type": "string"}},
        "$defs": {"const": moved},
    }
