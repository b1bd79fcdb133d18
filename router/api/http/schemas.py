"""JSON Schema of the HTTP endpoint's body fields. The parser accepts only these names.

Bounds that depend on the model, such as the largest token id, are not part of the schema. The
parser and `router.frontend.validation` check these bounds and answer 400 with the field's name.
"""

from __future__ import annotations

from typing import Any

from kvrelay.sampling_limits import (
    LEAST_TEMPERATURE,
    LIMITS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKENS,
)
from kvrelay.types import SamplingParams
from router.api.http.json_parser import MAX_INTEGERS
from router.frontend.validation import (
    MAX_CACHE_SALT,
    MAX_MESSAGES,
    MAX_REQUEST_ID,
    MAX_STOP_LENGTH,
    MAX_STOPS,
)

# Limit on prompts times n in one request.
MAX_CHOICES = 64
Schema = dict[str, Any]

_INT32 = 2**31 - 1
_DEFAULTS = SamplingParams()


def _optional(kind: str, says: str, **more: Any) -> Schema:
    """Returns the schema of an optional field; null means absent."""
    return {"type": [kind, "null"], "description": says, **more}


def _flag(says: str) -> Schema:
    return _optional("boolean", says, default=False)


TEXT: Schema = {"type": "string", "minLength": 1}
TOKEN_IDS: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_INTEGERS,
    "items": {"type": "integer", "minimum": 0},
}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_TEXT_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": TEXT,
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
        },
    },
}
MODEL: Schema = _optional(
    "string", "The id that /v1/models gives; absent, it is the model that is served."
)

_COMMON: dict[str, Schema] = {
    "model": MODEL,
    "max_tokens": _optional(
        "integer",
        f"Of each choice; {_DEFAULTS.max_tokens} if absent, or what the context holds.",
        minimum=1,
    ),
    "n": _optional(
        "integer", "Choices for each prompt.", minimum=1, maximum=MAX_CHOICES, default=1
    ),
    "stream": _flag("Server-sent events, the last of which is [DONE]."),
    "stream_options": _optional(
        "object",
        "How a stream tells the usage.",
        properties={
            "include_usage": _flag("In a last chunk without choices; in the others it is null."),
            "continuous_usage_stats": _flag("In each chunk, that of its choice so far."),
        },
    ),
    "stop": {
        "anyOf": [
            _STOP,
            {"type": "array", "maxItems": MAX_STOPS, "items": _STOP},
            {"type": "null"},
        ],
        "description": "The answer ends before the first of these.",
    },
    "stop_token_ids": _optional(
        "array",
        "The answer ends after any of these.",
        maxItems=MAX_STOP_TOKENS,
        items={"type": "integer", "minimum": 0},
    ),
    "ignore_eos": _flag("Go on past the end of the sequence, to max_tokens."),
    "min_tokens": _optional(
        "integer", "No end before so many tokens.", minimum=0, maximum=_INT32, default=0
    ),
    "temperature": _optional(
        "number",
        f"Below {LEAST_TEMPERATURE:g} the likeliest token is taken.",
        minimum=0,
        maximum=100,
        default=_DEFAULTS.temperature,
    ),
    "top_p": _optional("number", "", exclusiveMinimum=0, maximum=1, default=_DEFAULTS.top_p),
    "top_k": _optional(
        "integer", "0 and -1 are off.", minimum=-1, maximum=_INT32, default=_DEFAULTS.top_k
    ),
    "min_p": _optional("number", "", minimum=0, maximum=1, default=_DEFAULTS.min_p),
    "presence_penalty": _optional(
        "number", "", minimum=-2, maximum=2, default=_DEFAULTS.presence_penalty
    ),
    "frequency_penalty": _optional(
        "number", "", minimum=-2, maximum=2, default=_DEFAULTS.frequency_penalty
    ),
    "repetition_penalty": _optional(
        "number",
        "1 is off.",
        minimum=LIMITS["repetition_penalty"].least,
        maximum=LIMITS["repetition_penalty"].most,
        default=_DEFAULTS.repetition_penalty,
    ),
    "seed": _optional(
        "integer",
        "The same seed gives the same answers. The first choice of a prompt is drawn with it, "
        "the others with seeds that follow from it.",
        minimum=0,
        maximum=2**63 - 1,
    ),
    "logit_bias": _optional(
        "object",
        "Token id to what is added to its logit.",
        maxProperties=MAX_LOGIT_BIAS,
        propertyNames={"pattern": "^[0-9]{1,10}$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
    ),
    "request_id": _optional(
        "string",
        "Instead of the header x-request-id.",
        maxLength=MAX_REQUEST_ID,
        pattern="^([!-~]([ -~]*[!-~])?)?$",
    ),
    "priority": _optional("integer", "", minimum=-_INT32 - 1, maximum=_INT32, default=0),
    "cache_salt": _optional(
        "string",
        "Cached prompts are shared only with requests that give the same, within the tenant. "
        "Make it random and keep it secret, so that no other user can learn from cached_tokens or "
        "from the time to the first token what was asked before.",
        minLength=1,
        maxLength=MAX_CACHE_SALT,
    ),
    "return_token_ids": _flag("Choices carry token_ids."),
}
COMPLETION: dict[str, Schema] = _COMMON | {
    "prompt": {
        "anyOf": [
            TEXT,
            TOKEN_IDS,
            {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": TEXT},
            {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": TOKEN_IDS},
        ]
    },
    "best_of": _optional("integer", "Equal to n.", minimum=1, maximum=MAX_CHOICES),
    "echo": _flag("The text of a choice begins with its prompt's."),
    "logprobs": _optional(
        "integer", "So many of the most likely tokens.", minimum=0, maximum=MAX_LOGPROBS
    ),
}
CHAT: dict[str, Schema] = _COMMON | {
    "messages": MESSAGES,
    "max_completion_tokens": _optional("integer", "Instead of max_tokens.", minimum=1),
    "logprobs": _flag("Those of the answer's tokens."),
    "top_logprobs": _optional(
        "integer",
        "With logprobs: so many of the most likely tokens.",
        minimum=0,
        maximum=MAX_LOGPROBS,
    ),
}
TOKENIZE: dict[str, Schema] = {
    "model": MODEL,
    "prompt": TEXT,
    "messages": MESSAGES,
    "add_special_tokens": _optional(
        "boolean", "Of a prompt; a chat template writes them out.", default=True
    ),
    "return_token_strs": _flag("Give token_strs, each token as the vocabulary spells it."),
}
DETOKENIZE: dict[str, Schema] = {"model": MODEL, "tokens": TOKEN_IDS | {"minItems": 0}}

# Fields that do not affect the tokens. The parser ignores them.
PASSED_OVER = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "prediction",
    }
)
