"""Schemas whose parts have names: what is accepted binds the answer as it is written."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.guided_model import DEMO, EOS, VOCAB

from kvrelay.engine.sampling.grammar import GrammarCompiler
from kvrelay.engine.sampling.schema_keywords import NAMED_SCHEMAS, VALUES
from kvrelay.errors import InvalidArgument
from kvrelay.tokenizer.tokenizer import Tokenizer
from kvrelay.types.requests import Guidance

IDS = (
    *("", "#", "##", "x", "/x", "./x", "y/../x", "//e/x", "?", "/", ".", "x?", "x#", "#a", "x/"),
    *("http://e/x", "HTTP://e/x", "http://e/x#", "http://e/a/../x", "http://e", "http://e/%78"),
    *("urn:x", "urn:x#", "URN:x", "foo://e/x", "json-schema:///", "json-schema:///x"),
)
ids = st.one_of(st.sampled_from(IDS), st.text("x/.#?:%78ehtp", max_size=8))


@cache
def tools() -> tuple[GrammarCompiler, Tokenizer]:
    return GrammarCompiler(str(DEMO), VOCAB, frozenset({EOS})), Tokenizer.load(DEMO)


def accepts(schema: Any, answer: str) -> bool:
    compiler, tokenizer = tools()
    matcher = compiler.compile(Guidance("json_schema", json.dumps(schema)))
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@given(
    st.one_of(st.none(), ids),
    ids,
    st.sampled_from(["$defs", "definitions", "properties"]),
    st.sampled_from(["a", "$id", "$ref", "items", *VALUES, *NAMED_SCHEMAS]),
)
@example(None, "", "$defs", "a")
@example("http://e/x", "y/../x", "definitions", "a")
@example(None, "", "properties", "default")
def test_no_part_takes_the_place_of_the_whole(
    root: str | None, part: str, place: str, name: str
) -> None:
    schema: dict[str, Any] = {"type": "string", place: {name: {"$id": part, "type": "integer"}}}
    if root is not None:
        schema["$id"] = root
    try:
        accepted = accepts(schema, '"b"'), accepts(schema, "7")
    except InvalidArgument:
        return
    assert accepted == (True, False)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "items": {"$id": "", "type": "integer"}},
        {"type": "string", "anyOf": [{"$id": "x"}, {"$id": "x"}]},
        {"$id": "urn:x", "$defs": {"a": {"$id": "x"}}},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "string",
            "definitions": {"a": {"id": "#", "type": "integer"}},
        },
    ],
)
def test_names_that_are_taken_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"the \$id"):
        accepts(schema, "7")


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": "http://e/x", "$ref": "y", "$defs": {"a": {"$id": "y", "type": "string"}}},
        {"$ref": "urn:a", "$defs": {"a": {"$id": "urn:a", "type": "string"}}},
        {"enum": ["b", {"$id": ""}, {"$id": ""}]},
        {"type": ["string", "object"], "properties": {"$id": {"type": "string"}, "id": {}}},
        {"$id": "", "type": "string", "default": {"$id": ""}},
    ],
)
def test_other_names_are_taken_as_they_are(schema: dict[str, Any]) -> None:
    assert accepts(schema, '"b"')
    assert not accepts(schema, "7")


@given(
    st.one_of(st.none(), ids),
    ids,
    st.sampled_from(["default", "examples"]),
    st.sampled_from([[], ["items"], ["anyOf", 0], ["$defs", "a"], ["properties", "a"]]),
)
@example(None, "", "default", [])
def test_the_names_within_values_name_no_parts(
    root: str | None, part: str, keyword: str, place: list[str | int]
) -> None:
    value = {"$id": part, "type": "integer"}
    schema: Any = {keyword: [value, value] if keyword == "examples" else value}
    for step in reversed(place):
        schema = [schema] if step == 0 else {step: schema}
    schema["type"] = "string"
    if root is not None:
        schema["$id"] = root
    try:
        accepted = accepts(schema, '"b"'), accepts(schema, "7")
    except InvalidArgument:
        assert root is not None
        return
    assert accepted == (True, False)


def nested(part: str, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"$id": part, "anyOf": [schema]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "$defs": {str(n): {"$id": f"x{n}"} for n in range(101)}},
        {"$id": f"http://e/{'a/' * 250}", "type": "string"},
        {"$defs": {"a": {"$id": f"{'../' * 200}x"}}},
        nested(f"{'a/' * 40}", 10),
    ],
)
def test_more_names_than_a_request_may_cost_are_refused(schema: dict[str, Any]) -> None:
    """Each is resolved against those around it, on the router's event loop: 3 s without a limit."""
    with pytest.raises(InvalidArgument, match=r"an \$id; use|characters; allowed are"):
        accepts(schema, '"b"')


def test_many_names_are_taken() -> None:
    names = {str(n): {"$id": f"http://e/{n}", "type": "integer"} for n in range(100)}
    assert accepts({"type": "string", "$defs": names}, '"b"')
