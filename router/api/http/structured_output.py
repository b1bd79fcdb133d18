"""Structured output: which grammar the answer to a request follows."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field

# pydantic needs this one for Python 3.11.
from typing_extensions import TypedDict

from kvrelay.engine.sampling.grammar import WHITESPACE, exact_json
from kvrelay.engine.sampling.schema_numbers import with_exact_numbers
from kvrelay.errors import InvalidArgument
from kvrelay.sampling_limits import MAX_GUIDANCE
from kvrelay.types.requests import Guidance
from router.api.http.adapted_schema import adapted_schema
from router.api.http.chat.models import Function, at_most
from router.api.http.chat.tool_use import ToolUse
from router.api.http.closed_schema import closed
from router.api.http.json_writing import is_longer
from router.frontend.answer_parsers.formats import CallSyntax

MAX_ALTERNATIVES = 4096
# Where `_definitions` puts the schema of a tool, and how it begins the tool's anchors.
_TOOL_PLACE = re.compile(
    r"(?<![^\s'#])#?/\$defs/(?P<place>[0-9]{1,4})(?![^/'\s])|(?<=Anchor ')_(?P<anchor>[0-9]{1,4})-"
)


class NamedSchema(TypedDict):
    """A JSON schema with a name."""

    name: NotRequired[str]
    description: NotRequired[str | None]
    schema: dict[str, Any]
    strict: NotRequired[bool | None]


class ResponseFormat(TypedDict):
    """The format of the answer, as OpenAI describes it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NotRequired[NamedSchema | None]


class StructuredOutputs(TypedDict):
    """The format of the answer, as vLLM describes it: exactly one of these."""

    # An option that is not known here may change the answer.
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    json: NotRequired[dict[str, Any] | str | None]
    json_object: NotRequired[bool | None]
    regex: NotRequired[str | None]
    choice: NotRequired[Annotated[list[str], at_most(MAX_ALTERNATIVES, least=1)] | None]
    grammar: NotRequired[Annotated[str, Field(description="In Lark's notation.")] | None]


ANY_OBJECT = Guidance("json_schema", '{"type":"object"}')


def guidance_of_format(given: ResponseFormat | None) -> Guidance | None:
    """Returns the grammar of `response_format`; None for text. Raises InvalidArgument."""
    if given is None or given["type"] == "text":
        return None
    if given["type"] == "json_object":
        return ANY_OBJECT
    named = given.get("json_schema")
    if named is None:
        raise InvalidArgument(
            "response_format has no json_schema; give an object with name and schema",
            field="response_format",
        )
    return guidance_of_answer(named["schema"], "response_format")


def guidance_of_outputs(given: StructuredOutputs | None) -> Guidance | None:
    """Returns the grammar of `structured_outputs`; None without. Raises InvalidArgument."""
    if given is None:
        return None
    chosen = {name: value for name, value in given.items() if value not in (None, False)}
    if len(chosen) != 1:
        raise InvalidArgument(
            f"structured_outputs has {', '.join(sorted(chosen)) or 'none of its options'}; give "
            "exactly one of json, json_object, regex, choice and grammar",
            field="structured_outputs",
        )
    ((name, value),) = chosen.items()
    if len(value) > MAX_GUIDANCE if isinstance(value, str) else is_longer(value, MAX_GUIDANCE):
        raise _too_long("structured_outputs")
    match name, value:
        case "json", str(source):
            return Guidance("json_schema", source)
        case "json", dict(schema):
            return guidance_of_schema(adapted_schema(schema))
        case "regex", str(source):
            return Guidance("regex", source)
        case "grammar", str(source):
            return Guidance("lark", source)
        case "choice", list(texts):
            alternatives = " | ".join(json.dumps(one, ensure_ascii=False) for one in texts)
            # A terminal, since a rule with thousands of alternatives is slow.
            return Guidance("lark", f"start: TEXT\nTEXT: {alternatives}")
    return ANY_OBJECT


def guidance_of_tools(use: ToolUse | None) -> Guidance | None:
    """Returns the grammar of an answer that has to consist of calls: the arguments of the named
    function, or a list of objects with name and arguments. None if the model decides.
    """
    if use is None or use.mode != "required":
        return None
    if _are_long(use):
        raise _too_long("tools")
    definitions = _definitions(use)
    if use.named is not None:
        names = [one["function"]["name"] for one in use.tools]
        root: dict[str, Any] = {"$ref": f"#/$defs/{names.index(use.named)}"}
    else:
        root = {"type": "array", "minItems": 1, "items": _call(use, "arguments")}
        if not use.parallel:
            root["maxItems"] = 1
    return guidance_of_schema(root | {"$defs": definitions})


def guidance_with_calls(
    answer: Guidance, use: ToolUse, syntax: CallSyntax, special: Container[str]
) -> Guidance | None:
    """Returns the grammar of an answer that either follows a JSON schema or consists of calls as
    the model writes them. Returns None if `answer` is another kind of grammar. Raises ValueError if
    its schema is not one of JSON, or if the schemas of the tools are too long.

    - special: markers that are special tokens of the model
    """
    if answer.kind != "json_schema":
        return None
    if _are_long(use):
        raise ValueError(f"the schemas of the tools have more than {MAX_GUIDANCE} bytes")
    call = _call(use, syntax.arguments) | {"$defs": _definitions(use)}
    begin, end, between = (
        [one if one in special else json.dumps(one, ensure_ascii=False), "SPACE"] if one else []
        for one in (syntax.begin, syntax.end, syntax.between)
    )
    parts = {
        "start": "answer | calls",
        "calls": f"call (SPACE {' '.join(between)} call)*" if use.parallel else "call",
        "call": " ".join([*begin, "tools", *reversed(end)]),
        "SPACE": r"/[ \n]{0,2}/",
        "answer": f"%json {_for_lark(exact_json(answer.source))}",
        "tools": f"%json {_for_lark(exact_json(json.dumps(call)))}",
    }
    return Guidance("lark", "\n".join(f"{name}: {part}" for name, part in parts.items()))


def _for_lark(schema: Any) -> str:
    """Returns a JSON schema with the options for llguidance that the worker gives one that stands
    alone. Raises ValueError for a number that llguidance would replace.
    """
    if isinstance(schema, dict):
        schema |= {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": False}}
    return with_exact_numbers(json.dumps(schema, ensure_ascii=False))


def _call(use: ToolUse, arguments: str) -> dict[str, Any]:
    """Returns the schema of a call. Its arguments are among _definitions."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": one["function"]["name"]},
                    arguments: {"$ref": f"#/$defs/{number}"},
                },
                "required": ["name", arguments],
                "additionalProperties": False,
            }
            for number, one in enumerate(use.tools)
        ]
    }


def _are_long(use: ToolUse) -> bool:
    """Returns whether the schemas of the arguments are much too long for guidance."""
    # The description contains them.
    return len(use.described) > 2 * MAX_GUIDANCE and is_longer(
        [one["function"].get("parameters") for one in use.tools], MAX_GUIDANCE
    )


def _definitions(use: ToolUse) -> dict[str, Any]:
    """Returns the schemas of the arguments of each function, by its number: a name in each
    reference could take many times as much room.
    """
    return {
        str(number): closed(
            adapted_schema(_parameters(one["function"]), f"#/$defs/{number}", f"_{number}-")
        )
        for number, one in enumerate(use.tools)
    }


def with_tool_names(reason: str, use: ToolUse) -> str:
    """Returns why guidance is not accepted with the names of tools instead of the places that their
    schemas have in the grammar, as in `get_weather/properties/city`.
    """
    names = [one["function"]["name"] for one in use.tools]

    def named(found: re.Match[str]) -> str:
        number = int(found["place"] or found["anchor"])
        if number >= len(names):
            return found[0]
        return names[number] if found["place"] else f"{names[number]}#"

    if use.mode == "required":
        return _TOOL_PLACE.sub(named, reason)
    before, rule, after = reason.partition("rule tools: ")
    is_of_tools = rule and before == "guidance is not accepted: "
    return f"{before}tools: {_TOOL_PLACE.sub(named, after)}" if is_of_tools else reason


def only_guidance(use: ToolUse | None, **formats: Guidance | None) -> tuple[str, Guidance | None]:
    """Returns the only grammar that the request gives, with the field that gives it: tools, or a
    field of `formats`. Raises InvalidArgument for several.

    In the APIs of OpenAI and Anthropic, the format is that of texts, so it has no effect on an
    answer that has to consist of calls. vLLM's structured_outputs is the format of all answers.
    """
    calls = guidance_of_tools(use)
    if calls is not None:
        formats = {"structured_outputs": formats.get("structured_outputs")}
    found = {
        name: one for name, one in ({"tool_choice": calls} | formats).items() if one is not None
    }
    if len(found) > 1:
        raise InvalidArgument(
            f"{' and '.join(found)} each prescribe the answer; give one of them",
            field=next(reversed(found)),
        )
    if calls is not None:
        return "tools", calls
    return next(iter(found.items()), ("", None))


def _parameters(function: Function) -> dict[str, Any]:
    """Returns the schema of the arguments. Raises InvalidArgument unless they are an object."""
    given = function.get("parameters") or {"type": "object"}
    if given.get("type") != "object" and "$ref" not in given:
        raise InvalidArgument(
            f"the parameters of tool {function['name']} are not those of an object; give them type "
            "object",
            field="tools",
        )
    # References hold for the schema's new place, not for its own address.
    return {name: value for name, value in given.items() if name != "$id"}


def guidance_of_answer(schema: Mapping[str, Any], field: str) -> Guidance:
    """Returns the grammar of an answer that an application reads as JSON: its objects have no
    undeclared properties unless the schema says that they may. Raises InvalidArgument for a schema
    that is too long, which `field` of the request gives.
    """
    if is_longer(schema, MAX_GUIDANCE):
        raise _too_long(field)
    return guidance_of_schema(closed(adapted_schema(schema)))


def guidance_of_schema(schema: Mapping[str, Any]) -> Guidance:
    """Returns the grammar of a JSON schema that is not much longer than guidance may be. Admission
    refuses it if it is longer.
    """
    return Guidance("json_schema", json.dumps(schema, ensure_ascii=False))


def _too_long(field: str) -> InvalidArgument:
    return InvalidArgument(
        f"{field} has more than {MAX_GUIDANCE} bytes; allowed are 1 to {MAX_GUIDANCE}", field=field
    )
