"""From the keyword arguments of `generate` to a request."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from kvrelay.errors import InvalidArgument
from kvrelay.wire.inference import GenerateRequest, SamplingOptions

Message = Mapping[str, str] | tuple[str, str]  # {"role": ..., "content": ...}, or the pair


class GenerateOptions(TypedDict, total=False):
    """What `generate` takes besides the prompt. What is left out, or None, takes the cluster's
    default.

    Give one of prompt, messages and token_ids. The client draws a `seed` when there is none, so
    that an answer which goes on at another router goes on as it would have. `resume` holds token
    ids of this very answer from an earlier process; give the same seed with it, and the fingerprint
    that came with them.

    Requests share cached KV with those of the same tenant and `cache_salt` only. Give each user a
    secret one, and nobody else can tell by the time to the first token what that user has asked
    before.
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
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    request_id: str | None
    priority: int | None  # lower goes first
    resume: Sequence[int] | None
    cache_salt: str | None
    system_fingerprint: str | None  # of the model that gave the tokens in `resume`


_SAMPLING = frozenset(one.name for one in fields(SamplingOptions))
_SEQUENCES = frozenset({"token_ids", "stop", "stop_token_ids", "resume"})


def build_request(prompt: str | None, options: GenerateOptions) -> GenerateRequest:
    """Raises InvalidArgument, naming the field, for values of the wrong kind; the router checks the
    rest.
    """
    given: dict[str, Any] = {"seed": secrets.randbits(63)}
    for name, value in options.items():
        if name not in GenerateOptions.__annotations__:
            raise TypeError(f"generate() got an unexpected keyword argument {name!r}")
        if value is not None:
            given[name] = _plain(name, value)
    if sum(one is not None for one in (prompt, given.get("messages"), given.get("token_ids"))) != 1:
        raise InvalidArgument("give exactly one of prompt, messages and token_ids", field="prompt")
    sampling = SamplingOptions(
        **{name: value for name, value in given.items() if name in _SAMPLING}
    )
    rest = {name: value for name, value in given.items() if name not in _SAMPLING}
    return GenerateRequest(prompt=prompt, sampling=sampling, **rest)


def _plain(name: str, value: Any) -> Any:
    """The value as the request holds it: tuples all the way down."""
    try:
        match name:
            case "messages":
                return tuple(
                    (one["role"], one["content"]) if isinstance(one, Mapping) else tuple(one)
                    for one in value
                )
            case "logit_bias":
                return tuple(sorted(value.items()))
            case "stop" if isinstance(value, str):
                return (value,)
            case _:
                return tuple(value) if name in _SEQUENCES else value
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{name}: cannot use {value!r:.80}: {error}", field=name) from error
