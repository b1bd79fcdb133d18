"""The parser of bodies: what json.loads says, with distinct keys and bounds, at a cost that is
linear.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile_requests import HTTP_BODIES

import router.api.http.json_parser
from kvrelay.errors import InvalidArgument
from router.api.http.json_parser import MAX_DEPTH, MAX_NUMBER, json_steps

SIZES = (2**15, 2**16, 2**17, 2**18)


def parsed(body: bytes, part: int = 2**22) -> tuple[Any, list[int]]:
    """The value, and the cost of each step; the error's text for a body that is refused."""
    parts = deque(body[start : start + part] for start in range(0, len(body), part))
    steps, costs = json_steps(parts), []
    while True:
        try:
            costs.append(next(steps))
        except StopIteration as end:
            return end.value, costs
        except InvalidArgument as error:
            return error.message, costs


def reference(text: str) -> Any:
    """By json.loads; None for what is refused."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    def none(name: str) -> None:
        raise AssertionError(name)

    try:
        return {"value": json.loads(text, object_pairs_hook=distinct, parse_constant=none)}
    except (ValueError, AssertionError):
        return None


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)
# Pieces of JSON in an order that makes sense now and then.
_pieces = st.lists(
    st.sampled_from(
        [
            *(
                "{",
                "}",
                "[",
                "]",
                ",",
                ":",
                '"a"',
                '"b"',
                '"',
                "\\",
                "1",
                "-",
                "0",
                ".",
                "e",
                "true",
                "null",
                " ",
                "\n",
            ),
            *(
                "1,2,3",
                "[1,2]",
                '{"a":1}',
                "\\u0041",
                "\\ud83d\\ude00",
                "\\ud83d",
                "\t",
                "\x01",
                "é",
                "1.5e3",
                "NaN",
            ),
        ]
    ),
    max_size=12,
).map("".join)


@given(_values, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_what_is_written_is_read(value: Any, ascii_only: bool, indent: int | str | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert parsed(text.encode(errors="replace"))[0] == json.loads(text.encode(errors="replace"))


@given(_pieces)
def test_what_json_refuses_is_refused_and_nothing_else_is(text: str) -> None:
    expected = reference(text)
    if expected is None:
        with pytest.raises(InvalidArgument, match="valid JSON" if text else "the body is empty"):
            sum(json_steps(deque([text.encode()])))
    else:
        for part in (1, 2, 3, 1000):
            assert parsed(text.encode(), part)[0] == expected["value"]


@given(
    st.text(
        alphabet=st.characters(exclude_categories=("Cs",)) | st.sampled_from('\\"\n\x1f\ud83d'),
        max_size=60,
    )
)
def test_long_strings_are_read_in_pieces_that_cut_nothing(piece: str) -> None:
    for text in (
        json.dumps(piece),
        json.dumps(piece * (2**15 // max(1, len(piece)))),
        json.dumps("x" * 1000 + piece),
    ):
        assert parsed(text.encode())[0] == json.loads(text)


@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize("number", [2, 100, 3000])
def test_a_key_that_stands_twice_is_told_at_every_level(depth: int, number: int) -> None:
    keys = ",".join([*(f'"{one}":1' for one in range(number)), '"0":2'])
    text = '[{"a":' * depth + "{" + keys + "}" + "}]" * depth
    assert parsed(text.encode())[0] == "the body is not valid JSON: the key '0' is repeated"


@pytest.mark.parametrize("half", ["d800", "dbff", "dc00", "dfff"])
@pytest.mark.parametrize("text", ['{{"{0}":1}}', '[{{"a":{{"b{0}c":[]}}}}]'])
def test_a_key_with_half_of_a_pair_is_refused(text: str, half: str) -> None:
    told = parsed(text.format(f"\\u{half}").encode())[0]
    assert told.endswith("has half of a surrogate pair")
    assert parsed(text.format("\\ud83d\\ude00").encode())[0] != told


def test_depth_and_numbers_are_bounded() -> None:
    assert parsed(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)[0] != ""
    assert "nested too deeply" in parsed(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))[0]
    assert "nested too deeply" in parsed(b'{"a":' * MAX_DEPTH + b"{}" + b"}" * MAX_DEPTH)[0]
    assert parsed(b"1" * MAX_NUMBER)[0] == int("1" * MAX_NUMBER)
    assert "characters" in parsed(b"1" * (MAX_NUMBER + 1))[0]
    assert "not UTF-8" in parsed(b'"\xed\xa0\x80"')[0]


def test_numbers_of_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.api.http.json_parser, "MAX_INTEGERS", 2000)
    monkeypatch.setattr(router.api.http.json_parser, "MAX_VALUES", 500)
    assert parsed(json.dumps([1] * 2000).encode())[0] == [1] * 2000
    assert "too many values" in parsed(json.dumps([1] * 2100).encode())[0]
    assert "too many values" in parsed(json.dumps([[1] * 1000] * 3).encode())[0]
    assert "too many values" in parsed(json.dumps([{}] * 501).encode())[0]
    assert "too many values" in parsed(json.dumps({str(one): "" for one in range(600)}).encode())[0]


@pytest.mark.parametrize("name", HTTP_BODIES)
@pytest.mark.sweep(4)
def test_the_cost_is_linear_and_no_step_is_long(name: str) -> None:
    for size in SIZES:
        body = HTTP_BODIES[name][1](size)
        _, costs = parsed(body)
        assert sum(costs) <= 80 * len(body) + 5000
        assert max(costs, default=0) <= 2**16
