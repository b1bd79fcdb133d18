"""OpenAI's request bodies: bytes to checked values. Pure.

A field that kvrelay does not have is an error if it would change the answer, and is passed over if not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.errors import InvalidArgument, PermissionDenied, Unimplemented
from kvrelay.wire.inference import GenerateRequest, SamplingOptions

MAX_PROMPTS = 64  # in one request
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """One HTTP request: a generation per prompt, and how the client wants to be told."""

    requests: tuple[GenerateRequest, ...]
    chat: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool


_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_INTEGERS = ("seed", "min_tokens")
_COMMON = {
    "model", "stream", "stream_options", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "top_k", "logit_bias",
    "logprobs", "request_id", "priority", "return_token_ids", *_NUMBERS, *_INTEGERS,
}  # fmt: skip
_OF_COMPLETIONS = _COMMON | {"prompt"}
_OF_CHAT = _COMMON | {"messages", "max_completion_tokens", "top_logprobs"}

# What these say has no bearing on the tokens.
_PASSED_OVER = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# Features that kvrelay lacks, with the values that ask for nothing.
_ONLY: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
# The router makes these; a client that could would read what is not its own.
_FORBIDDEN = {"chat_template", "chat_template_kwargs", "kv_transfer_params", "cache_salt"}
_TENSORS = {"prompt_embeds", "mm_processor_kwargs", "multi_modal_data"}


def load_json(body: bytes) -> Json:
    """Raises InvalidArgument for what is not one JSON object with distinct keys and finite numbers."""
    try:
        value = json.loads(body, parse_constant=_no_constant, object_pairs_hook=_distinct)
    except RecursionError:
        raise InvalidArgument("the body is nested too deeply") from None
    except ValueError as error:  # also of bytes that are not UTF-8
        raise InvalidArgument(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument("the body is not a JSON object")
    return value


def parse_completion(body: Json) -> Completion:
    _check_fields(body, _OF_COMPLETIONS)
    logprobs = _get(body, "logprobs", _integer)
    sampling = _sampling(body, _get(body, "max_tokens", _integer), logprobs)
    prompts = _prompts(body.get("prompt"))
    return _completion(body, sampling, prompts, chat=False)


def parse_chat(body: Json) -> Completion:
    _check_fields(body, _OF_CHAT)
    wanted = _get(body, "logprobs", _boolean)
    top = _get(body, "top_logprobs", _integer)
    if top is not None and not wanted:
        raise InvalidArgument("top_logprobs needs logprobs: true", field="top_logprobs")
    limit = _get(body, "max_completion_tokens", _integer)
    limit = _get(body, "max_tokens", _integer) if limit is None else limit
    sampling = _sampling(body, limit, (top or 0) if wanted else None)
    return _completion(body, sampling, [{"messages": parse_messages(body.get("messages"))}], chat=True)


def parse_messages(value: object) -> tuple[tuple[str, str], ...]:
    """(role, content) pairs. Content may come as a list of text parts."""
    if not isinstance(value, list) or not value:
        raise InvalidArgument("messages must be a list of at least one message", field="messages")
    return tuple(_message(one, position) for position, one in enumerate(value))


def _message(value: object, position: int) -> tuple[str, str]:
    where = f"messages[{position}]"
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise InvalidArgument(f"{where} must be an object with a role", field="messages")
    content = value.get("content")
    if isinstance(content, list):
        parts = [one.get("text") if isinstance(one, dict) and one.get("type") == "text" else None for one in content]
        if not all(isinstance(one, str) for one in parts):
            raise Unimplemented(f"{where} has content that is not text; this model takes text only", field="messages")
        content = "".join(str(one) for one in parts)
    if not isinstance(content, str):
        raise InvalidArgument(f"{where}.content must be text", field="messages")
    return value["role"], content


def _completion(body: Json, sampling: SamplingOptions, sources: list[dict[str, Any]], chat: bool) -> Completion:
    options = _get(body, "stream_options", _object) or {}
    request_id = _get(body, "request_id", _string) or ""
    model = _get(body, "model", _string) or ""
    priority = _get(body, "priority", _integer) or 0
    requests = []
    for number, source in enumerate(sources):
        one = f"{request_id}-{number}" if request_id and len(sources) > 1 else request_id
        requests.append(GenerateRequest(request_id=one, model=model, sampling=sampling, priority=priority, **source))
    return Completion(
        requests=tuple(requests),
        chat=chat,
        stream=_get(body, "stream", _boolean) or False,
        include_usage=_get(options, "include_usage", _boolean) or False,
        return_token_ids=_get(body, "return_token_ids", _boolean) or False,
    )


def _prompts(value: object) -> list[dict[str, Any]]:
    """Text, token ids, or a list of either, each as a source of GenerateRequest."""
    if isinstance(value, str):
        return [{"prompt": value}]
    if not isinstance(value, list) or not value:
        raise InvalidArgument("prompt must be text, token ids, or a list of either, and not empty", field="prompt")
    if all(map(_is_integer, value)):
        return [{"token_ids": _token_ids(value)}]
    if len(value) > MAX_PROMPTS:
        raise InvalidArgument(f"prompt is a list of {len(value)}; allowed are {MAX_PROMPTS}", field="prompt")
    if all(isinstance(one, str) for one in value):
        return [{"prompt": one} for one in value]
    if all(isinstance(one, list) and one and all(map(_is_integer, one)) for one in value):
        return [{"token_ids": _token_ids(one)} for one in value]
    raise InvalidArgument(
        "prompt is a list of mixed or empty entries; give texts, or lists of token ids", field="prompt"
    )


def _token_ids(value: list[int]) -> tuple[int, ...]:
    return tuple(value)


def _sampling(body: Json, max_tokens: int | None, logprobs: int | None) -> SamplingOptions:
    stop = body.get("stop")
    top_k = _get(body, "top_k", _integer)
    return SamplingOptions(
        max_tokens=max_tokens,
        top_k=0 if top_k == -1 else top_k,  # both say: off
        seed=_get(body, "seed", _integer),
        min_tokens=_get(body, "min_tokens", _integer) or 0,
        stop=(stop,) if isinstance(stop, str) else tuple(_list(body, "stop", _string)),
        stop_token_ids=tuple(_list(body, "stop_token_ids", _integer)),
        ignore_eos=_get(body, "ignore_eos", _boolean) or False,
        logit_bias=tuple(sorted(_logit_bias(body))),
        logprobs=logprobs,
        **{name: _get(body, name, _number) for name in _NUMBERS},
    )


def _logit_bias(body: Json) -> list[tuple[int, float]]:
    found = []
    for key, value in (_get(body, "logit_bias", _object) or {}).items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise InvalidArgument(f"logit_bias has the key {key!r:.40}; keys are token ids", field="logit_bias")
        found.append((int(key), _number(value, "logit_bias")))
    return found


def _check_fields(body: Json, known: set[str]) -> None:
    for name, value in body.items():
        if name in known or name in _PASSED_OVER or value is None:
            continue
        if name in _FORBIDDEN:
            raise PermissionDenied(f"{name} is not for clients to set; leave it out", field=name)
        if name in _TENSORS:
            raise Unimplemented(f"{name}: this model takes text and token ids only", field=name)
        if name not in _ONLY:
            raise InvalidArgument(f"{name!r:.60} is not a field that is known here; leave it out", field=name[:60])
        if value not in _ONLY[name]:
            allowed = " or ".join(json.dumps(one) for one in _ONLY[name])
            raise InvalidArgument(f"{name} is not supported; leave it out, or give {allowed}", field=name)


# Readers of one value: each returns it, or raises InvalidArgument.


def _get(body: Json, name: str, read: Callable[[object, str], Any]) -> Any:
    """None if it is absent or null."""
    value = body.get(name)
    return None if value is None else read(value, name)


def _list(body: Json, name: str, read: Callable[[object, str], Any]) -> list[Any]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(name, value, "a list")
    return [read(one, name) for one in value]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(value: object, name: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _wrong(name, value, "an integer")


def _number(value: object, name: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    raise _wrong(name, value, "a number")


def _boolean(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return value
    raise _wrong(name, value, "true or false")


def _string(value: object, name: str) -> str:
    if isinstance(value, str):
        return value
    raise _wrong(name, value, "text")


def _object(value: object, name: str) -> Json:
    if isinstance(value, dict):
        return value
    raise _wrong(name, value, "an object")


def _wrong(name: str, value: object, wanted: str) -> InvalidArgument:
    return InvalidArgument(f"{name} is {value!r:.60}; it must be {wanted}", field=name)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(one for one in names if names.count(one) > 1)!r:.60} stands twice")
    return found
