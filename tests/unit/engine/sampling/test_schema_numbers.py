"""The numbers of a schema: an answer has the very number that the schema has."""

from __future__ import annotations

import json
from functools import cache

import llguidance
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.guided_model import DEMO, EOS, VOCAB

from kvrelay.engine.sampling.grammar import GrammarCompiler
from kvrelay.engine.sampling.schema_numbers import check_values, exact_integer, with_exact_numbers
from kvrelay.errors import InvalidArgument
from kvrelay.types.requests import Guidance

floats = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-1000, 1000),
    st.integers(-(2**53), 2**53).map(float),
)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(str(DEMO), VOCAB, frozenset({EOS}))


def only_answer(schema: str) -> str:
    """Returns the text that a schema prescribes."""
    matcher: llguidance.LLMatcher = compiler().compile(Guidance("json_schema", schema))
    return bytes(matcher.compute_ff_bytes()).decode()


@given(floats)
@example(1801439850948199.0)
@example(0.9097462559682401)
@example(-0.0)
@example(5e-324)
@example(1.7976931348623157e308)
def test_an_answer_has_the_number_of_the_schema(value: float) -> None:
    schema = {"const": value}
    try:
        check_values(schema)
    except ValueError:
        with pytest.raises(InvalidArgument, match="cannot be read exactly"):
            only_answer(json.dumps(schema))
    else:
        assert float(only_answer(json.dumps(schema))) == value


# No other digits stand for this float, either.
UNREADABLE = 0.0038439286355546652


def test_nearly_all_numbers_can_be_prescribed() -> None:
    refused = 0
    for number in range(1, 1000):
        try:
            check_values({"enum": [number / 7**15]})
        except ValueError:
            refused += 1
    assert refused <= 5


@pytest.mark.parametrize("keyword", ["default", "examples", "maximum"])
def test_a_number_that_prescribes_no_answer_may_be_any(keyword: str) -> None:
    value = [UNREADABLE] if keyword == "examples" else UNREADABLE
    schema = json.dumps({"type": "number", keyword: value})
    assert with_exact_numbers(schema) == schema
    compiler().compile(Guidance("json_schema", schema))


@pytest.mark.parametrize(
    ("schema", "is_prescribed"),
    [
        ({"default": {"const": UNREADABLE}}, False),
        ({"examples": [{"enum": [UNREADABLE]}]}, False),
        ({"properties": {"default": {"const": UNREADABLE}}}, True),
        ({"const": {"default": UNREADABLE}}, True),
        ({"enum": [{"properties": {"x": UNREADABLE}}]}, True),
    ],
)
def test_a_number_is_prescribed_where_an_answer_must_have_it(
    schema: object, is_prescribed: bool
) -> None:
    if is_prescribed:
        with pytest.raises(ValueError, match="cannot be read exactly"):
            check_values(schema)
    else:
        check_values(schema)


def test_a_part_may_have_the_name_of_a_keyword() -> None:
    part = {"type": "number", "minimum": UNREADABLE}
    compiler().compile(Guidance("json_schema", json.dumps({"properties": {"const": part}})))


def test_a_number_that_an_answer_cannot_have_is_refused() -> None:
    for schema in ({"const": UNREADABLE}, {"properties": {"a": {"enum": [1, [-UNREADABLE]]}}}):
        with pytest.raises(InvalidArgument, match="cannot be read exactly; use fewer digits"):
            compiler().compile(Guidance("json_schema", json.dumps(schema)))


def test_the_cost_of_a_schema_is_bounded() -> None:
    hard = [
        one / 7**15
        for one in range(1, 9000)
        if with_exact_numbers(str(one / 7**15)) != str(one / 7**15)
    ]
    with_exact_numbers(json.dumps(hard[:900]))
    with pytest.raises(ValueError, match="more than 1000 numbers"):
        with_exact_numbers(json.dumps([*hard, *hard, *hard]))


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text('1.5e"\\ -'),
    st.integers(-(10**9), 10**9).map(lambda one: one / 64),
)
values = st.recursive(
    scalars, lambda one: st.one_of(st.lists(one), st.dictionaries(st.text('1.5"\\'), one))
)


@given(values, st.booleans())
def test_all_else_stays(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert json.loads(with_exact_numbers(text)) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.50", "1.50"),
        ("-2e3", "-2e3"),
        ("12", "12"),
        ('"0.9097462559682401"', '"0.9097462559682401"'),
        ("0e999999999999", "0e999999999999"),
        ("-1e-9999", "-1e-9999"),
        ("9e-309", "9e-309"),
        (f"1e{'0' * 5000}5", "1000000000000000e-10"),
    ],
)
def test_what_is_read_well_stays(text: str, expected: str) -> None:
    assert with_exact_numbers(text) == expected


def test_numbers_beyond_floats_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="1e999 in the schema is beyond 64-bit floats"):
        only_answer('{"const": 1e999}')
    assert exact_integer(str(2**53)) == 2**53
    for one in (2**53 + 1, -(2**53) - 1, 10**5000):
        with pytest.raises(ValueError, match="beyond 2\\^53; use a string"):
            exact_integer("9" * 5000 if one > 10**30 else str(one))
