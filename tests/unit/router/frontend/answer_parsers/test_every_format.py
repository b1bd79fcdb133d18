"""Properties that hold for every format and every answer."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from unit.router.frontend.answer_parsers.parsed_answers import (
    FORMATS,
    Call,
    calls_of_tools,
    content,
    may_be_written,
    parsed,
    parsed_any_cut,
    pieces,
    read,
    rendered,
    sizes,
    soup,
    tools_for,
)

from router.frontend.answer_parsers.events import Content
from router.frontend.answer_parsers.formats import TOOL_FORMATS
from router.frontend.answer_parsers.reasoning import (
    REASONING_MARKERS,
    ReasoningMarkers,
    ReasoningSplitter,
)

WEATHER: list[Call] = [("get_weather", {"city": "Oslo"}), ("get_time", {})]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", FORMATS)
@given(calls=calls_of_tools, sizes=sizes)
def test_calls_are_parsed_as_they_were_rendered(
    name: str, calls: list[Call], sizes: list[int]
) -> None:
    assume(may_be_written(name, calls))
    parts = parsed(name, rendered(name, calls), tools_for(calls), sizes)
    assert [kind for kind, *_ in parts] == ["call"] * len(calls)
    assert [(part[1], json.loads(part[2])) for part in parts] == calls


@pytest.mark.parametrize("name", FORMATS)
@given(text=soup, sizes=sizes)
def test_events_do_not_depend_on_the_cuts(name: str, text: str, sizes: list[int]) -> None:
    assert parsed(name, text, (), sizes) == parsed(name, text, (), [len(text) or 1])


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", FORMATS)
@given(calls=calls_of_tools, cut=st.integers(0, 400), more=soup, sizes=sizes)
def test_events_of_damaged_calls_do_not_depend_on_the_cuts(
    name: str, calls: list[Call], cut: int, more: str, sizes: list[int]
) -> None:
    whole = rendered(name, calls)
    text = whole[:cut] + more + whole[cut:]
    assert parsed(name, text, (), sizes) == parsed(name, text, (), [len(text)])


@pytest.mark.parametrize("name", FORMATS)
@given(text=soup)
def test_text_without_a_call_is_not_changed(name: str, text: str) -> None:
    parts = parsed(name, text)
    if all(kind == "content" for kind, *_ in parts) and "<|message|>" not in text:
        assert parts == ([content(text)] if text else [])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "Just an answer.",
        "if a < b { return [1, 2]; } // <tool> & <|x|> [TOOL] ```json\n{}\n```",
        ' {"city": "Oslo", "name": "x"}\n',
        "[1, 2, 3]",
        '[{"name": "Ada"}, {"name": "Bob"}] ',
        "  indented\n",
        '"name": "f"',
    ],
)
def test_prose_is_content(name: str, text: str) -> None:
    assert parsed_any_cut(name, text) == ([content(text)] if text else [])


@pytest.mark.parametrize("name", FORMATS)
def test_prose_is_streamed_at_once(name: str) -> None:
    parser = TOOL_FORMATS[name].open(())
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" there") == [Content(" there")]
    assert parser.finish() == []


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sweep(2)
def test_truncated_calls_do_not_fail(name: str) -> None:
    text = rendered(name, WEATHER)
    for length in range(len(text)):
        parts = parsed_any_cut(name, text[:length], tools_for(WEATHER))
        calls = [part for part in parts if part[0] == "call"]
        for part, (function, arguments) in zip(calls, WEATHER, strict=False):
            assert part[1] == function
            # Half of a marker may end the arguments where a marker ends them.
            streamed = re.sub(r"(\\n)?(<.*)?$", "", part[2])
            assert json.dumps(arguments).startswith(streamed)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "pattern",
    [
        *('{"a":', "[[", "\\", '"', " \n", "<tool_call>", "<function=f>", "[TOOL_CALLS]", "<"),
        *("<|channel|>", "<|channel|>final<|message|>", '{"name": "f", "arguments": {}}', "]}"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<think>", "{", "x"),
    ],
)
def test_the_cost_is_linear_in_the_answer(name: str, pattern: str) -> None:
    call = rendered(name, [("f", {"long": ""})])
    middle = call.index("long") + 4
    body = (pattern * (10_000 // len(pattern)))[:10_000]
    start = time.process_time()
    for text in (body, call[:middle] + body + call[middle:]):
        parser = ReasoningSplitter(TOOL_FORMATS[name].open(()))
        read(parser, pieces(text, [1]))
        parsed(name, text * 10, (), [10**6])
    assert time.process_time() - start < 5


@given(
    name=st.sampled_from(FORMATS),
    markers=st.sampled_from(REASONING_MARKERS),
    text=soup,
    begun=st.booleans(),
    sizes=sizes,
)
def test_reasoning_does_not_depend_on_the_cuts(
    name: str, markers: ReasoningMarkers, text: str, begun: bool, sizes: list[int]
) -> None:
    def parts(sizes: list[int]) -> list[tuple[str, ...]]:
        parser = ReasoningSplitter(TOOL_FORMATS[name].open(()), markers, begun)
        return read(parser, pieces(text, sizes))

    assert parts(sizes) == parts([len(text) or 1])
