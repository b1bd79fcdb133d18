"""Answers of Hermes and Qwen models."""

from __future__ import annotations

import pytest
from unit.router.frontend.answer_parsers.parsed_answers import call, content, parsed_any_cut

from router.frontend.answer_parsers.events import CallArguments, CallStarted, Content
from router.frontend.answer_parsers.hermes import HermesParser

ANSWERS = {
    "one call": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        [call("get_weather", '{"city": "Oslo"}')],
    ),
    "prose and two calls": (
        'I look it up.\n\n<tool_call>{"name": "a", "arguments": {"n": [1, {"m": 2}]}}</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>\n',
        [content("I look it up.\n\n"), call("a", '{"n": [1, {"m": 2}]}'), call("b", "{}")],
    ),
    "prose between and after calls": (
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>\nand\n'
        '<tool_call>{"name": "b", "arguments": {}}</tool_call>\nDone.',
        [call("a", "{}"), content("\nand\n"), call("b", "{}"), content("\nDone.")],
    ),
    "arguments before the name": (
        '<tool_call>{"arguments": {"name": "not this", "x": "}"}, "id": 7, "name": "f"}',
        [call("f", '{"name": "not this", "x": "}"}')],
    ),
    "escapes, unicode and markers in strings": (
        '<tool_call>{"name": "say", "arguments": {"t": "\\"</tool_call>\\" é 日本 🎉 \\\\"}}'
        "</tool_call>",
        [call("say", '{"t": "\\"</tool_call>\\" é 日本 🎉 \\\\"}')],
    ),
    "whitespace is kept in the arguments": (
        '<tool_call>{ "name" : "f" , "arguments" : { "a" :\n1 } }</tool_call>',
        [call("f", '{ "a" :\n1 }')],
    ),
    "an escaped name": (
        '<tool_call>{"name": "gr\\u00fc\\u00df", "arguments": {}}</tool_call>',
        [call("grüß", "{}")],
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', [call("f", "{}")]),
    "null arguments": (
        '<tool_call>{"name": "f", "arguments": null}</tool_call>',
        [call("f", "{}")],
    ),
    "arguments in a string": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\u00e9\\"}"}</tool_call>',
        [call("f", '{"a": "\\u00e9"}')],
    ),
    "arguments that are a text": (
        '<tool_call>{"name": "f", "arguments": "hello"}</tool_call>',
        [call("f", '"hello"')],
    ),
    "no end marker": ('<tool_call>{"name": "f", "arguments": {}}', [call("f", "{}")]),
    "no closing brace": (
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>',
        [call("f", '{"a": 1}')],
    ),
    "truncated before the name": (
        'Hm. <tool_call>\n{"name": "get_wea',
        [content('Hm. <tool_call>\n{"name": "get_wea')],
    ),
    "truncated after the name": ('<tool_call>{"name": "f", "argum', [call("f", "")]),
    "truncated in the arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        [call("f", '{"a": "b')],
    ),
    "truncated before the name, after the arguments": (
        '<tool_call>{"arguments": {"a": 1}, "na',
        [content('<tool_call>{"arguments": {"a": 1}, "na')],
    ),
    "arguments that are not JSON": (
        '<tool_call>{"name": "f", "arguments": {"a": <b>}}</tool_call> ok',
        [call("f", '{"a": '), content("<b>}}</tool_call> ok")],
    ),
    "no JSON": (
        "<tool_call>get_weather</tool_call> then",
        [content("<tool_call>get_weather</tool_call> then")],
    ),
    "a call after a malformed call": (
        '<tool_call>{"name": \n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        [content('<tool_call>{"name": \n'), call("f", "{}")],
    ),
    "a call after a marker": (
        '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        [content("<tool_call>"), call("f", "{}")],
    ),
    "a name that is not a string": (
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        [content('<tool_call>{"name": 1, "arguments": {}}</tool_call>')],
    ),
    "a name that is not Unicode": (
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        [content('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>')],
    ),
    "no name": (
        '<tool_call>{"arguments": {}}</tool_call>',
        [content('<tool_call>{"arguments": {}}</tool_call>')],
    ),
}


@pytest.mark.parametrize(("answer", "parts"), ANSWERS.values(), ids=ANSWERS)
def test_answers_are_parsed(answer: str, parts: list[tuple[str, ...]]) -> None:
    assert parsed_any_cut("hermes", answer) == parts


def test_calls_are_streamed() -> None:
    parser = HermesParser(())
    assert parser.push("Hi <") == [Content("Hi ")]
    assert parser.push("b> <tool_call>\n") == [Content("<b> ")]
    assert parser.push('{"name": "f') == []
    assert parser.push('"') == [CallStarted(0, "f")]
    assert parser.push(', "arguments": {"a": "b') == [CallArguments(0, '{"a": "b')]
    assert parser.push("c") == [CallArguments(0, "c")]
    assert parser.push('"}}\n</tool') == [CallArguments(0, '"}')]
    assert parser.push("_call>") == parser.finish() == []
