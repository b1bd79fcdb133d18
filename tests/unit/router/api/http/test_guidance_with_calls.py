"""Grammars of answers that follow a schema or are calls, as the demo model's matcher takes them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.router_harness import DEMO

from kvrelay.engine.sampling.grammar import GrammarCompiler
from kvrelay.tokenizer.tokenizer import Tokenizer
from kvrelay.types.requests import Guidance
from router.api.http.chat.tool_use import ToolUse
from router.api.http.structured_output import guidance_of_schema, guidance_with_calls
from router.frontend.answer_parsers.events import CallArguments, CallStarted, Content
from router.frontend.answer_parsers.formats import TOOL_FORMATS

ANSWER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: tuple[Any, ...] = tuple(
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in {
        "f": {
            "$ref": "#/$defs/x",
            "$defs": {"x": {"type": "object", "properties": {"b": {"type": "boolean"}}}},
        },
        "g.h-1": {"type": "object", "properties": {"c": {"enum": ["</tool_call>", "é"]}}},
    }.items()
)
FORMATS = ("hermes", "llama3_json", "json")
COMPILER = GrammarCompiler(DEMO, 0, frozenset({2}))
TOKENIZER = Tokenizer.load(DEMO)


def grammar(name: str, parallel: bool, answer: Any = ANSWER) -> Guidance:
    syntax = TOOL_FORMATS[name].syntax
    assert syntax is not None
    found = guidance_with_calls(
        guidance_of_schema(answer),
        ToolUse(TOOLS, "", "auto", parallel=parallel),
        syntax,
        (),
    )
    assert found is not None
    return found


def accepted(guidance: Guidance, text: str) -> bool:
    matcher = COMPILER.compile(guidance)
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


def arguments(name: str) -> st.SearchStrategy[dict[str, Any]]:
    if name == "f":
        return st.fixed_dictionaries({}, optional={"b": st.booleans()})
    return st.fixed_dictionaries({}, optional={"c": st.sampled_from(["</tool_call>", "é"])})


CALLS = st.lists(
    st.sampled_from(["f", "g.h-1"]).flatmap(lambda name: st.tuples(st.just(name), arguments(name))),
    min_size=1,
    max_size=3,
)
GAPS = st.sampled_from(["", " ", "\n"])


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(FORMATS), st.booleans(), CALLS)
def test_calls_are_accepted_and_read_back(
    data: st.DataObject, name: str, parallel: bool, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    syntax = TOOL_FORMATS[name].syntax
    assert syntax is not None
    written = []
    for function, given_arguments in calls:
        body = json.dumps({"name": function, syntax.arguments: given_arguments}, ensure_ascii=False)
        inner = data.draw(GAPS) if syntax.begin else ""
        written.append(f"{syntax.begin}{inner}{body}{inner}{syntax.end}")
    text = f"{data.draw(GAPS)}{syntax.between}".join(written)
    assert accepted(grammar(name, parallel), text) == (parallel or len(calls) == 1), text

    parser = TOOL_FORMATS[name].open(TOOLS)
    events = [*parser.push(text), *parser.finish()]
    assert [one.name for one in events if isinstance(one, CallStarted)] == [one[0] for one in calls]
    said = "".join(one.text for one in events if isinstance(one, CallArguments) and not one.index)
    assert json.loads(said) == calls[0][1]


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_is_accepted_and_is_content(name: str) -> None:
    guidance = grammar(name, True)
    for text in ('{"a": 1}', '{"a":-12}'):
        assert accepted(guidance, text)
        parser = TOOL_FORMATS[name].open(TOOLS)
        events = [*parser.push(text), *parser.finish()]
        assert "".join(one.text for one in events if isinstance(one, Content)) == text


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.recursive(
        st.booleans() | st.integers(-3, 3) | st.just("f"),
        lambda inner: st.dictionaries(
            st.sampled_from(["a", "b", "name", "arguments", "parameters"]), inner, max_size=3
        ),
        max_leaves=4,
    ),
)
def test_other_json_is_refused(name: str, value: Any) -> None:
    syntax = TOOL_FORMATS[name].syntax
    assert syntax is not None
    call = {
        "type": "object",
        "properties": {
            "name": {"const": "f"},
            syntax.arguments: {
                "type": "object",
                "properties": {"b": {"type": "boolean"}},
                "additionalProperties": False,
            },
        },
        "required": ["name", syntax.arguments],
        "additionalProperties": False,
    }
    bare = call if not syntax.begin else False
    wanted = any(jsonschema.Draft202012Validator(one).is_valid(value) for one in (ANSWER, bare))
    # A schema's properties come in its order.
    keys = list(value) if isinstance(value, dict) else []
    if wanted and keys[:2] == [syntax.arguments, "name"]:
        value = {"name": value["name"], syntax.arguments: value[syntax.arguments]}
    assert accepted(grammar(name, True), json.dumps(value)) == wanted


def test_whitespace_is_bounded() -> None:
    guidance = grammar("hermes", True)
    assert accepted(guidance, '{\n  "a": 1\n}')
    assert not accepted(guidance, '{\n\n"a": 1}')
    assert not accepted(guidance, '<tool_call>{"name":    "f", "arguments": {}}</tool_call>')


def test_a_schema_cannot_change_the_options() -> None:
    hostile = ANSWER | {
        "x-guidance": {"whitespace_pattern": ".*", "lenient": True},
        "description": 'x"\nanswer: "free"',
    }
    guidance = grammar("hermes", True, hostile)
    assert accepted(guidance, '{"a": 1}')
    assert not accepted(guidance, "free")
    assert not accepted(guidance, '{     "a": 1}')


def test_a_number_of_the_schema_is_the_answers() -> None:
    """llguidance reads these digits as 1801439850948199.25."""
    guidance = grammar("hermes", True, {"const": 1801439850948199.0})
    assert accepted(guidance, "1801439850948199")
    assert not accepted(guidance, "1801439850948199.3")


def test_special_markers_are_tokens() -> None:
    syntax = TOOL_FORMATS["hermes"].syntax
    assert syntax is not None
    use = ToolUse(TOOLS, "", "auto")
    found = guidance_with_calls(guidance_of_schema(ANSWER), use, syntax, ("<tool_call>",))
    assert found is not None
    assert 'call: <tool_call> SPACE tools SPACE "</tool_call>"' in found.source
