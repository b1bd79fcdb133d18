"""Answers for the tests of the parsers: cut into pieces, parsed, and rendered from calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

from hypothesis import strategies as st

from router.frontend.answer_parsers.events import (
    CallArguments,
    CallStarted,
    Content,
    Event,
    Reasoning,
)
from router.frontend.answer_parsers.formats import TOOL_FORMATS
from router.frontend.answer_parsers.parser import AnswerParser

Call = tuple[str, dict[str, Any]]

FORMATS = sorted(TOOL_FORMATS)


def content(text: str) -> tuple[str, ...]:
    """The parsed form of visible text."""
    return ("content", text)


def reasoning(text: str) -> tuple[str, ...]:
    """The parsed form of the model's thinking."""
    return ("reasoning", text)


def call(name: str, arguments: str) -> tuple[str, ...]:
    """The parsed form of a call."""
    return ("call", name, arguments)


def merged(events: Iterable[Event]) -> list[tuple[str, ...]]:
    """Joins the texts of adjacent events. Checks the order and the indices of the calls."""
    parts: list[tuple[str, ...]] = []
    num_calls = 0
    for event in events:
        match event:
            case CallStarted(index, name):
                assert index == num_calls
                num_calls += 1
                parts.append(call(name, ""))
            case CallArguments(index, text):
                assert index == num_calls - 1
                kind, name, before = parts.pop()
                assert kind == "call"
                parts.append(call(name, before + text))
            case Content(text) | Reasoning(text):
                kind = type(event).__name__.lower()
                before = parts.pop()[1] if parts and parts[-1][0] == kind else ""
                parts.append((kind, before + text))
    return parts


def pieces(text: str, sizes: Sequence[int]) -> Iterator[str]:
    """Cuts a text into pieces of the sizes, over and over again."""
    start = 0
    for size in cycle(sizes):
        if start >= len(text):
            return
        yield text[start : start + size]
        start += size


def read(parser: AnswerParser, parts: Iterable[str]) -> list[tuple[str, ...]]:
    """Parses an answer that comes in parts."""
    events = [event for part in parts for event in parser.push(part)]
    return merged(events + parser.finish())


def parsed(
    name: str, text: str, tools: Sequence[dict[str, Any]] = (), sizes: Sequence[int] = (1,)
) -> list[tuple[str, ...]]:
    """Parses an answer in a format."""
    return read(TOOL_FORMATS[name].open(tools), pieces(text, sizes))


def parsed_any_cut(
    name: str, text: str, tools: Sequence[dict[str, Any]] = ()
) -> list[tuple[str, ...]]:
    """Parses an answer, and checks that all ways to cut it in two or into equal pieces agree."""
    whole = parsed(name, text, tools, sizes=[len(text) or 1])
    for size in (1, 2, 3, 5, 8):
        assert parsed(name, text, tools, sizes=[size]) == whole
    for cut in range(1, len(text)):
        assert read(TOOL_FORMATS[name].open(tools), (text[:cut], text[cut:])) == whole
    return whole


def tool(name: str, properties: Mapping[str, object]) -> dict[str, Any]:
    """A tool as OpenAI defines it, with the JSON schemas of its parameters."""
    parameters = {"type": "object", "properties": dict(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}


def tools_for(calls: Iterable[Call]) -> list[dict[str, Any]]:
    """Tools whose schemas have the types of the calls' arguments."""
    return [
        tool(
            name,
            {
                key: {"type": _TYPES.get(type(value), "object") if value is not None else "null"}
                for key, value in arguments.items()
            },
        )
        for name, arguments in calls
    ]


def rendered(name: str, calls: Sequence[Call]) -> str:
    """Writes calls as a model writes them in a format."""
    texts = [(function, json.dumps(values, ensure_ascii=False)) for function, values in calls]
    match name:
        case "hermes":
            return "\n".join(
                f'<tool_call>\n{{"name": "{function}", "arguments": {text}}}\n</tool_call>'
                for function, text in texts
            )
        case "llama3_json":
            return "; ".join(f'{{"name": "{f}", "parameters": {text}}}' for f, text in texts)
        case "json":
            objects = ", ".join(f'{{"arguments": {text}, "name": "{f}"}}' for f, text in texts)
            return f"[{objects}]"
        case "mistral":
            return "".join(f"[TOOL_CALLS]{function}[ARGS]{text}" for function, text in texts)
        case "deepseek_v3":
            inner = "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{function}\n```json\n{text}\n```"
                "<｜tool▁call▁end｜>"
                for function, text in texts
            )
            return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
        case "deepseek_v31":
            inner = "".join(
                f"<｜tool▁call▁begin｜>{function}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
                for function, text in texts
            )
            return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
        case "harmony":
            return "<|start|>assistant".join(
                f"<|channel|>commentary to=functions.{function} <|constrain|>json<|message|>"
                f"{text}<|call|>"
                for function, text in texts
            )
    assert name == "qwen3_coder"
    return "\n".join(map(_rendered_xml, calls))


def _rendered_xml(one_call: Call) -> str:
    function, values = one_call
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
        "</parameter>\n"
        for key, value in values.items()
    )
    return f"<tool_call>\n<function={function}>\n{parameters}</function>\n</tool_call>"


_markers = sorted({marker for one in TOOL_FORMATS.values() for marker in one.markers})
# Tags that end a value of Qwen3-Coder, which has no escapes, or that follow one without an end.
_VALUE_ENDS = ("</parameter>", "<parameter=", "</function>", "</tool_call>")


def may_be_written(name: str, calls: Sequence[Call]) -> bool:
    """Whether the format can express the values of the calls."""
    text = json.dumps(calls, ensure_ascii=False)
    return name != "qwen3_coder" or not any(tag in text for tag in _VALUE_ENDS)


_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(['say "hi"', "C:\\dir\n", "naïve 日本語 🎉", "{[}", "<b>", "null"])
    | st.sampled_from(_markers).map(lambda marker: f"a{marker}\n")
)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
_keys = st.text(st.characters(codec="utf-8", exclude_characters="<>\n"), min_size=1, max_size=8)
_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,12}", fullmatch=True)

calls_of_tools: st.SearchStrategy[list[Call]] = st.lists(
    st.tuples(_names, st.dictionaries(_keys, _values, max_size=4)),
    min_size=1,
    max_size=4,
    unique_by=lambda one_call: one_call[0],
)

_fragments = st.sampled_from(
    [
        *_markers,
        *("<function=f>", "<function=", "</function>", "<parameter=k>", "</parameter>"),
        *(
            '{"name": "f", "arguments": {',
            '{"name": "f"',
            '"arguments": ',
            '"parameters": {"a": 1}',
        ),
        *('{"arguments": {}, "name": "g"}', '{"name": "f", "parameters": {"x": "y"}}', '"name"'),
        *(
            "analysis",
            "final",
            "commentary to=functions.f",
            "json",
            "assistant",
            "```json\n",
            "```",
        ),
        *("<think>", "</think>", "[THINK]", "[/THINK]", "name", "f", " ", "\n", "\\", '"', "null"),
        *(
            "{",
            "}",
            "[",
            "]",
            ":",
            ",",
            ";",
            "<",
            ">",
            "<tool",
            "<｜tool▁call",
            "<|",
            "1",
            "é",
            ".",
        ),
        *("Hello there.", "to=", "function", "{}", "}}", "true", '"\\"', "\\u00e9", "\t"),
    ]
)
soup = st.lists(_fragments | st.text(max_size=3), max_size=24).map("".join)
sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)
