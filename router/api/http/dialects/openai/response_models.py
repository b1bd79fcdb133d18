"""OpenAI's response bodies as pydantic models. Their JSON schema is part of /openapi.json.

`router.api.http.responses` writes completions piece by piece, in this shape.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

Count = Annotated[int, Field(ge=0)]
Absent = SkipJsonSchema[None]


class PromptDetails(BaseModel):
    """Details of `prompt_tokens`."""

    cached_tokens: Count


class CompletionDetails(BaseModel):
    """Details of `completion_tokens`."""

    reasoning_tokens: Count


class Usage(BaseModel):
    """Token counts of all choices. Each prompt counts once."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | Absent = Field(None, description="Of chats.")


class Account(BaseModel):
    """How kvrelay served a choice."""

    request_id: str
    path: Literal["disaggregated", "local"] | None
    why: str
    ledger: dict[str, Any] | None


class _Choice(BaseModel):
    index: Count
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: dict[str, Any] | None
    token_ids: list[int] | Absent = Field(None, description="With return_token_ids.")


class _Answer(BaseModel):
    id: str
    created: Count = Field(description="Unix seconds.")
    model: str
    system_fingerprint: str | None
    usage: Usage
    kvrelay: Account | list[Account] = Field(description="A list for several choices.")


class CompletionChoice(_Choice):
    """A choice of /v1/completions."""

    text: str


class Completion(_Answer):
    """Answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CalledFunction(BaseModel):
    """The function that the model calls."""

    name: str
    arguments: str = Field(description="JSON text, as the model wrote it.")


class ToolCall(BaseModel):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The message that the model wrote."""

    role: Literal["assistant"]
    content: str | None = Field(description="Null if the message consists of calls.")
    reasoning_content: str | Absent = Field(None, description="What a reasoning model thought.")
    tool_calls: list[ToolCall] | Absent = Field(None, description="The calls of tools.")


class ChatChoice(_Choice):
    """A choice of /v1/chat/completions."""

    message: AssistantMessage


class Chat(_Answer):
    """Answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Tokens(BaseModel):
    """Answer of /tokenize."""

    count: Count
    max_model_len: Count
    tokens: list[int]
    token_strs: list[str] | Absent = Field(None, description="With return_token_strs.")


class Model(BaseModel):
    """The served model, or an adapter of it."""

    id: str
    object: Literal["model"] = "model"
    root: str = Field(description="The model itself, or the name of the folder of an adapter.")
    parent: str | None = Field(description="The base model of an adapter, otherwise null.")
    created: Count
    owned_by: str = "kvrelay"
    max_model_len: Count
    vocab_size: Count


class Models(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Text(BaseModel):
    """Answer of /detokenize."""

    prompt: str


class Version(BaseModel):
    """Answer of /version."""

    version: str


class Health(BaseModel):
    """Answer of /health."""

    status: Literal["starting", "ready", "draining"]


class ErrorDetails(BaseModel):
    """What was wrong, with the field's name and the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class Error(BaseModel):
    """Answer to a request that failed."""

    error: ErrorDetails
