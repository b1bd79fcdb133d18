"""OpenAI's request bodies: JSON to checked requests. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvrelay.errors import InvalidArgument
from kvrelay.types.chat import ChatMessage, ChatOptions, ToolCall
from kvrelay.types.requests import Guidance
from kvrelay.wire.inference import SamplingOptions
from router.api.http.chat.models import Message
from router.api.http.chat.template_variables import template_kwargs
from router.api.http.chat.tool_use import ToolUse, tool_use_of
from router.api.http.completion import Completion, generate_requests
from router.api.http.dialects.openai.request_models import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from router.api.http.field_checks import OtherFields, validated
from router.api.http.structured_output import (
    guidance_of_format,
    guidance_of_outputs,
    only_guidance,
)

Json = Mapping[str, Any]

# Sampling options that the request has under the same name.
_SAMPLING = (
    *("temperature", "top_p", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)

# Fields that kvrelay does not support, with the values that have no effect.
_ONLY: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("prompt_logprobs", "allowed_token_ids", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("bad_words", "documents", "functions"), ([],)),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    **dict.fromkeys(("echo", "continue_final_message", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("return_tokens_as_token_ids", "use_beam_search"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("add_special_tokens", "add_generation_prompt"), (True,)),
    "suffix": ("",),
    "reasoning_effort": ("none",),
    "modalities": (["text"],),
}
# Fields of earlier versions of vLLM, and of SGLang, and those that replace them.
_REPLACED = {
    **{
        f"guided_{one}": f"structured_outputs.{one}"
        for one in ("json", "regex", "choice", "grammar")
    },
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
    "json_schema": "response_format, or structured_outputs.json",
}
# Fields that do not affect the tokens.
IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention"),
}
_OTHERS = OtherFields(
    frozenset(IGNORED), _ONLY, {old: f"use {new}" for old, new in _REPLACED.items()}
)


def parse_completion(body: Json, request_id: str = "") -> Completion:
    """Parses a body of /v1/completions. `request_id` is the id if the body has none. Raises a
    KvRelayError that names the field.
    """
    request = validated(CompletionRequest, body, _OTHERS)
    given = request.prompt
    prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    sources: list[dict[str, Any]] = [
        {"prompt": one} if isinstance(one, str) else {"token_ids": tuple(one)} for one in prompts
    ]
    n = _choices_per_prompt(request.n, len(sources))
    if request.best_of not in (None, n):
        raise InvalidArgument(
            f"best_of is {request.best_of}; it must equal n, {n}, since answers are not ranked",
            field="best_of",
        )
    field, guidance = _guidance(request, None)
    sampling = _sampling(request, request.max_tokens, request.logprobs, guidance)
    if request.echo:
        sampling = replace(sampling, prompt_logprobs=request.logprobs)
    completion = _completion(request, sampling, sources, n, request_id)
    return replace(completion, names={"prompt_logprobs": "logprobs", "guidance": field})


def parse_chat(body: Json, request_id: str = "") -> Completion:
    """Parses a body of /v1/chat/completions. `request_id` is the id if the body has none. Raises a
    KvRelayError that names the field.
    """
    request = validated(ChatRequest, body, _OTHERS)
    if request.top_logprobs and not request.logprobs:
        raise InvalidArgument("top_logprobs needs logprobs: true", field="top_logprobs")
    names = {"logprobs": "top_logprobs"}
    limit = request.max_tokens
    if request.max_completion_tokens is not None:
        limit = request.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    tool_use = tool_use_of(request.tools, request.tool_choice, request.parallel_tool_calls)
    names["guidance"], guidance = _guidance(request, tool_use)
    sampling = _sampling(request, limit, logprobs, guidance)
    source = {"messages": chat_messages(request.messages)}
    n = _choices_per_prompt(request.n, 1)
    completion = _completion(request, sampling, [source], n, request_id)
    return replace(
        completion,
        tool_use=tool_use,
        chat_options=ChatOptions(
            template_kwargs=template_kwargs(request.chat_template_kwargs, request.reasoning_effort)
        ),
        names=names,
    )


def parse_tokenize(body: Json) -> TokenizeRequest:
    """Parses a body of /tokenize. Raises a KvRelayError that names the field."""
    request = validated(TokenizeRequest, body, _OTHERS)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidArgument("give either prompt or messages", field="prompt")
    return request


def parse_detokenize(body: Json) -> tuple[str, list[int]]:
    """Parses a body of /detokenize into the model and the token ids. Raises a KvRelayError that
    names the field.
    """
    request = validated(DetokenizeRequest, body, _OTHERS)
    return request.model or "", request.tokens


def chat_messages(messages: list[Message]) -> tuple[ChatMessage, ...]:
    """Returns the conversation. The text parts of a content are joined."""
    return tuple(
        ChatMessage(
            role=one["role"],
            content=_content(one),
            tool_calls=tuple(
                ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
                for call in one.get("tool_calls") or ()
            ),
            reasoning=one.get("reasoning_content"),
            tool_call_id=one.get("tool_call_id"),
            name=one.get("name"),
        )
        for one in messages
    )


def _content(message: Message) -> str | None:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    if content is None and message["role"] == "assistant" and not message.get("tool_calls"):
        # An answer that max_tokens has cut before its first text, which clients send back as it is.
        return ""
    return content


def _completion(
    body: CompletionRequest | ChatRequest,
    sampling: SamplingOptions,
    sources: list[dict[str, Any]],
    n: int,
    request_id: str,
) -> Completion:
    reports = body.stream_options or {}
    request_id = body.request_id or request_id
    return Completion(
        request_id=request_id,
        requests=generate_requests(body, sampling, sources, n, request_id),
        n=n,
        chat=isinstance(body, ChatRequest),
        stream=body.stream or False,
        include_usage=reports.get("include_usage") or False,
        continuous_usage=reports.get("continuous_usage_stats") or False,
        return_token_ids=body.return_token_ids or False,
        echo=isinstance(body, CompletionRequest) and body.echo is True,
    )


def _choices_per_prompt(given: int | None, num_prompts: int) -> int:
    n = 1 if given is None else given
    if n * num_prompts > MAX_CHOICES:
        raise InvalidArgument(
            f"n is {n} for {num_prompts} prompts; allowed are {MAX_CHOICES} choices in one request",
            field="n",
        )
    return n


def _sampling(
    body: CompletionRequest | ChatRequest,
    max_tokens: int | None,
    logprobs: int | None,
    guidance: Guidance | None,
) -> SamplingOptions:
    stop = () if body.stop is None else body.stop
    bias = body.logit_bias or {}
    budget = body.thinking_token_budget
    return SamplingOptions(
        max_tokens=max_tokens,
        # Both -1 and 0 disable top_k.
        top_k=0 if body.top_k == -1 else body.top_k,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos or False,
        min_tokens=body.min_tokens or 0,
        logit_bias=tuple(sorted((int(key), value) for key, value in bias.items())),
        logprobs=logprobs,
        guidance=guidance,
        thinking_token_budget=None if budget == -1 else budget,
        **{name: getattr(body, name) for name in _SAMPLING},
    )


def _guidance(
    body: CompletionRequest | ChatRequest, use: ToolUse | None
) -> tuple[str, Guidance | None]:
    """Returns the grammar that the answer follows, with the field that gives it. Raises
    InvalidArgument.
    """
    return only_guidance(
        use,
        response_format=guidance_of_format(body.response_format),
        structured_outputs=guidance_of_outputs(body.structured_outputs),
    )
