"""Requests that must be refused: what is wrong with each, how it is asked, and the status that it
must get.

A row has a body for the HTTP endpoint, a request for the gRPC endpoint, or both. `path` is the HTTP
route.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from kvrelay.errors import Code
from kvrelay.types.chat import ChatMessage
from kvrelay.types.requests import Slo
from kvrelay.wire.inference import GenerateRequest, SamplingOptions, pb, request_to_proto

PROMPT = (10, 11, 12)
GOOD = GenerateRequest(token_ids=PROMPT, sampling=SamplingOptions(max_tokens=3, seed=7))
GOOD_BODY: dict[str, Any] = {
    "model": "demo",
    "prompt": list(PROMPT),
    "max_tokens": 3,
    "seed": 7,
    "return_token_ids": True,
}
CONTEXT = 4096
VOCAB = 2048
BAD, FORBIDDEN, UNKNOWN, LACKING = (
    *(Code.INVALID_ARGUMENT, Code.PERMISSION_DENIED, Code.NOT_FOUND, Code.UNIMPLEMENTED),
)


@dataclass(frozen=True)
class Row:
    name: str
    code: Code
    field: str = ""  # that the error names
    body: bytes | None = None  # of the HTTP request
    message: bytes | None = None  # a GenerateRequest on the wire
    path: str = "/v1/completions"


def both(name: str, field: str, value: Any, code: Code = BAD) -> Row:
    """A sampling option, by the same name at both endpoints."""
    message = pb.GenerateRequest()
    message.CopyFrom(request_to_proto(GOOD))
    try:
        if isinstance(value, list):
            del getattr(message.sampling, field)[:]
            getattr(message.sampling, field).extend(value)
        elif isinstance(value, dict):
            getattr(message.sampling, field).update({int(key): one for key, one in value.items()})
        else:
            setattr(message.sampling, field, value)
    except (TypeError, ValueError):
        return http(name, field, {field: value}, code)  # no message can hold it
    numbers = value.values() if isinstance(value, dict) else [value]
    finite = all(math.isfinite(one) for one in numbers if isinstance(one, float))
    # JSON has no words for others, so the body is refused before its fields are looked at.
    over_http = (
        http(name, field, {field: value}, code) if finite else raw(name, _json({field: value}))
    )
    return Row(name, code, field, over_http.body, message.SerializeToString())


def http(
    name: str, field: str, more: dict[str, Any], code: Code = BAD, path: str = "/v1/completions"
) -> Row:
    return Row(name, code, field, _json(more), path=path)


def _json(more: dict[str, Any]) -> bytes:
    return json.dumps(GOOD_BODY | more).encode()


def raw(name: str, body: bytes, path: str = "/v1/completions") -> Row:
    return Row(name, BAD, body=body, path=path)


def chat(name: str, field: str, body: dict[str, Any], code: Code = BAD) -> Row:
    return Row(name, code, field, json.dumps(body).encode(), path="/v1/chat/completions")


def grpc(name: str, field: str, request: GenerateRequest, code: Code = BAD) -> Row:
    return Row(name, code, field, message=request_to_proto(request).SerializeToString())


def _spoiled_text(good: bytes) -> bytes:
    """The message with a byte in its prompt that is no UTF-8."""
    return good.replace(b"Once", b"On\xffe")


_TEXT = request_to_proto(
    GenerateRequest(prompt="Once upon a time", sampling=GOOD.sampling)
).SerializeToString()
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_IDS = {
    "CRLF": "a\r\nx-evil: 1",
    "control characters": "a\x07\x1b[2J",
    "10 kB": "x" * 10_240,
    "a space at its end": "a ",
}
_USER = [{"role": "user", "content": "hello"}]

ROWS = (
    # Prompts
    http("empty prompt", "prompt", {"prompt": ""}),
    grpc("empty prompt", "prompt", replace(GOOD, token_ids=(), prompt="")),
    http("empty list for a prompt", "prompt", {"prompt": []}),
    http("no prompt", "prompt", {"prompt": None}),
    grpc("no prompt", "prompt", replace(GOOD, token_ids=())),
    grpc("two prompts", "token_ids", replace(GOOD, prompt="Once")),
    chat("no messages", "messages", {"messages": []}),
    chat("a message without a role", "messages", {"messages": [{"content": "x"}]}),
    *(
        http(f"token id {one}", "prompt", {"prompt": [10, one]})
        for one in (VOCAB, -1, 2**31, 2**63, 10**30)
    ),
    *(
        grpc(f"token id {one}", "token_ids", replace(GOOD, token_ids=(10, one)))
        for one in (VOCAB, -1, 2**31 - 1)
    ),
    grpc("resumed token id out of range", "resume", replace(GOOD, resume=(VOCAB,))),
    raw("bad UTF-8", b'{"prompt": "On\xffe upon a time"}'),
    Row("bad UTF-8", BAD, message=_spoiled_text(_TEXT)),
    Row("no message at all", BAD, message=b"\xff" * 40),
    chat("NUL in a role", "messages", {"messages": [{"role": "us\0er", "content": "a"}]}),
    grpc("NUL in a role", "messages", GenerateRequest(messages=(ChatMessage("us\0", "a"),))),
    http("half of a surrogate pair", "prompt", {"prompt": "\ud800"}),
    http("prompt over the context", "prompt", {"prompt": [10] * CONTEXT}),
    grpc("prompt over the context", "token_ids", replace(GOOD, token_ids=(10,) * CONTEXT)),
    http("text over the context", "prompt", {"prompt": "word " * CONTEXT}),
    # Numbers
    both("prompt and max_tokens over the context", "max_tokens", CONTEXT - len(PROMPT) + 1),
    *(both(f"max_tokens {one}", "max_tokens", one) for one in (0, -1, 2**31 - 1, 2**31, 10**30)),
    *(http(f"n {one}", "n", {"n": one}) for one in (10**9, 0, -1, 2**63, 10**30, 1.5, True)),
    *(
        both(f"{name} {one}", name, one)
        for name in _NUMBERS
        for one in (math.nan, math.inf, -math.inf, -3.0, 1e300)
    ),
    both("top_p 0", "top_p", 0.0),
    both("top_k below -1", "top_k", -2),
    *(both(f"seed {one}", "seed", one) for one in (-1, 2**63, 10**30)),
    *(both(f"logprobs {one}", "logprobs", one) for one in (-1, 21, 10**6)),
    chat(
        "top_logprobs over the cap",
        "top_logprobs",
        {"messages": _USER, "logprobs": True, "top_logprobs": 10**6},
    ),
    Row("infinite by its exponent", BAD, "", b'{"prompt": "a", "temperature": 1e999}'),
    # Lists
    both("logit_bias of a token that there is not", "logit_bias", {str(VOCAB): 1.0}),
    both("logit_bias that is negative a token", "logit_bias", {"-1": 1.0}),
    both("logit_bias over 100", "logit_bias", {"5": 1e6}),
    both("logit_bias that is no number", "logit_bias", {"5": math.nan}),
    both("10,000 entries of logit_bias", "logit_bias", {str(one): 1.0 for one in range(2000)}),
    http("logit_bias by words", "logit_bias", {"logit_bias": {"hello": 1}}),
    both("10,000 stop strings", "stop", ["x"] * 10**4),
    both("empty stop string", "stop", [""]),
    both("stop string of 10 kB", "stop", ["x" * 10_240]),
    both("stop string with NUL", "stop", ["a\0"]),
    both("10,000 stop tokens", "stop_token_ids", [5] * 10**4),
    both("stop token that there is not", "stop_token_ids", [VOCAB]),
    # Names
    *(
        http(f"request id with {what}", "request_id", {"request_id": one})
        for what, one in _IDS.items()
    ),
    *(
        grpc(f"request id with {what}", "request_id", replace(GOOD, request_id=one))
        for what, one in _IDS.items()
    ),
    http("unknown model", "model", {"model": "gpt-9"}, UNKNOWN),
    *(
        row
        for name, salt in (("empty", ""), ("of 257 characters", "x" * 257), ("with a NUL", "a\0b"))
        for row in (
            http(f"cache_salt {name}", "cache_salt", {"cache_salt": salt}),
            grpc(f"cache_salt {name}", "cache_salt", replace(GOOD, cache_salt=salt)),
        )
    ),
    http("a cache_salt that is no text", "cache_salt", {"cache_salt": 7}),
    http("an slo that is no object", "slo", {"slo": 500}),
    *(
        row
        for name in ("ttft_ms", "itl_ms")
        for value in (0.0, -5.0, 1e10)
        for row in (
            http(f"slo.{name} of {value:g}", "slo", {"slo": {name: value}}),
            grpc(
                f"slo.{name} of {value:g}", f"slo.{name}", replace(GOOD, slo=Slo(**{name: value}))
            ),
        )
    ),
    grpc("an slo that is no number", "slo.itl_ms", replace(GOOD, slo=Slo(itl_ms=float("nan")))),
    http("an slo of text", "slo", {"slo": {"ttft_ms": "500"}}),
    grpc("unknown model", "model", replace(GOOD, model="gpt-9"), UNKNOWN),
    http("model that is no text", "model", {"model": ["demo"]}),
    # JSON
    raw("JSON nested 100,000 deep", b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"),
    raw(
        "JSON objects nested 100,000 deep",
        b'{"prompt": "a", "logit_bias": ' + b'{"a":' * 10**5 + b"1" + b"}" * 10**5 + b"}",
    ),
    raw("a key twice", b'{"prompt": "a", "prompt": "b"}'),
    raw("NaN in JSON", b'{"prompt": "a", "temperature": NaN}'),
    raw("infinity in JSON", b'{"prompt": "a", "temperature": -Infinity}'),
    raw("a number of 5,000 digits", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"),
    raw("no JSON", b"prompt=a"),
    raw("no object", b"[]"),
    raw("nothing", b""),
    http("unknown field", "promt", {"promt": "a"}),
    # What the router makes
    *(
        http(f"client's own {name}", name, {name: value}, FORBIDDEN)
        for name, value in {
            "chat_template": "{{ 7 * 7 }}",
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "remote_host": "10.0.0.1",
                "remote_block_ids": [1],
            },
            "bootstrap_host": "10.0.0.1",
            "bootstrap_port": 8998,
            "bootstrap_room": 1,
            "disagg_prefill_dp_rank": 0,
            "nvext": {"backend_instance_id": 1},
            "worker_id": "decode-0",
            "lease_id": 1,
        }.items()
    ),
    chat(
        "client's own template",
        "chat_template",
        {"messages": _USER, "chat_template": "{{ 7 }}"},
        FORBIDDEN,
    ),
    # What text models do not take
    http("prompt embeddings", "prompt_embeds", {"prompt_embeds": "gASVAAA="}, LACKING),
    http("tensors", "multi_modal_data", {"multi_modal_data": {"image": [0.0]}}, LACKING),
    chat(
        *("an image", "messages"),
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}],
                }
            ]
        },
        LACKING,
    ),
)
