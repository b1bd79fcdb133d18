"""Builds a request from the keyword arguments of `generate`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, TypedDict

from kvrelay.error_value import shown
from kvrelay.errors import InvalidArgument
from kvrelay.types.chat import ChatMessage
from kvrelay.types.requests import Guidance, Slo
from kvrelay.wire.inference import GenerateRequest, SamplingOptions

# {"role": ..., "content": ...}, or the pair.
Message = Mapping[str, str] | tuple[str, str]


class GenerateOptions(TypedDict, total=False):
    """The options of `generate` besides the prompt. An option that is missing or None takes the
    cluster's default.

    Give exactly one of prompt, messages and token_ids. Without a `seed`, the client draws one, so
    that an answer that continues at another router continues with the same tokens. `resume` holds
    the token ids that an earlier process received of the same answer; give the same seed and the
    fingerprint of these tokens with it.

    Requests share cached KV only with requests of the same tenant and the same `cache_salt`. Give
    each user a secret salt: then no other user can infer earlier prompts from the time to first
    token.
    """

    messages: Sequence[Message] | None
    token_ids: Sequence[int] | None
    model: str | None
    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    min_tokens: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    logprobs: int | None
    # Number of most likely tokens at each place of the prompt.
    prompt_logprobs: int | None
    # Most tokens of thinking; then its end follows.
    thinking_token_budget: int | None
    # A grammar that the answer follows: {"json_schema": ...}, {"regex": ...} or {"lark": ...}. A
    # schema may be a dict.
    guidance: Guidance | Mapping[str, Any] | None
    request_id: str | None
    # Lower values run first.
    priority: int | None
    resume: Sequence[int] | None
    cache_salt: str | None
    # Latencies to aim for in milliseconds, if larger than the cluster's: ttft_ms and itl_ms.
    slo: Slo | Mapping[str, float] | None
    # Fingerprint of the model that gave the tokens in `resume`.
    system_fingerprint: str | None


_SAMPLING = frozenset(one.name for one in fields(SamplingOptions))
_SEQUENCES = frozenset({"token_ids", "stop", "stop_token_ids", "resume"})
_A_MESSAGE = (
    'each message must be {"role": "user", "content": "text"}, or the pair of role and content'
)
_A_BIAS = "it must map token ids to numbers"


def build_request(prompt: str | None, options: GenerateOptions) -> GenerateRequest:
    """Raises InvalidArgument, naming the field, for values of the wrong type. The router checks
    everything else. Raises TypeError for an unknown option.
    """
    given: dict[str, Any] = {"seed": secrets.randbits(63)}
    for name, value in options.items():
        if name not in GenerateOptions.__annotations__:
            raise TypeError(f"generate() got an unexpected keyword argument {name!r}")
        if value is not None:
            given[name] = _plain(name, value)
    if sum(one is not None for one in (prompt, given.get("messages"), given.get("token_ids"))) != 1:
        raise InvalidArgument(
            "exactly one of prompt, messages and token_ids must be given", field="prompt"
        )
    sampling = SamplingOptions(
        **{name: value for name, value in given.items() if name in _SAMPLING}
    )
    rest = {name: value for name, value in given.items() if name not in _SAMPLING}
    return GenerateRequest(prompt=prompt, sampling=sampling, **rest)


def _plain(name: str, value: Any) -> Any:
    """Returns the value in the form that the request holds: nested tuples."""
    try:
        match name:
            case "messages" if isinstance(value, str | Mapping):
                raise TypeError(f"it must be a list of messages; {_A_MESSAGE}")
            case "messages":
                return tuple(map(_message, value))
            case "slo" if not isinstance(value, Slo):
                return _slo(value)
            case "guidance" if not isinstance(value, Guidance):
                return _guidance(value)
            case "logit_bias":
                return _logit_bias(value)
            case "ignore_eos" if not isinstance(value, int):
                raise TypeError("it must be true or false")
            case "stop" if isinstance(value, str):
                return (value,)
            case _ if name in _SEQUENCES and not isinstance(value, Iterable):
                raise TypeError("it must be a list")
            case _ if isinstance(value, bool) and name != "ignore_eos":
                raise TypeError("only ignore_eos can be true or false")
            case _:
                return tuple(value) if name in _SEQUENCES else value
    # Numbers may be beyond what a float or a text holds.
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{name}: {shown(value)} is invalid: {error}", field=name) from error


def _message(one: Any) -> ChatMessage:
    match one:
        case {"role": str(role), "content": str(content)} | (str(role), str(content)):
            return ChatMessage(role, content)
        case ChatMessage():
            return one
    raise TypeError(f"{_A_MESSAGE}, not {shown(one)}")


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """Returns the entries in ascending order. Keys may be text, because those of JSON are."""
    if not isinstance(value, Mapping):
        raise TypeError(_A_BIAS)
    entries = []
    for key, bias in value.items():
        is_id = key.isdecimal() if isinstance(key, str) else isinstance(key, Integral)
        if not is_id or not isinstance(bias, Real):
            raise TypeError(f"{_A_BIAS}, not {shown({key: bias})}")
        entries.append((int(key), float(bias)))
    return tuple(sorted(entries))


def _slo(value: object) -> Slo:
    names = [one.name for one in fields(Slo)]
    if not isinstance(value, Mapping) or not value.keys() <= set(names):
        raise TypeError(f"it may have {' and '.join(names)}, in milliseconds, and nothing else")
    return Slo(**value)


def _guidance(value: object) -> Guidance:
    if isinstance(value, Mapping):
        match [(kind, source) for kind, source in value.items() if source is not None]:
            case [("json_schema", schema)]:
                source = schema if isinstance(schema, str) else json.dumps(schema)
                return Guidance("json_schema", source)
            case [("regex" | "lark" as kind, str(source))]:
                return Guidance(kind, source)
    raise TypeError("give exactly one of json_schema, regex and lark")
