"""Requests that cost their sender little and a careless router much; at any size, for tests and
benchmarks.

Each generator takes a size in bytes and gives a request of about that size. `HTTP_BODIES` has
bodies of POST requests, `GRPC_MESSAGES` serialized GenerateRequests, `HTTP_WIRE` what is written to
a connection as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable

Body = Callable[[int], bytes]

MIB = 2**20
PROMPT = b'{"prompt":'
CHAT = b'{"messages":'


def _field(number: int, data: bytes) -> bytes:
    """A protobuf field with a length."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))


def _repeat(part: bytes, size: int) -> bytes:
    return part * max(1, size // len(part))


def _items(open_: bytes, item: bytes, size: int) -> bytes:
    """A list as the value of the last field of a body."""
    return open_ + b"[" + _repeat(item + b",", size) + item + b"]}"


def distinct_keys(size: int) -> bytes:
    """An object of distinct keys, of which the last stands twice: to be told by a search through
    all pairs.
    """
    keys, length = [], 0
    while length < size:
        keys.append(f'"{len(keys)}":0')
        length += len(keys[-1]) + 1
    return ('{"metadata":{' + ",".join([*keys, keys[-1]]) + "}}").encode()


def nested_objects(size: int) -> bytes:
    return b'{"tools":' + _repeat(b'{"a":', size) + b"1"


def text_of(word: str) -> Body:
    """A prompt of one word over and over."""

    def body(size: int) -> bytes:
        return json.dumps(
            {"prompt": word * max(1, size // len(word.encode()))}, ensure_ascii=False
        ).encode()

    return body


def conversation(size: int) -> bytes:
    """As many messages as are allowed, with long texts."""
    number = min(4096, max(1, size // 64))
    return json.dumps(
        {"messages": [{"role": "user", "content": "a" * (size // number)}] * number}
    ).encode()


def all_maxima(size: int) -> bytes:
    """Each list of a completion as long as it may be, and the prompt as long as the rest allows."""
    lists = {
        "stop": [f"{number:x}" * 64 for number in range(16)],
        "stop_token_ids": list(range(1024)),
        "logit_bias": {str(number): 1.5 for number in range(300)},
        "n": 64,
        "logprobs": 20,
    }
    return json.dumps({"prompt": [1] * max(1, size // 3), **lists}).encode()


def blocks(item: str, rest: str = "") -> Body:
    """A turn of a conversation of Anthropic's dialect, with as many of these blocks as the size
    and the parser's bounds allow.
    """

    def body(size: int) -> bytes:
        number = max(1, min(size // (len(item) + 1), 2**16 // (item.count(":") + 2)))
        turn = f'{{"role":"user","content":[{",".join([item] * number)}]}}'
        return f'{{"max_tokens":2,"messages":[{turn}]{rest}}}'.encode()

    return body


def deep_input(size: int) -> bytes:
    """The input of a call, of nested lists of integers."""
    numbers = ",".join(["1"] * (size // 2))
    call = (
        f'{{"type":"tool_use","id":"1","name":"f","input":{{"a":{"[" * 50}{numbers}{"]" * 50}}}}}'
    )
    turns = f'{{"role":"assistant","content":[{call}]}},{{"role":"user","content":"x"}}'
    return f'{{"max_tokens":2,"messages":[{turns}]}}'.encode()


def numbers_in(place: str) -> Body:
    """A body with as many integers as the parser takes, where `place` has %s."""

    def body(size: int) -> bytes:
        numbers = ",".join(["1"] * max(1, min(size // 2, 2**19)))
        return f"{{{place % f'[{numbers}]'}}}".encode()

    return body


def nested_schemas(size: int) -> bytes:
    """Parameters of a tool, of as many alternatives as its length allows."""
    number = max(1, min(size, 2**17) // 3)
    schema = f'{{"type":"object","anyOf":[{",".join(["{}"] * number)}]}}'
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}'
    chat = '"messages":[{"role":"user","content":"a"}],"tool_choice":"required"'
    return f'{{"max_tokens":2,{chat},"tools":[{tool}]}}'.encode()


def repeated_instructions(size: int) -> bytes:
    """Instructions that the answer would repeat."""
    text = json.dumps("\N{LATIN SMALL LETTER E WITH ACUTE}" * (size // 2), ensure_ascii=False)
    return f'{{"input":"x","max_output_tokens":2,"instructions":{text},"stream":true}}'.encode()


def items(item: str) -> Body:
    """Input items of a response."""

    def body(size: int) -> bytes:
        number = max(1, min(size // (len(item) + 1), 4096))
        return f'{{"max_output_tokens":2,"input":[{",".join([item] * number)}]}}'.encode()

    return body


HTTP_BODIES: dict[str, tuple[str, Body]] = {
    "distinct keys": ("/v1/completions", distinct_keys),
    "integers": ("/v1/completions", lambda size: _items(PROMPT, b"1", size)),
    "integers with spaces": ("/v1/completions", lambda size: _items(PROMPT, b"  1  ", size)),
    "empty lists": ("/v1/completions", lambda size: _items(PROMPT, b"[]", size)),
    "empty objects": ("/v1/chat/completions", lambda size: _items(CHAT, b"{}", size)),
    "empty strings": ("/v1/completions", lambda size: _items(PROMPT, b'""', size)),
    "floats": ("/v1/completions", lambda size: _items(PROMPT, b"1.5", size)),
    "a long list for a number": (
        "/v1/completions",
        lambda size: _items(b'{"max_tokens":', b"1", size),
    ),
    "stop strings": (
        "/v1/completions",
        lambda size: _items(b'{"prompt":"a","stop":', b'"x"', size),
    ),
    "stop tokens": (
        "/v1/completions",
        lambda size: _items(b'{"prompt":"a","stop_token_ids":', b"1", size),
    ),
    "nested lists": ("/v1/completions", lambda size: PROMPT + b"[" * size),
    "nested objects": ("/v1/chat/completions", nested_objects),
    "a long number": ("/v1/completions", lambda size: b'{"seed":' + b"1" * size + b"}"),
    "spaces": ("/v1/completions", lambda size: b" " * size + b"{}"),
    "escapes": ("/v1/completions", lambda size: PROMPT + b'"' + _repeat(b"\\u0041", size) + b'"}'),
    "escaped lines": (
        "/v1/completions",
        lambda size: PROMPT + b'"' + _repeat(b"a\\n", size) + b'"}',
    ),
    "surrogates": (
        "/v1/completions",
        lambda size: PROMPT + b'"' + _repeat(b"\\ud83d", size) + b'"}',
    ),
    "one long word": ("/v1/completions", text_of("a")),
    "spaces to tokenize": ("/v1/completions", text_of(" ")),
    "words": ("/v1/completions", text_of("the dog ")),
    "another script": ("/v1/completions", text_of("\N{CJK UNIFIED IDEOGRAPH-4E2D}")),
    "a conversation": ("/v1/chat/completions", conversation),
    "all maxima": ("/v1/completions", all_maxima),
    "text blocks": ("/v1/messages", blocks('{"type":"text","text":"a"}')),
    "results": ("/v1/messages", blocks('{"type":"tool_result","tool_use_id":"1"}')),
    "unknown blocks": ("/v1/messages", blocks('{"type":"image"}')),
    "blocks to count": ("/v1/messages/count_tokens", blocks('{"type":"text","text":"a"}')),
    "a deep call": ("/v1/messages", deep_input),
    "a schema of numbers": (
        "/v1/completions",
        numbers_in('"prompt":"a","structured_outputs":{"json":{"enum":%s}}'),
    ),
    "a format of numbers": (
        "/v1/chat/completions",
        numbers_in(
            '"messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_schema",'
            '"json_schema":{"schema":{"enum":%s}}}'
        ),
    ),
    "variables of numbers": (
        "/v1/chat/completions",
        numbers_in('"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":%s}'),
    ),
    "a tool of numbers": (
        "/v1/responses",
        numbers_in(
            '"input":"a","tools":[{"type":"function","name":"f","parameters":{"enum":%s}}],'
            '"tool_choice":"required"'
        ),
    ),
    "schemas in a schema": (
        "/v1/chat/completions",
        nested_schemas,
    ),
    "calls": (
        "/v1/responses",
        items('{"type":"function_call","call_id":"1","name":"f","arguments":"{}"}'),
    ),
    "messages of the user": ("/v1/responses", items('{"role":"user","content":"a"}')),
    "unknown items": ("/v1/responses", items('{"type":"computer_call"}')),
    "instructions": ("/v1/responses", repeated_instructions),
    "texts to tokenize": ("/tokenize", lambda size: text_of("the dog ")(size)),
    "tokens to decode": ("/detokenize", lambda size: _items(b'{"tokens":', b"7", size)),
}

GRPC_MESSAGES: dict[str, Body] = {
    "empty messages": lambda size: _repeat(_field(4, b""), size),
    "messages": lambda size: _repeat(_field(4, _field(1, b"u") + _field(2, b"a")), size),
    "roles of one message": lambda size: _field(4, _repeat(_field(1, b""), size)),
    "packed tokens": lambda size: _field(5, b"\x01" * size),
    "single tokens": lambda size: _repeat(_varint(5 << 3) + b"\x01", size),
    "packed resume": lambda size: _field(8, b"\x01" * size) + _field(5, b"\x01"),
    "empty samplings": lambda size: _repeat(_field(6, b""), size),
    "stop strings": lambda size: _field(6, _repeat(_field(7, b""), size)),
    "stop tokens": lambda size: _field(6, _field(8, b"\x01" * size)),
    "biases": lambda size: _field(6, _repeat(_field(13, b""), size)),
    "unknown fields": lambda size: _repeat(_field(999, b""), size),
    "unknown numbers": lambda size: _repeat(_varint(999 << 3) + b"\x01", size),
    "groups": lambda size: _repeat(_varint(999 << 3 | 3), size),
    "nothing but ones": lambda size: b"\xff" * size,
    "a long prompt": lambda size: _field(3, b"a" * size),
    "a long model": lambda size: _field(2, b"a" * size) + _field(3, b"a"),
    "a long role": lambda size: _field(4, _field(1, b"a" * size)),
}


def _head(*lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in lines).encode()


HTTP_WIRE: dict[str, Body] = {
    "chunks of a byte": lambda size: (
        _head("POST /v1/completions HTTP/1.1", "host: 127.0.0.1", "transfer-encoding: chunked", "")
        + _repeat(b"1\r\n \r\n", size)
    ),
    "headers": lambda size: (
        _head("GET /version HTTP/1.1", "host: 127.0.0.1") + _repeat(b"a:b\r\n", size) + b"\r\n"
    ),
    "headers of a second request": lambda size: (
        _head(
            "GET /health HTTP/1.1",
            "host: 127.0.0.1",
            "",
            "GET /version HTTP/1.1",
            "host: 127.0.0.1",
        )
        + _repeat(b"a:b\r\n", size)
        + b"\r\n"
    ),
    "pipelined requests": lambda size: _repeat(
        _head("GET /health HTTP/1.1", "host: 127.0.0.1", ""), size
    ),
    "an encoded path": lambda size: _head(
        f"GET /{'%41' * min(5000, size // 3)} HTTP/1.1", "host: 127.0.0.1", ""
    ),
}


def slow_upload(host: str, token: str, size: int, sent: int) -> bytes:
    """The beginning of a request whose body of `size` bytes never comes beyond `sent`."""
    lines = ["POST /v1/completions HTTP/1.1", f"host: {host}", f"authorization: Bearer {token}"]
    return _head(*lines, f"content-length: {size}", "") + b" " * sent
