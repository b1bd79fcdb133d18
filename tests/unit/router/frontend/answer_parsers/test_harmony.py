"""Answers of gpt-oss."""

from __future__ import annotations

import pytest
from unit.router.frontend.answer_parsers.parsed_answers import (
    call,
    content,
    parsed_any_cut,
    reasoning,
)

from router.frontend.answer_parsers.events import CallArguments, CallStarted
from router.frontend.answer_parsers.harmony import HarmonyParser

START = "<|start|>assistant"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"

ANSWERS = {
    "reasoning and content": (
        "<|channel|>analysis<|message|>A greeting.\n<|end|>"
        f"{START}<|channel|>final<|message|>Hello, < 2 |>!<|return|>",
        [reasoning("A greeting.\n"), content("Hello, < 2 |>!")],
    ),
    "reasoning and a call": (
        f"<|channel|>analysis<|message|>Look it up.<|end|>{START}<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city":"Zürich \\"<b>\\""}<|call|>',
        [reasoning("Look it up."), call("get_weather", '{"city":"Zürich \\"<b>\\""}')],
    ),
    "the recipient before the channel": (
        ' to=functions.f<|channel|>commentary json<|message|>{"a":1}',
        [call("f", '{"a":1}')],
    ),
    "a preamble and two calls": (
        f"<|channel|>commentary<|message|>I check both.<|end|>{START}<|channel|>commentary "
        f"to=functions.a<|constrain|>json<|message|>{{}}<|call|>{START} to=functions.b<|channel|>"
        'commentary code<|message|>{\n"x": {}\n}<|call|>',
        [content("I check both."), call("a", "{}"), call("b", '{\n"x": {}\n}')],
    ),
    "a call without arguments": (
        "<|channel|>commentary to=functions.f<|message|><|call|>",
        [call("f", "{}")],
    ),
    "a tool without a namespace": (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        [call("python", "print(1)")],
    ),
    "markers in strings of arguments": (
        f'{CALL}{{"a": "<|call|>"}}<|call|>{START}{CALL}{{"b": "<|channel|>\\""}}<|return|>',
        [call("f", '{"a": "<|call|>"}'), call("f", '{"b": "<|channel|>\\""}')],
    ),
    "text after the object": (f'{CALL} {{"a": 1}}; "<|call|>', [call("f", ' {"a": 1}; "')]),
    "no end between messages": (
        "<|channel|>analysis<|message|>So.<|channel|>final<|message|>Yes.",
        [reasoning("So."), content("Yes.")],
    ),
    "no channel": ("<|message|>Hi.<|return|>\n", [content("Hi.")]),
    "no messages": ("Hello <|end|> there", [content("Hello <|end|> there")]),
    "prose before a message": (
        "Hm. <|channel|>final<|message|>Hi.",
        [content("Hm. Hi.")],
    ),
    "truncated in a header": ("<|channel|>commentary to=func",) * 2,
    "truncated in arguments": (
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "b',
        [call("f", '{"a": "b')],
    ),
    "a malformed header": ("<|channel|>not (a) header<|message|>x<|end|>",) * 2,
}


@pytest.mark.parametrize(("answer", "parts"), ANSWERS.values(), ids=ANSWERS)
def test_answers_are_parsed(answer: str, parts: list[tuple[str, ...]] | str) -> None:
    if isinstance(parts, str):
        parts = [content(parts)]
    assert parsed_any_cut("harmony", answer) == parts


def test_calls_are_streamed() -> None:
    parser = HarmonyParser(())
    assert parser.push("<|channel|>commentary to=functions.f <|constrain|>json") == []
    assert parser.push("<|message|>") == [CallStarted(0, "f")]
    assert parser.push('{"a":') == [CallArguments(0, '{"a":')]
    assert parser.push(" 1}<|ca") == [CallArguments(0, " 1}")]
    assert parser.push("ll|>") == parser.finish() == []
