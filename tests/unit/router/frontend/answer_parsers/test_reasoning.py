"""Splitting the model's thinking from the rest of an answer."""

from __future__ import annotations

import pytest
from unit.router.frontend.answer_parsers.parsed_answers import call, content, read, reasoning

from router.frontend.answer_parsers.events import Content, Reasoning
from router.frontend.answer_parsers.hermes import HermesParser
from router.frontend.answer_parsers.reasoning import (
    BRACKET_THINK,
    THINK,
    ReasoningSplitter,
    reasoning_markers_of,
)

CALL = '<tool_call>{"name": "f", "arguments": {"a": "<think>b</think>"}}</tool_call>'
PARSED_CALL = call("f", '{"a": "<think>b</think>"}')

ANSWERS = {
    "thinking and content": (
        "<think>\nHm, 1 < 2.\n</think>\n\nYes.",
        False,
        [reasoning("Hm, 1 < 2.\n"), content("Yes.")],
    ),
    "no thinking": ("\nYes. <think>", False, [content("\nYes. <think>")]),
    "empty thinking": ("<think>\n\n</think>\n\nYes.", False, [content("Yes.")]),
    "thinking and a call": (f"<think>a</think>\n{CALL}", False, [reasoning("a"), PARSED_CALL]),
    "a call only": (CALL, False, [PARSED_CALL]),
    "begun": ("\nHm.</think>Yes.", True, [reasoning("Hm."), content("Yes.")]),
    "begun and repeated": ("<think>\nHm.</think>Yes.", True, [reasoning("Hm."), content("Yes.")]),
    "begun without an end": (f"Hm. </th {CALL[:11]}", True, [reasoning("Hm. </th <tool_call>")]),
    "a later marker": ("Hi <think>a</think>", False, [content("Hi <think>a</think>")]),
    "half a marker": ("<thi", False, [content("<thi")]),
    "nothing": ("", True, []),
}


@pytest.mark.parametrize(("answer", "begun", "parts"), ANSWERS.values(), ids=ANSWERS)
def test_answers_are_split(answer: str, begun: bool, parts: list[tuple[str, ...]]) -> None:
    for cut in range(len(answer) + 1):
        parser = ReasoningSplitter(HermesParser(()), begun=begun)
        assert read(parser, (answer[:cut], answer[cut:])) == parts
    assert read(ReasoningSplitter(HermesParser(()), begun=begun), answer) == parts


def test_without_a_parser_the_rest_is_content() -> None:
    parser = ReasoningSplitter(markers=BRACKET_THINK)
    assert parser.push("[THINK]Hm.[/TH") == [Reasoning("Hm.")]
    assert parser.push("INK] <tool_call>") == [Content("<tool_call>")]
    assert parser.push("{}") == [Content("{}")]
    assert parser.finish() == []


def test_markers_are_found_in_templates_and_prompts() -> None:
    assert reasoning_markers_of("{{ content.split('</think>')[-1] }}") == THINK
    assert reasoning_markers_of("[THINK]{{ x }}[/THINK]") == BRACKET_THINK
    assert reasoning_markers_of("{{ messages }}") is None
    assert THINK.begun("<|im_start|>assistant\n<think>\n")
    assert not THINK.begun("<|im_start|>assistant\n<think>\n\n</think>\n\n")
