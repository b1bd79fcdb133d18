"""OpenAI's messages and tools as pydantic models."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, Tag, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

# pydantic needs this one for Python 3.11.
from typing_extensions import TypedDict

from router.frontend import validation

# Tools of a request, and calls of a message.
MAX_TOOLS = 128


def at_most(most: int, least: int = 0) -> Any:
    """Bounds a list. Validation ends at its first error, so a list of errors costs no more."""
    return Field(min_length=least, max_length=most, fail_fast=True)


def _no_function_call(value: object) -> object:
    if value:
        raise PydanticCustomError("function_call", "it is not supported; give tool_calls instead")
    return value


Text = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1})]
Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,128}$")]
FunctionCall = SkipJsonSchema[Annotated[Any, AfterValidator(_no_function_call)]]


# Validation to a dict takes a fifth of the time that an instance takes.
class TextPart(TypedDict):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: str


class CalledFunction(TypedDict):
    """The function of a call, with the JSON text that the model wrote for its arguments."""

    name: Text
    arguments: str


class CallEntry(TypedDict):
    """A call that the model made in an earlier turn."""

    id: Text
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class Message(TypedDict):
    """A message of a conversation. One of the assistant may have tool_calls instead of content."""

    role: Text
    content: NotRequired[
        Annotated[str, Tag("<text>")]
        | Annotated[list[TextPart], Field(fail_fast=True), Tag("<parts>")]
        | None
    ]
    tool_calls: NotRequired[Annotated[list[CallEntry], at_most(MAX_TOOLS)] | None]
    tool_call_id: NotRequired[str | None]
    name: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    function_call: NotRequired[FunctionCall]


class Function(TypedDict):
    """A function that the model may call."""

    name: Name
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class Tool(TypedDict):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class FunctionName(TypedDict):
    """The name of a function."""

    name: Name


class NamedTool(TypedDict):
    """The tool that the model has to use."""

    type: Literal["function"]
    function: FunctionName


Messages = Annotated[list[Message], at_most(validation.MAX_MESSAGES, least=1)]
Tools = Annotated[list[Tool], at_most(MAX_TOOLS)]
ToolChoice = (
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedTool, Tag("<named>")]
)
