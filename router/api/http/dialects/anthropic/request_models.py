"""Anthropic's request bodies as pydantic models. Their JSON schema is part of /openapi.json."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, Discriminator, Field, Tag

# pydantic needs this one for Python 3.11.
from typing_extensions import TypedDict

from router.api.http.chat.models import MAX_TOOLS, Name, Text, at_most
from router.api.http.common_fields import Generation, Request, TemplateVariables
from router.api.http.dialects.openai.request_models import StopText
from router.frontend import validation


def _block_kind(block: object) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else None
    return f"<{kind}>" if isinstance(kind, str) else None


class TextBlock(TypedDict):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """Thinking of an earlier answer. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: NotRequired[str | None]


class RedactedThinkingBlock(TypedDict):
    """Thinking that cannot be read, and is ignored."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(TypedDict):
    """A call that the model made in an earlier turn."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class ToolResultBlock(TypedDict):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: NotRequired[
        Annotated[str, Tag("<text>")]
        | Annotated[list[TextBlock], Field(fail_fast=True), Tag("<blocks>")]
        | None
    ]
    is_error: NotRequired[bool | None]


# Labels in angle brackets name an alternative in pydantic's errors. They are not shown to clients.
Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        _block_kind,
        custom_error_type="block",
        custom_error_message="this model takes text only: its type must be text, tool_use, "
        "tool_result, thinking or redacted_thinking",
    ),
]
Blocks = Annotated[list[Block], Field(fail_fast=True), Tag("<blocks>")]
TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True), Tag("<blocks>")]


class Turn(TypedDict):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str, Tag("<text>")] | Blocks


class ClientTool(TypedDict):
    """A tool that the client runs."""

    type: NotRequired[Literal["custom"] | None]
    name: Name
    description: NotRequired[str | None]
    input_schema: dict[str, Any]


class Choice(TypedDict):
    """Which tools the answer calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[Annotated[Name | None, Field(description="With type tool.")]]
    disable_parallel_tool_use: NotRequired[bool | None]


class Thinking(TypedDict):
    """Whether the model thinks before it answers, if its chat template has a switch for that."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: NotRequired[Annotated[int | None, Field(ge=1)]]


class OutputFormat(TypedDict):
    """The JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(TypedDict):
    """How the model answers."""

    effort: NotRequired[Literal["low", "medium", "high", "xhigh", "max"] | None]
    format: NotRequired[OutputFormat | None]


class _Conversation(TemplateVariables, BaseModel):
    messages: Annotated[list[Turn], at_most(validation.MAX_MESSAGES, least=1)]
    system: Annotated[str, Tag("<text>")] | TextBlocks | None = Field(
        None, description="The system prompt."
    )
    tools: Annotated[list[ClientTool], at_most(MAX_TOOLS)] | None = Field(
        None, description="Tools that the model may call."
    )
    tool_choice: Choice | None = Field(None, description="Default: auto with tools.")
    thinking: Thinking | None = Field(None, description="Default: as the chat template has it.")
    output_config: OutputConfig | None = Field(None, description="Effort and format of the answer.")
    output_format: OutputFormat | None = Field(
        None, description="An earlier place of output_config.format."
    )


class MessagesRequest(Generation, _Conversation):
    """Body of /v1/messages."""

    max_tokens: int = Field(ge=1, description="Cut to what the context holds.")
    stop_sequences: Annotated[list[StopText], at_most(validation.MAX_STOPS)] | None = Field(
        None, description="The answer ends before the first of these."
    )


class CountTokensRequest(Request, _Conversation):
    """Body of /v1/messages/count_tokens."""
