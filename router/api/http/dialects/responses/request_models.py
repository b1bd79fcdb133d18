"""The request body of /v1/responses as pydantic models. Their JSON schema is part of
/openapi.json.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag

# pydantic needs this one for Python 3.11.
from typing_extensions import TypedDict

from kvrelay.sampling_limits import MAX_LOGPROBS
from router.api.http.chat.models import MAX_TOOLS, Name, Text, at_most
from router.api.http.common_fields import Generation, TemplateVariables
from router.frontend import validation

# Bounds of OpenAI's `metadata`.
_MAX_METADATA = 16
_MAX_METADATA_KEY = 64
_MAX_METADATA_VALUE = 512
_MAX_INCLUDED = 16


class TextPart(TypedDict):
    """A part of a message. Only text is supported."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: NotRequired[str]
    refusal: NotRequired[str]


class TextContent(TypedDict):
    """A part of reasoning."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


Content = (
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("<parts>")]
)


class MessageItem(TypedDict):
    """A message."""

    type: NotRequired[Literal["message"] | None]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(TypedDict):
    """A call that the model made in an earlier turn."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: str


class FunctionCallOutputItem(TypedDict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content


class ReasoningItem(TypedDict):
    """Reasoning of an earlier answer: its content, else its summary."""

    type: Literal["reasoning"]
    summary: NotRequired[Annotated[list[TextContent], Field(fail_fast=True)] | None]
    content: NotRequired[Annotated[list[TextContent], Field(fail_fast=True)] | None]


def _item_kind(item: object) -> str | None:
    if not isinstance(item, dict):
        return None
    kind = item.get("type", "message")
    kind = "message" if kind is None else kind
    return f"<{kind}>" if isinstance(kind, str) else None


# Labels in angle brackets name an alternative in pydantic's errors. They are not shown to clients.
Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        _item_kind,
        custom_error_type="item",
        custom_error_message="its type must be message, function_call, function_call_output or "
        "reasoning; this router stores no items and runs no tools, so send each item in full",
    ),
]
Items = Annotated[list[Item], at_most(validation.MAX_MESSAGES, least=1), Tag("<items>")]


class FunctionTool(TypedDict):
    """A function that the model may call."""

    type: Literal["function"]
    name: Name
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class FunctionChoice(TypedDict):
    """The function that the model has to call."""

    type: Literal["function"]
    name: Name


class TextFormat(TypedDict):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: NotRequired[str]
    description: NotRequired[str | None]
    schema: NotRequired[dict[str, Any]]
    strict: NotRequired[bool | None]


class TextOptions(TypedDict):
    """Options of the answer's text."""

    format: NotRequired[TextFormat | None]
    verbosity: NotRequired[Annotated[str | None, Field(description="Without effect.")]]


class ReasoningOptions(TypedDict):
    """Options of the model's thinking."""

    effort: NotRequired[Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None]
    summary: NotRequired[
        Annotated[str | None, Field(description="Without effect: reasoning comes in full.")]
    ]


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=_MAX_METADATA_KEY)],
        Annotated[str, Field(max_length=_MAX_METADATA_VALUE)],
    ],
    Field(max_length=_MAX_METADATA),
]


class ResponsesRequest(Generation, TemplateVariables):
    """Body of /v1/responses."""

    input: Annotated[Text, Tag("<text>")] | Items
    instructions: str | None = Field(None, description="The system prompt.")
    max_output_tokens: int | None = Field(
        None, ge=1, description="At most, and by default: what the context holds."
    )
    tools: Annotated[list[FunctionTool], at_most(MAX_TOOLS)] | None = Field(
        None, description="Functions that the model may call."
    )
    tool_choice: (
        Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
        | Annotated[FunctionChoice, Tag("<named>")]
        | None
    ) = Field(None, description="Default: auto.")
    parallel_tool_calls: bool | None = Field(
        True, description="Whether an answer may have several calls."
    )
    text: TextOptions | None = Field(None, description="Format of the answer.")
    reasoning: ReasoningOptions | None = Field(None, description="How much the model thinks.")
    # The bound is the one of the sampling option `logprobs`, whose name its error has.
    top_logprobs: int | None = Field(
        None,
        description="Number of most likely tokens to report with the logprobs that include asks "
        "for.",
        json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS},
    )
    include: Annotated[list[str], at_most(_MAX_INCLUDED)] | None = Field(
        None, description="message.output_text.logprobs, and others without effect."
    )
    metadata: Metadata | None = Field(None, description="Repeated in the answer.")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Without effect: input that is too long is an error."
    )
