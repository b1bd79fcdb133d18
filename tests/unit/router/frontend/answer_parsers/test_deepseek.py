"""Answers of DeepSeek's models."""

from __future__ import annotations

import pytest
from unit.router.frontend.answer_parsers.parsed_answers import call, content, parsed_any_cut

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

ANSWERS = {
    "calls in code fences": (
        f'Let me see.{BEGIN}{CALL}function{SEPARATOR}get_weather\n```json\n{{"city": "Tōkyō"}}\n'
        f"```{CALL_END}\n{CALL}function{SEPARATOR}get_time\n```json\n{{}}\n```{CALL_END}{END}\n",
        [content("Let me see."), call("get_weather", '{"city": "Tōkyō"}'), call("get_time", "{}")],
    ),
    "calls without code fences": (
        f'{BEGIN}{CALL}f{SEPARATOR}{{"x":{{"y":"\\"}}"}}}}{CALL_END}{CALL}g{SEPARATOR}{{}}{CALL_END}'
        f"{END} and more",
        [call("f", '{"x":{"y":"\\"}"}}'), call("g", "{}"), content(" and more")],
    ),
    "arguments over several lines": (
        f'{BEGIN}{CALL}function{SEPARATOR}f\n```json\n{{\n  "a": "```"\n}}\n```{CALL_END}{END}',
        [call("f", '{\n  "a": "```"\n}')],
    ),
    "no marker before the first call": (
        f"{CALL}function{SEPARATOR}f\n```json\n{{}}\n```{CALL_END}",
        [call("f", "{}")],
    ),
    "no marker before a call": (
        f'{BEGIN}f{SEPARATOR}{{"x":1}}{END}',
        [content(f'{BEGIN}f{SEPARATOR}{{"x":1}}{END}')],
    ),
    "truncated in the name": (f"Hm.{BEGIN}{CALL}function{SEPARATOR}ge",) * 2,
    "truncated in the arguments": (
        f'{BEGIN}{CALL}function{SEPARATOR}f\n```json\n{{"a": [1, ',
        [call("f", '{"a": [1, ')],
    ),
    "unclosed arguments": (
        f'{BEGIN}{CALL}function{SEPARATOR}f\n```json\n{{"a": 1\n```{CALL_END}{END} end',
        [call("f", '{"a": 1\n'), content(" end")],
    ),
    "no arguments": (f"{BEGIN}{CALL}f{SEPARATOR}text{CALL_END}",) * 2,
    "no calls": (f"{BEGIN}{END}",) * 2,
}


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31"])
@pytest.mark.parametrize(("answer", "parts"), ANSWERS.values(), ids=ANSWERS)
def test_answers_are_parsed(name: str, answer: str, parts: list[tuple[str, ...]] | str) -> None:
    if isinstance(parts, str):
        parts = [content(parts)]
    assert parsed_any_cut(name, answer) == parts
