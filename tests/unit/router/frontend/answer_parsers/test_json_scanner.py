"""Finding the end of a JSON value."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.router.frontend.answer_parsers.parsed_answers import calls_of_tools, pieces, sizes

from router.frontend.answer_parsers.json_scanner import JsonScanner


def scanned(text: str, sizes: list[int]) -> tuple[str, bool]:
    """The text of the value that a text begins with, and whether the value has ended."""
    scanner = JsonScanner()
    value = "".join(piece[: scanner.scan(piece, 0)] for piece in pieces(text, sizes))
    return value, scanner.done


@given(calls=calls_of_tools, indent=st.none() | st.just(1), ascii_only=st.booleans(), sizes=sizes)
def test_the_value_is_found(
    calls: object, indent: int | None, ascii_only: bool, sizes: list[int]
) -> None:
    text = json.dumps(calls, indent=indent, ensure_ascii=ascii_only)
    assert scanned(f"{text} ]}}, more", sizes) == (text, True)


@given(text=st.text('{}[]",:\\ 1tn<é\n', max_size=12), sizes=sizes)
def test_the_value_does_not_depend_on_the_cuts(text: str, sizes: list[int]) -> None:
    assert scanned(text, sizes) == scanned(text, [len(text) or 1])


@pytest.mark.parametrize(
    ("text", "value", "done"),
    [
        ("12, 3", "12", True),
        ("-1.5e+3}", "-1.5e+3", True),
        ("12", "12", False),
        ("true{", "true", True),
        ('"a\\"b" c', '"a\\"b"', True),
        ('"a\\', '"a\\', False),
        ('{"a": "}"} {', '{"a": "}"}', True),
        ('{"a": <', '{"a": ', True),
        ("}", "", True),
        ("", "", False),
    ],
)
def test_the_end_is_found(text: str, value: str, done: bool) -> None:
    assert scanned(text, [1]) == scanned(text, [99]) == (value, done)


def test_deep_nesting_needs_no_stack() -> None:
    depth = 10**6
    assert scanned("[" * depth + "]" * depth, [depth]) == ("[" * depth + "]" * depth, True)
