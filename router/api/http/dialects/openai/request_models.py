"""OpenAI's request bodies as pydantic models. Their JSON schema is part of /openapi.json."""

from __future__ import annotations

import json
from typing import Annotated, Literal, NotRequired

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

# pydantic needs this one for Python 3.11.
from typing_extensions import TypedDict

from kvrelay import sampling_limits
from kvrelay.sampling_limits import INT32, MAX_BIAS, MAX_LOGIT_BIAS, MAX_LOGPROBS
from kvrelay.types.requests import SamplingParams
from router.api.http.chat.models import Messages, Text, ToolChoice, Tools, at_most
from router.api.http.common_fields import (
    Generation,
    Request,
    TemplateVariables,
    flag,
    sampling,
    text,
)
from router.api.http.json_parser import MAX_INTEGERS
from router.api.http.structured_output import ResponseFormat, StructuredOutputs
from router.frontend import validation

# Limit on prompts times n in one request.
MAX_CHOICES = 64
_DEFAULTS = SamplingParams()


def _bias_keys(value: object) -> object:
    """Checks number and form of the keys before pydantic validates the entries."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError(
            "entries", f"it must have at most {MAX_LOGIT_BIAS} entries, not {len(value)}"
        )
    for one in value:
        if not (one.isascii() and one.isdecimal() and len(one) <= 10):
            told = {"key": json.dumps(one[:60], ensure_ascii=False)}
            raise PydanticCustomError(
                "keys", 'its keys must be token ids such as "11", not {key}', told
            )
    return value


def _prompt_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "<one>"
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str | list):
        return "<texts>" if isinstance(first, str) else "<lists>"
    return "<ids>" if isinstance(first, int) else None


# Labels in angle brackets name an alternative in pydantic's errors. They are not shown to clients.
StopText = Annotated[str, text(minLength=1, maxLength=validation.MAX_STOP_LENGTH)]
TokenId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
TokenIds = Annotated[list[TokenId], at_most(MAX_INTEGERS, least=1)]
Prompts = Annotated[
    Annotated[Text, Tag("<one>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[Text], at_most(MAX_CHOICES, least=1), Tag("<texts>")]
    | Annotated[list[TokenIds], at_most(MAX_CHOICES, least=1), Tag("<lists>")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt",
        custom_error_message="it must be text, token ids, or a list of either, and not empty",
    ),
]
LogitBias = Annotated[
    dict[str, float],
    BeforeValidator(_bias_keys),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        }
    ),
]


class StreamOptions(TypedDict):
    """What a stream reports besides the answer."""

    include_usage: NotRequired[
        Annotated[bool | None, flag("A last chunk without choices carries the usage.")]
    ]
    continuous_usage_stats: NotRequired[
        Annotated[bool | None, flag("Each chunk carries the usage of its choice so far.")]
    ]


class _Generation(Generation):
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Of each choice. Default: what the context holds for messages, else "
        f"{_DEFAULTS.max_tokens}.",
    )
    n: int | None = Field(1, ge=1, le=MAX_CHOICES, description="Choices for each prompt.")
    stream: bool | None = flag("Send server-sent events; the last is [DONE].")
    stream_options: StreamOptions | None = None
    stop: (
        Annotated[StopText, Tag("<one>")]
        | Annotated[list[StopText], at_most(validation.MAX_STOPS), Tag("<texts>")]
        | None
    ) = Field(None, description="The answer ends before the first of these.")
    stop_token_ids: Annotated[list[TokenId], at_most(sampling_limits.MAX_STOP_TOKENS)] | None = (
        Field(None, description="The answer ends after any of these.")
    )
    ignore_eos: bool | None = flag("Continue past the end of the sequence, to max_tokens.")
    min_tokens: int | None = Field(
        0,
        ge=0,
        le=INT32,
        description="Before this number of tokens, neither the model nor stop nor stop_token_ids "
        "end the answer.",
    )
    min_p: float | None = sampling("min_p")
    presence_penalty: float | None = sampling("presence_penalty")
    frequency_penalty: float | None = sampling("frequency_penalty")
    repetition_penalty: float | None = sampling("repetition_penalty", "1 is off.")
    logit_bias: LogitBias | None = Field(
        None, description="Token id to the number that is added to its logit."
    )
    response_format: ResponseFormat | None = Field(
        None, description="The answer is text, any JSON object, or JSON of a schema."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="What the answer follows: a schema, a regular expression, a choice of "
        "texts, or a grammar.",
    )
    thinking_token_budget: int | None = sampling(
        "thinking_token_budget",
        "Most tokens of thinking; then its end follows. -1 is no limit.",
        ge=-1,
    )
    return_token_ids: bool | None = flag("Choices carry token_ids.")


class CompletionRequest(_Generation):
    """Body of /v1/completions."""

    prompt: Prompts
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Equal to n.")
    echo: bool | None = flag("The text of a choice begins with its prompt.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Number of most likely tokens to report."
    )


class ChatRequest(_Generation, TemplateVariables):
    """Body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(
        None, ge=1, description="Takes precedence over max_tokens."
    )
    logprobs: bool | None = flag("Report the logprobs of the answer's tokens.")
    tools: Tools | None = Field(None, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="Default: auto with tools, else none.")
    parallel_tool_calls: bool | None = Field(
        True, description="Whether an answer may have several calls."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        Field(None, description="A variable of the chat template.")
    )
    # The bound is the one of the sampling option `logprobs`, whose name its error has.
    top_logprobs: int | None = Field(
        None,
        description="With logprobs: number of most likely tokens to report.",
        json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS},
    )


class TokenizeRequest(Request):
    """Body of /tokenize: a prompt or messages."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        True, description="Of a prompt. A chat template writes special tokens itself."
    )
    return_token_strs: bool | None = flag("Add token_strs, each token's spelling.")


class DetokenizeRequest(Request):
    """Body of /detokenize."""

    tokens: Annotated[list[TokenId], at_most(MAX_INTEGERS)]
