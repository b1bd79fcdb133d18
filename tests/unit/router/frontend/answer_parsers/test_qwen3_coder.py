"""Answers of Qwen3-Coder."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from unit.router.frontend.answer_parsers.parsed_answers import (
    call,
    content,
    parsed,
    parsed_any_cut,
    tool,
)

from router.frontend.answer_parsers import parameter_types
from router.frontend.answer_parsers.events import CallArguments
from router.frontend.answer_parsers.qwen3_coder import Qwen3CoderParser


def xml(value: str) -> str:
    """A call with one parameter, `p`."""
    function = f"<function=f>\n<parameter=p>\n{value}\n</parameter>\n</function>"
    return f"<tool_call>\n{function}\n</tool_call>"


ANSWERS = {
    "two calls": (
        f"Sure.\n{xml('Oslo')}\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>\n",
        [content("Sure.\n"), call("f", '{"p": "Oslo"}'), call("get_time", "{}")],
    ),
    "several parameters": (
        "<tool_call><function=f><parameter=a>1</parameter><parameter=b c>x</parameter></function>"
        "</tool_call>done",
        [call("f", '{"a": "1", "b c": "x"}'), content("done")],
    ),
    "lines and quotes": (
        xml('\n  if a < b:\n\tsay("é\\n </p>")\n'),
        [call("f", '{"p": "\\n  if a < b:\\n\\tsay(\\"é\\\\n </p>\\")\\n"}')],
    ),
    "an empty value": (xml(""), [call("f", '{"p": ""}')]),
    "no marker before the function": (
        "<function=f>\n<parameter=p>\n1\n</parameter>\n</function>\n</tool_call>",
        [call("f", '{"p": "1"}')],
    ),
    "no end of a parameter": (
        "<tool_call><function=f><parameter=a>\nx\n<parameter=b>\ny\n</function></tool_call>",
        [call("f", '{"a": "x", "b": "y"}')],
    ),
    "no end of the function": (
        "<tool_call><function=f><parameter=a>\nx\n</parameter>\n</tool_call>",
        [call("f", '{"a": "x"}')],
    ),
    "text after a parameter": (
        "<tool_call><function=f><parameter=a>x</parameter>oops</function>",
        [call("f", '{"a": "x"'), content("oops</function>")],
    ),
    "no function": (
        '<tool_call>\n{"name": "f"}\n</tool_call>',
        [content('<tool_call>\n{"name": "f"}\n</tool_call>')],
    ),
    "truncated in the name": (
        "<tool_call>\n<function=get_",
        [content("<tool_call>\n<function=get_")],
    ),
    "truncated in a value": ("<tool_call><function=f><parameter=p>\nOs", [call("f", '{"p": "Os')]),
    "truncated after a value": (xml("Oslo")[:-24], [call("f", '{"p": "Oslo"')]),
}


@pytest.mark.parametrize(("answer", "parts"), ANSWERS.values(), ids=ANSWERS)
def test_answers_are_parsed(answer: str, parts: list[tuple[str, ...]]) -> None:
    assert parsed_any_cut("qwen3_coder", answer) == parts


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "42", "42"),
        ({"type": "number"}, " 3.5 ", "3.5"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "yes", '"yes"'),
        ({"type": "integer"}, "abc", '"abc"'),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "string"}, "42", '"42"'),
        ({"type": "string"}, '{"a": 1}', '"{\\"a\\": 1}"'),
        ({"type": "object"}, '{"a": [1,\n 2]}', '{"a": [1,\n 2]}'),
        ({"type": "object"}, "{'a': 1}", "\"{'a': 1}\""),
        ({"type": ["integer", "null"]}, "None", "null"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, '["a"]', '["a"]'),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "5", '"5"'),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', '{"x": 1}'),
        ({"description": "a city"}, "5", '"5"'),
        ({"type": "array"}, "[" * 100_000, '"' + "[" * 100_000 + '"'),
        ({"type": {}, "anyOf": 3}, "x", '"x"'),
        ({"anyOf": [{"enum": ["1", "2"]}, {"type": "null"}]}, "1", '"1"'),
        ({"anyOf": [{"enum": ["1", "2"]}, {"type": "null"}]}, "None", "null"),
        ({"anyOf": [{"const": "1.0"}, {"type": "null"}]}, "1.0", '"1.0"'),
        ({"anyOf": [{"enum": [1, 2]}, {"type": "null"}]}, "1", "1"),
        ({"anyOf": [{"enum": ["1", "2"]}, {"type": "boolean"}]}, "1", '"1"'),
        ({"anyOf": [{"enum": ["1", "2"]}, {"type": "boolean"}]}, "True", "true"),
        (None, "5", '"5"'),
        (True, "5", '"5"'),
    ],
)
def test_values_have_the_types_of_the_schema(schema: object, text: str, value: str) -> None:
    arguments = parsed("qwen3_coder", xml(text), [tool("g", {}), tool("f", {"p": schema})])
    assert arguments == [call("f", f'{{"p": {value}}}')]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"$ref": "#/$defs/Level"}, "5", "5"),
        ({"allOf": [{"$ref": "#/$defs/Level"}], "default": 1}, "5", "5"),
        ({"anyOf": [{"$ref": "#/$defs/Level"}, {"type": "null"}]}, "None", "null"),
        ({"$ref": "#/$defs/Name"}, "5", '"5"'),
        ({"$ref": "#/$defs/Circle"}, "5", '"5"'),
        ({"$ref": "#/$defs/Missing"}, "5", '"5"'),
        ({"$ref": "elsewhere"}, "5", '"5"'),
        ({"$ref": "#/$defs/a~1b"}, "5", "5"),
        ({"enum": [1, 2]}, "2", "2"),
        ({"enum": [1, "two"]}, "2", '"2"'),
        ({"enum": [1, "two"]}, "1", "1"),
        ({"enum": [1, "two"]}, "two", '"two"'),
        ({"enum": [1.0, "two"]}, "1", "1"),
        ({"enum": [1, "two"]}, "1.0", "1.0"),
        ({"enum": [1, "two"]}, "True", '"True"'),
        ({"enum": [1e22, "two"]}, "1e22", "1e22"),
        ({"enum": [{"x": 1}, "two"]}, '{"x":1}', '{"x":1}'),
        ({"enum": [["\u00e9"], "two"]}, '["\u00e9"]', '["\u00e9"]'),
        ({"enum": ["True", True]}, "True", '"True"'),
        ({"enum": ["True", True]}, "true", "true"),
        ({"enum": [1, "two"]}, "[" * 100_000, '"' + "[" * 100_000 + '"'),
        ({"anyOf": [{"enum": ["auto", True, 2]}, {"type": "null"}]}, "2", "2"),
        ({"anyOf": [{"enum": ["auto", True, 2]}, {"type": "null"}]}, "auto", '"auto"'),
        ({"anyOf": [{"type": "integer"}, {"enum": ["auto", "none"]}]}, "5", "5"),
        # As pydantic writes Literal["auto"] | int.
        ({"anyOf": [{"type": "string", "const": "auto"}, {"type": "integer"}]}, "5", "5"),
        ({"anyOf": [{"type": "string", "const": "auto"}, {"type": "integer"}]}, "auto", '"auto"'),
        ({"anyOf": [{"type": "string", "enum": ["a", "1"]}, {"type": "integer"}]}, "1", '"1"'),
        ({"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "array"}]}, "[1]", "[1]"),
        ({"type": ["string", "integer"], "enum": ["auto", 5]}, "5", "5"),
        ({"anyOf": [{"type": "string", "enum": ["7"]}, {"type": "boolean"}]}, "7 ", '"7"'),
        # More strings than are looked at.
        (
            {"anyOf": [{"type": "string", "enum": [*map(str, range(99))]}, {"type": "boolean"}]},
            "98",
            '"98"',
        ),
        (
            {"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "integer"}, {"minLength": 1}]},
            "5",
            '"5"',
        ),
        (
            {"anyOf": [{"type": "string", "enum": ["a"]}, {"type": ["string", "integer"]}]},
            "5",
            '"5"',
        ),
        ({"anyOf": [{"type": "integer"}, {"const": "auto"}]}, "5", "5"),
        ({"type": "integer", "allOf": [{"type": ["integer", "string"]}]}, "5", "5"),
        ({"$ref": "/$defs/Level"}, "5", "5"),
        ({"$ref": "#/$defs/My%20Level"}, "5", "5"),
        ({"$ref": "#/$defs/Any/anyOf/1"}, "5", "5"),
        ({"$ref": "#/$defs/Any/anyOf/0"}, "5", '"5"'),
        ({"$ref": "#/$defs/Any/anyOf/2"}, "5", '"5"'),
        ({"$ref": "#/$defs/Any/anyOf/-1"}, "5", '"5"'),
        ({"$ref": "#/$defs/Any/anyOf/one"}, "5", '"5"'),
        ({"const": True}, "True", "true"),
    ],
)
def test_values_have_the_types_that_references_name(schema: object, text: str, value: str) -> None:
    """As pydantic writes enumerations and nested models."""
    given = tool("f", {"p": schema})
    given["function"]["parameters"]["$defs"] = {
        "Level": {"type": "integer", "enum": [1, 5]},
        "Name": {"const": "x"},
        "My Level": {"type": "integer"},
        "Circle": {"anyOf": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Circle"}]},
        "a/b": {"type": "number"},
        "Any": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    }
    assert parsed("qwen3_coder", xml(text), [given]) == [call("f", f'{{"p": {value}}}')]


@pytest.mark.parametrize("length", [100, 1_000, 100_000])
def test_a_reference_in_a_circle_is_followed_once_for_all_values(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    reference = f"#/$defs/{'%61' * (length // 3)}"
    given = tool("f", {"p": {"$ref": reference}})
    given["function"]["parameters"]["$defs"] = {"a" * (length // 3): {"$ref": reference}}
    unquoted: list[str] = []
    monkeypatch.setattr(
        parameter_types, "unquote", lambda text: unquoted.append(text) or unquote(text)
    )
    answer = "\n".join([xml("5")] * 10)
    assert parsed("qwen3_coder", answer, [given]) == [call("f", '{"p": "5"}')] * 10
    # With the schemas of allOf, and without; each reads the reference, and the part's own.
    assert len(unquoted) <= 4
    assert sum(map(len, unquoted)) <= 2_000


def test_few_of_many_types_are_looked_at() -> None:
    looked_at = 0

    class Name(str):
        def __hash__(self) -> int:
            nonlocal looked_at
            looked_at += 1
            return super().__hash__()

    given = tool("f", {"p": {"type": [Name("number") for _ in range(10_000)]}})
    assert parsed("qwen3_coder", xml("5"), [given]) == [call("f", '{"p": 5}')]
    assert looked_at <= 1_000


@pytest.mark.parametrize(
    "definition",
    [
        {},
        {"function": None},
        {"function": {"name": "f"}},
        {"function": {"name": "f", "parameters": 3}},
    ],
)
def test_tools_without_a_schema_have_strings(definition: dict[str, object]) -> None:
    assert parsed("qwen3_coder", xml("5"), [definition]) == [call("f", '{"p": "5"}')]


def test_functions_without_a_marker_are_calls_of_tools_only() -> None:
    text = "<function=f></function>"
    assert parsed_any_cut("qwen3_coder", text, [tool("f", {})]) == [call("f", "{}")]
    assert parsed_any_cut("qwen3_coder", text, [tool("g", {})]) == [content(text)]


def test_strings_are_streamed() -> None:
    parser = Qwen3CoderParser(())
    parser.push("<tool_call>\n<function=f>\n<parameter=p>\n")
    assert parser.push("one\n") == [CallArguments(0, "one")]
    assert parser.push("two\n</par") == [CallArguments(0, "\\ntwo")]
    assert parser.push("ameter>") == [CallArguments(0, '"')]


def test_references_in_any_spelling_lead_to_the_same_part_once() -> None:
    class Counted(dict[str, object]):
        looks = 0

        def get(self, key: str, default: object = None) -> object:
            Counted.looks += key == "a"
            return super().get(key, default)

    spellings = ["#/%24defs/a", "#/$defs/a", "#/$defs/%61", "#%2F$defs/a"]
    whole = {"$defs": Counted(a={"enum": [1, "two"]})}
    found = parameter_types.types_of({"anyOf": [{"$ref": one} for one in spellings]}, whole)
    assert found.values == (1,)
    # With the schemas of allOf, and without.
    assert Counted.looks == 2
