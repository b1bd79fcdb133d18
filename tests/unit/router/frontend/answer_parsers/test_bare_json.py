"""Answers of Llama 3, and of models that write plain JSON."""

from __future__ import annotations

import pytest
from unit.router.frontend.answer_parsers.parsed_answers import call, content, parsed_any_cut, tool

from router.frontend.answer_parsers.bare_json import BareJsonParser
from router.frontend.answer_parsers.events import CallArguments, CallStarted, Content

ANSWERS = {
    "one call": (
        '{"name": "search", "parameters": {"q": "a {b} [c] \\"d\\"", "n": {"m": []}}}',
        [call("search", '{"q": "a {b} [c] \\"d\\"", "n": {"m": []}}')],
    ),
    "calls after a semicolon": (
        '{"name": "a", "parameters": {"q": "é"}} ; {"name": "b", "arguments": {}};'
        '{"name": "c", "parameters": {}}\n',
        [call("a", '{"q": "é"}'), call("b", "{}"), call("c", "{}")],
    ),
    "calls on lines": (
        '\n{"name": "a", "parameters": {}}\n{"name": "b", "parameters": {}}',
        [call("a", "{}"), call("b", "{}")],
    ),
    "a list": (
        '[{"name": "a", "arguments": {"x": 1}}, {"arguments": {}, "name": "b"}]',
        [call("a", '{"x": 1}'), call("b", "{}")],
    ),
    "a type": ('{"type": "function", "name": "f", "parameters": {}}', [call("f", "{}")]),
    "the arguments first": (
        '{"parameters": {"name": "x"}, "name": "f"}',
        [call("f", '{"name": "x"}')],
    ),
    "the tag": (
        'I look.<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g"}',
        [content("I look."), call("f", '{"a": 1}'), content('{"name": "g"}')],
    ),
    "a call without arguments after the tag": (
        '<|python_tag|> {"name": "f"}',
        [call("f", "{}")],
    ),
    "code after the tag": ('<|python_tag|>brave_search.call(query="x")',) * 2,
    "a call and prose": (
        '{"name": "f", "parameters": {}} I used {f}.',
        [call("f", "{}"), content(" I used {f}.")],
    ),
    "JSON in prose": ('So: {"name": "f", "parameters": {}}',) * 2,
    "JSON with other keys": (' {"name": "Ada", "born": 1815}',) * 2,
    "JSON without arguments": ('{"name": "Ada"}\n',) * 2,
    "JSON without a name": ('{"parameters": {}}',) * 2,
    "arguments that are not an object": ('{"name": "f", "parameters": [1]}',) * 2,
    "a list of other things": ('[{"name": "Ada"}, {"name": "Bob"}]',) * 2,
    "truncated before the arguments": ('{"name": "f", "parameters": ',) * 2,
    "truncated in the arguments": (
        '{"name": "f", "parameters": {"a": tr',
        [call("f", '{"a": tr')],
    ),
}


@pytest.mark.parametrize("name", ["llama3_json", "json"])
@pytest.mark.parametrize(("answer", "parts"), ANSWERS.values(), ids=ANSWERS)
def test_answers_are_parsed(name: str, answer: str, parts: list[tuple[str, ...]] | str) -> None:
    if isinstance(parts, str):
        parts = [content(parts)]
    assert parsed_any_cut(name, answer) == parts


@pytest.mark.parametrize("name", ["llama3_json", "json"])
def test_names_of_no_tool_are_no_calls(name: str) -> None:
    text = '{"name": "Ada", "parameters": {}}'
    assert parsed_any_cut(name, text, [tool("f", {})]) == [content(text)]
    assert parsed_any_cut(name, text, [tool("Ada", {})]) == [call("Ada", "{}")]
    tagged = f"<|python_tag|>{text}"
    assert parsed_any_cut(name, tagged, [tool("f", {})]) == [call("Ada", "{}")]


def test_json_answers_are_streamed_from_their_first_other_key() -> None:
    parser = BareJsonParser(())
    assert parser.push('{"city":') == [Content('{"city":')]
    assert parser.push(' "Oslo"') == [Content(' "Oslo"')]


def test_calls_are_announced_when_the_arguments_begin() -> None:
    parser = BareJsonParser(())
    assert parser.push('{"name": "f", "parameters":') == []
    assert parser.push("{")[0] == CallStarted(0, "f")
    assert parser.push('"a"') == [CallArguments(0, '"a"')]
