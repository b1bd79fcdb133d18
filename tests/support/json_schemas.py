"""Random JSON schemas whose answers are short, with all keywords that a grammar can follow."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

_NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=0x24F), min_size=1, max_size=5)
_PATTERNS = (r"^[A-Z]{2}-[0-9]{4}$", r"^(yes|no)$", r"^\d{1,3}(\.\d{2})?$", r"^[^\s\"]{0,5}$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**6),
    st.text(max_size=4),
    st.lists(st.integers(0, 9), max_size=2),
    st.dictionaries(st.sampled_from("abc"), st.booleans(), max_size=2),
)


@st.composite
def _strings(draw: st.DrawFn) -> Schema:
    least = draw(st.integers(0, 3))
    return {"type": "string", "minLength": least, "maxLength": least + draw(st.integers(0, 5))}


@st.composite
def _integers(draw: st.DrawFn) -> Schema:
    least = draw(st.integers(-1000, 1000))
    low, high = draw(st.sampled_from([("minimum", "maximum"), ("exclusiveMinimum", "maximum")]))
    found = {"type": "integer", low: least, high: least + draw(st.integers(1, 50))}
    if draw(st.booleans()):
        found["multipleOf"] = draw(st.sampled_from([1, 2, 5]))
        found[high] = least + 50
    return found


@st.composite
def _numbers(draw: st.DrawFn) -> Schema:
    """Their digits are bounded by multiples, which floats represent exactly."""
    least = draw(st.integers(-100, 100))
    return {
        "type": "number",
        "minimum": least,
        "maximum": least + draw(st.integers(1, 9)),
        "multipleOf": draw(st.sampled_from([0.5, 0.25])),
    }


_LEAVES: tuple[st.SearchStrategy[Schema], ...] = (
    _strings(),
    _integers(),
    _numbers(),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": ["boolean", "null"]}),
    st.lists(_VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    _VALUES.map(lambda value: {"const": value}),
    st.sampled_from(_PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(_FORMATS).map(lambda name: {"type": "string", "format": name}),
    st.just({"$ref": "#/$defs/shared"}),
)


@st.composite
def _arrays(draw: st.DrawFn, items: st.SearchStrategy[Schema]) -> Schema:
    if draw(st.booleans()):
        places = draw(st.lists(items, min_size=1, max_size=3))
        return {
            "type": "array",
            "prefixItems": places,
            "items": False,
            "minItems": draw(st.integers(0, len(places))),
        }
    least = draw(st.integers(0, 2))
    return {
        "type": "array",
        "items": draw(items),
        "minItems": least,
        "maxItems": least + draw(st.integers(0, 1)),
    }


@st.composite
def _objects(draw: st.DrawFn, values: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(_NAMES, values, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


@st.composite
def _choices(draw: st.DrawFn, options: st.SearchStrategy[Schema]) -> Schema:
    found = draw(st.lists(options, min_size=1, max_size=3))
    return {draw(st.sampled_from(["anyOf", "oneOf"])): found}


def _schemas(depth: int) -> st.SearchStrategy[Schema]:
    if depth == 0:
        return st.one_of(*_LEAVES)
    below = _schemas(depth - 1)
    return st.one_of(*_LEAVES, _arrays(below), _objects(below), _choices(below))


@st.composite
def json_schemas(draw: st.DrawFn) -> Schema:
    """A schema with definitions, one of which may refer to itself."""
    shared = draw(st.one_of(*_LEAVES[:-1]))
    if draw(st.booleans()):
        chain = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/shared"}]}
        shared = {
            "type": "object",
            "properties": {"value": shared, "next": chain},
            "required": ["value"],
            "additionalProperties": False,
        }
    return {"$defs": {"shared": shared}, **draw(_schemas(2))}
