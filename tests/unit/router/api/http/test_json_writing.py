"""Bounds on what is written as JSON: right, and found without work on what is beyond them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidArgument
from router.api.http.dialects.anthropic.requests import parse_messages
from router.api.http.dialects.openai.requests import parse_chat, parse_completion
from router.api.http.dialects.responses.requests import parse_response
from router.api.http.json_writing import has_more_values, is_longer, written

USER = [{"role": "user", "content": "hello"}]
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=5), inner, max_size=6)
    ),
    max_leaves=40,
)


class Untouchable(list[Any]):
    """A list whose entries nobody may look at."""

    def __iter__(self) -> Any:
        raise AssertionError("its length tells enough")


@given(values, st.integers(0, 200))
def test_a_longer_text_is_longer_in_any_way_of_writing_it(value: Any, most: int) -> None:
    shortest = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if is_longer(value, most):
        assert len(shortest) > most
        assert written(value, most) is None
    else:
        # Floats and escapes are what is counted with fewer characters than they have.
        assert len(json.dumps(value)) <= 24 * most
    text = written(value, most)
    assert (text is None) == (len(json.dumps(value, ensure_ascii=False)) > most)
    assert text is None or json.loads(text) == value


def test_what_is_beyond_the_bound_is_not_looked_at() -> None:
    long = Untouchable([0] * 1000)
    assert is_longer({"enum": long}, 1000)
    assert is_longer([[], {"a": long}], 1000)
    assert has_more_values({"enum": long}, 900)
    assert not has_more_values({"a": [[1, 2], {"b": "x" * 5000}]}, 6)
    assert has_more_values({"a": [[1, 2], {"b": "x" * 5000}]}, 5)


LONG: dict[str, Any] = {"type": "object", "enum": [0] * 300_000}
FUNCTION = {"name": "f", "parameters": LONG}
FORMAT = {"type": "json_schema", "schema": LONG}
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": LONG}
NAMED = {"type": "json_schema", "json_schema": {"schema": LONG}}


@pytest.mark.parametrize(
    ("parse", "body", "field"),
    [
        (parse_chat, {"response_format": NAMED}, "response_format"),
        (parse_chat, {"structured_outputs": {"json": LONG}}, "structured_outputs"),
        (parse_chat, {"tools": [{"type": "function", "function": FUNCTION}]}, "tools"),
        (parse_chat, {"chat_template_kwargs": LONG}, "chat_template_kwargs"),
        (parse_completion, {"structured_outputs": {"json": LONG}}, "structured_outputs"),
        (parse_completion, {"structured_outputs": {"json": "[" * 65_537}}, "structured_outputs"),
        (parse_completion, {"structured_outputs": {"choice": ["x" * 99] * 999}}, "structured_outp"),
        (parse_messages, {"output_config": {"format": FORMAT}}, "output_config"),
        (parse_messages, {"output_format": FORMAT}, "output_format"),
        (parse_messages, {"tools": [{"name": "f", "input_schema": LONG}]}, "tools"),
        (parse_messages, {"messages": [{"role": "assistant", "content": [CALL]}, *USER]}, "mess"),
        (parse_response, {"text": {"format": FORMAT}}, "text"),
        (parse_response, {"tools": [{"type": "function", **FUNCTION}]}, "tools"),
    ],
)
def test_long_values_are_refused_unwritten(
    monkeypatch: pytest.MonkeyPatch, parse: Any, body: dict[str, Any], field: str
) -> None:
    def never(*_: Any, **__: Any) -> str:
        raise AssertionError("it was written as JSON")

    small: dict[Any, dict[str, Any]] = {
        parse_chat: {"messages": USER},
        parse_completion: {"prompt": "hello"},
        parse_messages: {"messages": USER, "max_tokens": 1},
        parse_response: {"input": "hello"},
    }
    monkeypatch.setattr("json.dumps", never)
    with pytest.raises(InvalidArgument, match="more than") as refused:
        parse(small[parse] | body)
    assert refused.value.field is not None
    assert refused.value.field.startswith(field)


def test_the_longest_values_are_taken() -> None:
    longest = '"' + "x" * (2**16 - 2) + '"'
    taken = parse_completion({"prompt": "a", "structured_outputs": {"json": longest}})
    guidance = taken.requests[0].sampling.guidance
    assert guidance is not None
    assert guidance.source == longest
    variables = {"a": "x" * (4096 - len('{"a": ""}'))}
    assert parse_chat({"messages": USER, "chat_template_kwargs": variables}).chat
