"""The answer of /v1/responses as pydantic models. Their JSON schema is part of /openapi.json.

`router.api.http.dialects.responses.shape` writes responses piece by piece, in this shape.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from router.api.http.dialects.openai.response_models import Account, Count

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """A text that the model wrote."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class OutputMessage(BaseModel):
    """A message that the model wrote."""

    id: str
    status: Status
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(BaseModel):
    """A text that the model thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    """What a reasoning model thought."""

    id: str
    status: Status
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: None


class OutputCall(BaseModel):
    """A call that the model asks for."""

    id: str
    status: Status
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="JSON text, as the model wrote it.")


class IncompleteDetails(BaseModel):
    """Why the answer is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(BaseModel):
    """Details of `input_tokens`."""

    cached_tokens: Count
    cache_write_tokens: Count


class ReasoningTokensDetails(BaseModel):
    """Details of `output_tokens`."""

    reasoning_tokens: Count


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: ReasoningTokensDetails
    total_tokens: Count


class ModelResponse(BaseModel):
    """Answer of /v1/responses. It also repeats the options of the request."""

    id: str
    object: Literal["response"]
    created_at: Count = Field(description="Unix seconds.")
    completed_at: Count | None
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[
        Annotated[OutputMessage | OutputReasoning | OutputCall, Field(discriminator="type")]
    ]
    usage: ResponseUsage
    metadata: dict[str, str]
    store: Literal[False]
    kvrelay: Account
