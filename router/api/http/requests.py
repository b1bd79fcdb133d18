"""OpenAI's request bodies: JSON to checked values. Pure.

A field that kvrelay does not support is an error if it would change the answer. Otherwise it is
ignored.
"""

from __future__ import annotations

import json
import reprlib
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from kvrelay.errors import InvalidArgument, PermissionDenied, Unimplemented
from kvrelay.sampling_limits import MAX_LOGIT_BIAS, MAX_STOP_TOKENS
from kvrelay.wire.inference import GenerateRequest, SamplingOptions
from router.api.http.json_parser import MAX_INTEGERS, json_steps
from router.api.http.schemas import CHAT, COMPLETION, DETOKENIZE, MAX_CHOICES, PASSED_OVER, TOKENIZE
from router.frontend.validation import MAX_MESSAGES, MAX_STOPS

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """One HTTP request: `n` generations per prompt, and the options of the response.

    `requests` are in the order of the choices: all of the first prompt, then all of the second, ...
    """

    # Id of the HTTP request. With several choices, each choice's id begins with it.
    request_id: str
    requests: tuple[GenerateRequest, ...]
    n: int
    chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    echo: bool

    def without_prompts(self) -> Completion:
        """Returns a copy without prompts, messages and token ids, so that their memory is freed."""
        requests = tuple(
            replace(one, prompt=None, messages=(), token_ids=()) for one in self.requests
        )
        return replace(self, requests=requests)


@dataclass(frozen=True, slots=True)
class Tokenize:
    """A request to /tokenize: either a prompt or (role, content) pairs."""

    model: str
    prompt: str | None
    messages: tuple[tuple[str, str], ...]
    add_special_tokens: bool
    return_token_strs: bool


_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_SEED = 2**63 - 1

# Fields that kvrelay does not support, with the values that have no effect.
_ONLY: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "reasoning_effort": ("none",),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "length_penalty": (1,),
    "return_tokens_as_token_ids": (False,),
    "documents": ([],),
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
# The router sets these values, under any name that other servers use. A client that could set them
# would read other clients' data.
_FORBIDDEN = {
    *("chat_template", "chat_template_kwargs"),
    *("kv_transfer_params", "ec_transfer_params", "lease_id", "worker_id", "nvext"),
    *(
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "disagg_prefill_dp_rank",
        "data_parallel_rank",
    ),
}
# Shows a client's value at the cost of a few characters.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60
_TENSORS = {"prompt_embeds", "mm_processor_kwargs", "multi_modal_data"}


def object_steps(body: deque[bytes]) -> Generator[int, None, Json]:
    """Parses a body in the steps of router.api.http.json_parser, which takes the parts from the
    deque.

    Raises InvalidArgument if the body is not one JSON object with distinct keys and finite numbers.
    """
    value = yield from json_steps(body)
    if not isinstance(value, dict):
        raise InvalidArgument("the body is not a JSON object")
    return value


def load_json(body: bytes) -> Json:
    """Parses a body like `object_steps`, without pauses."""
    steps = object_steps(deque([body]))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Json = end.value
            return found


def parse_completion(body: Json, request_id: str = "") -> Completion:
    """Parses a body of /v1/completions. `request_id` is the id if the body has none. Raises a
    KvRelayError that names the field.
    """
    _check_fields(body, COMPLETION)
    logprobs = _get(body, "logprobs", _integer)
    echo = _get(body, "echo", _boolean) or False
    if echo and logprobs is not None:
        raise InvalidArgument(
            "echo with logprobs asks for the prompt's logprobs, which are not computed; leave one "
            "of them out",
            field="logprobs",
        )
    sampling = _sampling(body, _get(body, "max_tokens", _integer), logprobs)
    return _completion(
        body, sampling, _prompts(body.get("prompt")), request_id, chat=False, echo=echo
    )


def parse_chat(body: Json, request_id: str = "") -> Completion:
    """Parses a body of /v1/chat/completions. `request_id` is the id if the body has none. Raises a
    KvRelayError that names the field.
    """
    _check_fields(body, CHAT)
    wanted = _get(body, "logprobs", _boolean)
    top = _get(body, "top_logprobs", _integer)
    if top and not wanted:
        raise InvalidArgument("top_logprobs needs logprobs: true", field="top_logprobs")
    limit = _get(body, "max_completion_tokens", _integer)
    limit = _get(body, "max_tokens", _integer) if limit is None else limit
    sampling = _sampling(body, limit, (top or 0) if wanted else None)
    source = {"messages": parse_messages(body.get("messages"))}
    return _completion(body, sampling, [source], request_id, chat=True, echo=False)


def parse_tokenize(body: Json) -> Tokenize:
    """Parses a body of /tokenize. Raises a KvRelayError that names the field."""
    _check_fields(body, TOKENIZE)
    messages = body.get("messages")
    prompt = _get(body, "prompt", _string)
    if (prompt is None) == (messages is None):
        raise InvalidArgument("give either prompt or messages", field="prompt")
    return Tokenize(
        model=_get(body, "model", _string) or "",
        prompt=prompt,
        messages=() if messages is None else parse_messages(messages),
        add_special_tokens=_get(body, "add_special_tokens", _boolean) is not False,
        return_token_strs=_get(body, "return_token_strs", _boolean) or False,
    )


def parse_detokenize(body: Json) -> tuple[str, list[int]]:
    """Parses a body of /detokenize into the model and the token ids. Raises a KvRelayError that
    names the field.
    """
    _check_fields(body, DETOKENIZE)
    if body.get("tokens") is None:
        raise InvalidArgument("tokens must be a list of token ids", field="tokens")
    return _get(body, "model", _string) or "", _integers(body["tokens"], "tokens")


def parse_messages(value: object) -> tuple[tuple[str, str], ...]:
    """Returns (role, content) pairs. Content may be a list of text parts. Raises InvalidArgument,
    or Unimplemented for content that is not text.
    """
    if not isinstance(value, list) or not value:
        raise InvalidArgument("messages must be a list of at least one message", field="messages")
    _check_length(value, "messages", MAX_MESSAGES)
    return tuple(_message(one, position) for position, one in enumerate(value))


def _message(value: object, position: int) -> tuple[str, str]:
    where = f"messages[{position}]"
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise InvalidArgument(f"{where} must be an object with a role", field="messages")
    if value.get("tool_calls") or value.get("function_call"):
        raise InvalidArgument(f"{where} has tool calls, which are not supported", field="messages")
    content = value.get("content")
    if isinstance(content, list):
        parts = [
            one.get("text") if isinstance(one, dict) and one.get("type") == "text" else None
            for one in content
        ]
        if not all(isinstance(one, str) for one in parts):
            raise Unimplemented(
                f"{where} has content that is not text; this model takes text only",
                field="messages",
            )
        content = "".join(str(one) for one in parts)
    if not isinstance(content, str):
        raise InvalidArgument(f"{where}.content must be text", field="messages")
    return value["role"], content


def _completion(
    body: Json,
    sampling: SamplingOptions,
    sources: list[dict[str, Any]],
    request_id: str,
    *,
    chat: bool,
    echo: bool,
) -> Completion:
    options = _get(body, "stream_options", _object) or {}
    n = _choices_per_prompt(body, len(sources))
    request_id = _get(body, "request_id", _string) or request_id
    model = _get(body, "model", _string) or ""
    priority = _get(body, "priority", _integer) or 0
    cache_salt = _get(body, "cache_salt", _string)
    requests = []
    for number in range(len(sources) * n):
        prompt, choice = divmod(number, n)
        one = f"{request_id}-{number}" if request_id and len(sources) * n > 1 else request_id
        seed = sampling.seed if choice == 0 else _seed_of(sampling.seed, choice)
        requests.append(
            GenerateRequest(
                request_id=one,
                model=model,
                sampling=sampling if seed == sampling.seed else replace(sampling, seed=seed),
                priority=priority,
                cache_salt=cache_salt,
                **sources[prompt],
            )
        )
    return Completion(
        request_id=request_id,
        requests=tuple(requests),
        n=n,
        chat=chat,
        stream=_get(body, "stream", _boolean) or False,
        include_usage=_get(options, "include_usage", _boolean) or False,
        continuous_usage=_get(options, "continuous_usage_stats", _boolean) or False,
        return_token_ids=_get(body, "return_token_ids", _boolean) or False,
        echo=echo,
    )


def _choices_per_prompt(body: Json, num_prompts: int) -> int:
    n: int = _get(body, "n", _integer) or 1
    if body.get("n") == 0 or not 1 <= n * num_prompts <= MAX_CHOICES:
        raise InvalidArgument(
            f"n is {body['n']!s:.20} for {num_prompts} prompts; allowed is 1 or more, and "
            f"{MAX_CHOICES} choices in one request",
            field="n",
        )
    best_of = _get(body, "best_of", _integer)
    if best_of not in (None, n):
        raise InvalidArgument(
            f"best_of is {best_of!s:.20}; it must equal n, {n}, since answers are not ranked",
            field="best_of",
        )
    return n


def _seed_of(seed: int | None, choice: int) -> int | None:
    """Returns the seed of a prompt's second or later choice: 63 bits of the XXH3 hash of
    "SEED-CHOICE", both in decimal.

    Without a seed, admission derives a seed from the request id, so each choice has its own.
    """
    if seed is None or not 0 <= seed <= _SEED:
        # Validation rejects this seed.
        return seed
    return xxhash.xxh3_64_intdigest(f"{seed}-{choice}".encode()) & _SEED


def _prompts(value: object) -> list[dict[str, Any]]:
    """Parses a prompt: text, token ids, or a list of either. Returns keyword arguments of
    GenerateRequest for each prompt.
    """
    if isinstance(value, str):
        return [{"prompt": value}]
    if not isinstance(value, list) or not value:
        raise InvalidArgument(
            "prompt must be text, token ids, or a list of either, and not empty", field="prompt"
        )
    if set(map(type, value)) == {int}:
        return [{"token_ids": tuple(value)}]
    if len(value) > MAX_CHOICES:
        raise InvalidArgument(
            f"prompt is a list of {len(value)}; allowed are {MAX_CHOICES}", field="prompt"
        )
    if all(isinstance(one, str) for one in value):
        return [{"prompt": one} for one in value]
    if all(isinstance(one, list) and set(map(type, one)) == {int} for one in value):
        return [{"token_ids": tuple(one)} for one in value]
    raise InvalidArgument(
        "prompt is a list of mixed or empty entries; give texts, or lists of token ids",
        field="prompt",
    )


def _sampling(body: Json, max_tokens: int | None, logprobs: int | None) -> SamplingOptions:
    stop = body.get("stop")
    top_k = _get(body, "top_k", _integer)
    return SamplingOptions(
        max_tokens=max_tokens,
        # Both -1 and 0 disable top_k.
        top_k=0 if top_k == -1 else top_k,
        seed=_get(body, "seed", _integer),
        min_tokens=_get(body, "min_tokens", _integer) or 0,
        stop=(stop,) if isinstance(stop, str) else tuple(_list(body, "stop", _string, MAX_STOPS)),
        stop_token_ids=tuple(_list(body, "stop_token_ids", _integer, MAX_STOP_TOKENS)),
        ignore_eos=_get(body, "ignore_eos", _boolean) or False,
        logit_bias=tuple(sorted(_logit_bias(body))),
        logprobs=logprobs,
        **{name: _get(body, name, _number) for name in _NUMBERS},
    )


def _logit_bias(body: Json) -> list[tuple[int, float]]:
    found = []
    given = _get(body, "logit_bias", _object) or {}
    _check_length(given, "logit_bias", MAX_LOGIT_BIAS)
    for key, value in given.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise InvalidArgument(
                f"logit_bias has the key {key[:40]!r}; keys are token ids", field="logit_bias"
            )
        found.append((int(key), _number(value, "logit_bias")))
    return found


def _check_fields(body: Json, known: Collection[str]) -> None:
    for name, value in body.items():
        if name in known or name in PASSED_OVER or value is None:
            continue
        if name in _FORBIDDEN:
            raise PermissionDenied(f"{name} is not for clients to set; leave it out", field=name)
        if name in _TENSORS:
            raise Unimplemented(f"{name}: this model takes text and token ids only", field=name)
        if name not in _ONLY:
            raise InvalidArgument(
                f"{name[:60]!r} is not a field that is known here; leave it out", field=name[:60]
            )
        if value not in _ONLY[name]:
            allowed = "".join(f", or give {json.dumps(one)}" for one in _ONLY[name])
            raise InvalidArgument(f"{name} is not supported; leave it out{allowed}", field=name)


# Readers of one value. Each reader returns the value or raises InvalidArgument.


def _get(body: Json, name: str, read: Callable[[object, str], Any]) -> Any:
    """Returns the value, or None if it is absent or null."""
    value = body.get(name)
    return None if value is None else read(value, name)


def _list(body: Json, name: str, read: Callable[[object, str], Any], most: int) -> list[Any]:
    """Returns a list of at most `most` values. Each value is passed through `read`. Absent and null
    give an empty list.
    """
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(name, value, "a list")
    _check_length(value, name, most)
    return [read(one, name) for one in value]


def _integers(value: object, name: str) -> list[int]:
    """Checks a list of integers. It is fast enough for long lists."""
    if not isinstance(value, list):
        raise _wrong(name, value, "a list")
    _check_length(value, name, MAX_INTEGERS)
    if value and set(map(type, value)) != {int}:
        raise _wrong(name, next(one for one in value if type(one) is not int), "a list of integers")
    return value


def _check_length(value: Collection[object], name: str, most: int) -> None:
    if len(value) > most:
        raise InvalidArgument(f"{name} has {len(value)} entries; allowed are {most}", field=name)


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
    return InvalidArgument(f"{name} is {_SHORT.repr(value):.60}; it must be {wanted}", field=name)
