"""Keywords that bind no value are left out, and all others bind as before."""

from __future__ import annotations

import json
from functools import cache
from itertools import permutations
from typing import Any

import pytest
from support.guided_model import DEMO, EOS, VOCAB

from kvrelay.engine.sampling.grammar import GrammarCompiler
from kvrelay.errors import InvalidArgument
from kvrelay.tokenizer.tokenizer import Tokenizer
from kvrelay.types.requests import Guidance
from router.api.http.adapted_schema import FORMATS, adapted_schema
from router.api.http.chat.tool_use import ToolUse
from router.api.http.structured_output import guidance_of_tools

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
        {"type": "object", "propertyNames": {"type": "string", "$anchor": "name"}},
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
        "$ref": f"{beginning}/$defs/{name}",
        "$defs": {name: part},
    }
    if moved:
        schema = {"$ref": "#/$defs/f", "$defs": {"f": adapted_schema(schema, "#/$defs/f")}}
    else:
        schema = adapted_schema(schema)
    assert allows(schema, '{"v": 5}')
    assert not allows(schema, '{"w": 5}')


PARTS = ("a", "a-b", "b", "b-c", "c", "_0-c", "0", "a.b", "-")


@pytest.mark.sweep(6)
@pytest.mark.parametrize("names", list(permutations(PARTS, 2)), ids="-".join)
@pytest.mark.parametrize("anchors", [("c", "b-c"), ("b-c", "c"), ("_0-c", "c"), ("c", "c")])
def test_anchors_of_several_tools_do_not_meet(
    names: tuple[str, str], anchors: tuple[str, str]
) -> None:
    tools = tuple(
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"v": {"$ref": f"#{anchor}"}},
                    "required": ["v"],
                    "$defs": {"d": {"$anchor": anchor, "type": kind}},
                },
            },
        }
        for name, anchor, kind in zip(names, anchors, ("boolean", "null"), strict=True)
    )
    guidance = guidance_of_tools(ToolUse(tools, "", "required"))  # type: ignore[arg-type]
    assert guidance is not None
    schema = json.loads(guidance.source)
    for name, value in zip(names, ("true", "null"), strict=True):
        call = f'[{{"name": "{name}", "arguments": {{"v": '
        assert allows(schema, call + value)
        assert not allows(schema, call + ("true" if value == "null" else "null"))


def test_a_long_name_of_a_tool_does_not_make_its_references_longer() -> None:
    references = {f"p{number}": {"$ref": "#/$defs/d"} for number in range(800)}
    parameters = {"type": "object", "properties": references, "$defs": {"d": {"type": "null"}}}
    tool = {"type": "function", "function": {"name": "n" * 128, "parameters": parameters}}
    guidance = guidance_of_tools(ToolUse((tool,), "", "required"))  # type: ignore[arg-type]
    assert guidance is not None
    assert len(guidance.source) < 1.5 * len(json.dumps(parameters))


@pytest.mark.parametrize("root", ["#", ""])
def test_the_root_of_a_moved_schema_is_its_own(root: str) -> None:
    properties = {"v": {"type": "integer"}, "next": {"$ref": root}}
    part = {"type": "object", "properties": properties}
    schema = {"items": {"$ref": "#/$defs/f"}, "$defs": {"f": adapted_schema(part, "#/$defs/f")}}
    assert allows(schema, '[{"v": 1, "next": {"v": 2')
    assert not allows(schema, '[{"v": 1, "next": [')


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
