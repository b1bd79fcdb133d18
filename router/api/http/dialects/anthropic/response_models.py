"""Anthropic's response bodies as pydantic models. Their JSON schema is part of /openapi.json.

`router.api.http.dialects.anthropic.shape` writes messages piece by piece, in this shape.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from router.api.http.dialects.openai.response_models import Account, Count


class MessageText(BaseModel):
    """A text that the model wrote."""

    type: Literal["text"]
    text: str


class MessageThinking(BaseModel):
    """What a reasoning model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(BaseModel):
    """A call that the model asks for."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class OutputTokensDetails(BaseModel):
    """Details of `output_tokens`."""

    thinking_tokens: Count


class MessageUsage(BaseModel):
    """Token counts. `input_tokens` are those that no cache held."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: OutputTokensDetails


class AnthropicMessage(BaseModel):
    """Answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[
        Annotated[MessageText | MessageThinking | MessageToolUse, Field(discriminator="type")]
    ]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage
    kvrelay: Account


class CountedTokens(BaseModel):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: Count


class AnthropicErrorDetails(BaseModel):
    """What was wrong."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """Answer to a request that failed."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str
