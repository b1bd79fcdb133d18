"""The reason why a schema is not followed names the place in it, as llguidance's own does not."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from support.guided_model import DEMO

from kvrelay.engine.sampling.grammar import GrammarCompiler
from kvrelay.engine.sampling.schema_reasons import explained_schema
from kvrelay.errors import InvalidArgument
from kvrelay.types.requests import Guidance

REFUSED: dict[str, dict[str, Any]] = {
    '"not"': {"not": {"type": "string"}},
    '"if" and "then"': {"if": {"type": "string"}, "then": {"minLength": 2}},
    '"uniqueItems"': {"type": "array", "uniqueItems": True},
    '"oneOf"': {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    '"format"': {"type": "string", "format": "colour"},
    '"type"': {"type": "text"},
    '"$ref"': {"$ref": "http://127.0.0.1:1/colour.json"},
}
# Names that a pointer has to escape, and that are keywords elsewhere.
NAMES = ("a", "b/c", "~d", "not", "oneOf", "uniqueItems", "format", "if", "then", "é", "enum")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(str(DEMO), 8192, frozenset({0}))


def schema_around(random: Random, inner: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns a schema that contains another, and the pointer to it."""
    schema, pointer = inner, ""
    for _ in range(random.randrange(4)):
        match random.randrange(3):
            case 0:
                name = random.choice(NAMES)
                others = {other: {"type": "string"} for other in random.sample(NAMES, 3)}
                schema = {"type": "object", "properties": others | {name: schema}}
                pointer = f"/properties/{name.replace('~', '~0').replace('/', '~1')}{pointer}"
            case 1:
                schema = {"type": "array", "items": schema}
                pointer = f"/items{pointer}"
            case 2:
                schema = {"anyOf": [{"type": "null"}, schema], "default": inner}
                pointer = f"/anyOf/1{pointer}"
    return schema, pointer


@pytest.mark.parametrize("keywords", REFUSED)
@pytest.mark.parametrize("seed", range(20))
def test_what_is_refused_is_named_with_its_place(
    compiler: GrammarCompiler, keywords: str, seed: int
) -> None:
    schema, pointer = schema_around(Random(seed), REFUSED[keywords])
    with pytest.raises(InvalidArgument) as caught:
        compiler.compile(Guidance("json_schema", json.dumps(schema)))
    place = f"at {pointer}" if pointer else "at the root"
    assert f"{keywords} {place} " in caught.value.message


def test_no_place_is_named_where_several_can_be_meant() -> None:
    part = {"oneOf": [{}, {}]}
    schema = {"anyOf": [part, part]}
    reason = explained_schema("oneOf constraints are not supported. And more", json.dumps(schema))
    assert reason.startswith('"oneOf" has alternatives')


def test_other_reasons_stay() -> None:
    assert explained_schema("type must be a string", '{"type": 3}') == "type must be a string"
