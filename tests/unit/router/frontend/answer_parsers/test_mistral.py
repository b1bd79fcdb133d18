"""Answers of Mistral's models."""

from __future__ import annotations

import pytest
from unit.router.frontend.answer_parsers.parsed_answers import call, content, parsed_any_cut

ANSWERS = {
    "a list": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3.5, "b": 4}}, '
        '{"name": "get_time", "arguments": {}, "id": "a1b2c3d4e"}]',
        [call("add", '{"a": 3.5, "b": 4}'), call("get_time", "{}")],
    ),
    "a list with arguments before the name": (
        'Hello[TOOL_CALLS]  [ {"arguments" : {"name": "Ada"}, "name":"get_age" } ]\n',
        [content("Hello"), call("get_age", '{"name": "Ada"}')],
    ),
    "an object": ('[TOOL_CALLS]{"name": "f", "arguments": {}}', [call("f", "{}")]),
    "a list and prose": (
        '[TOOL_CALLS][{"name": "f", "arguments": {}}]\nThat was all.',
        [call("f", "{}"), content("\nThat was all.")],
    ),
    "names and arguments": (
        'so [TOOL_CALLS]add{"a": 1}[TOOL_CALLS]sub-two[ARGS]{"b": {"c": []}}',
        [content("so "), call("add", '{"a": 1}'), call("sub-two", '{"b": {"c": []}}')],
    ),
    "ids of calls": (
        '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"q": "ü[TOOL_CALLS]"}',
        [call("f", '{"q": "ü[TOOL_CALLS]"}')],
    ),
    "prose with brackets": ("a[0] [TOOL] {x} [", [content("a[0] [TOOL] {x} [")]),
    "truncated arguments": (
        'hi{hi[TOOL_CALLS]bash{"command": "print(\\"x\\")\\n{}',
        [content("hi{hi"), call("bash", '{"command": "print(\\"x\\")\\n{}')],
    ),
    "no arguments": ("[TOOL_CALLS]get_time", [content("[TOOL_CALLS]get_time")]),
    "no JSON": ("[TOOL_CALLS] not json at all", [content("[TOOL_CALLS] not json at all")]),
    "an empty list": ("[TOOL_CALLS] [] ", [content("[TOOL_CALLS] [] ")]),
    "a list that ends early": (
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"x": 1}] end',
        [call("f", "{}"), content('{"x": 1}] end')],
    ),
}


@pytest.mark.parametrize(("answer", "parts"), ANSWERS.values(), ids=ANSWERS)
def test_answers_are_parsed(answer: str, parts: list[tuple[str, ...]]) -> None:
    assert parsed_any_cut("mistral", answer) == parts
