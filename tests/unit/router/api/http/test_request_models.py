from __future__ import annotations

import contextlib
import json
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidArgument, KvRelayError, PermissionDenied, Unimplemented
from kvrelay.types.chat import ChatMessage
from kvrelay.types.requests import Slo
from router.api.http.dialects.openai.requests import (
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from router.api.http.json_parser import object_steps


def load_json(body: bytes) -> Any:
    steps = object_steps(deque([body]))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"prompt": 1, "prompt": 2}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_bodies_that_are_not_one_clean_object(body: bytes) -> None:
    with pytest.raises(InvalidArgument):
        load_json(body)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_typed_error(body: bytes) -> None:
    with contextlib.suppress(InvalidArgument):
        assert isinstance(load_json(body), dict)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
_names = st.sampled_from(
    [
        "prompt",
        "messages",
        "model",
        "max_tokens",
        "stop",
        "logit_bias",
        "stream_options",
        "n",
        "seed",
        "top_k",
        "tools",
    ]
)


@given(st.dictionaries(_names, _values))
def test_any_object_is_parsed_or_a_typed_error(body: dict[str, object]) -> None:
    for parse in (parse_completion, parse_chat):
        with contextlib.suppress(KvRelayError):
            assert parse(body).requests


def test_completion_in_full() -> None:
    completion = parse_completion(
        {
            "model": "demo", "prompt": "hi", "max_tokens": 5, "temperature": 0, "top_p": 0.5,
            "n": 1, "stream": True,
            "stream_options": {"include_usage": True}, "stop": "x", "seed": 3,
            "presence_penalty": 1,
            "frequency_penalty": 0.5, "logit_bias": {"7": -1}, "logprobs": 2, "echo": False,
            "best_of": 1,
            "suffix": None, "user": "u", "ignore_eos": True, "min_tokens": 2, "top_k": -1,
            "min_p": 0.1,
            "repetition_penalty": 1.1, "stop_token_ids": [4], "return_token_ids": True,
            "priority": 2,
            "request_id": "mine", "cache_salt": "a user's",
            "slo": {"ttft_ms": 500, "itl_ms": None},
        }
    )  # fmt: skip
    (request,) = completion.requests
    assert (completion.stream, completion.include_usage, completion.return_token_ids) == (
        True,
        True,
        True,
    )
    assert (request.model, request.prompt, request.priority, request.request_id) == (
        "demo",
        "hi",
        2,
        "mine",
    )
    assert request.cache_salt == "a user's"
    assert request.slo == Slo(ttft_ms=500)
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (
        5,
        0.0,
        0.5,
        3,
    )
    assert (sampling.stop, sampling.stop_token_ids, sampling.logit_bias) == (
        ("x",),
        (4,),
        ((7, -1.0),),
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        1.0,
        0.5,
        1.1,
    )
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.top_k, sampling.min_p) == (
        True,
        2,
        0,
        0.1,
    )
    assert sampling.logprobs == 2


@pytest.mark.parametrize(
    ("prompt", "sources"),
    [
        ("hi", [("hi", ())]),
        ([1, 2], [(None, (1, 2))]),
        (["a", "b"], [("a", ()), ("b", ())]),
        ([[1], [2, 3]], [(None, (1,)), (None, (2, 3))]),
    ],
)
def test_prompts(prompt: object, sources: list[tuple[str | None, tuple[int, ...]]]) -> None:
    requests = parse_completion({"prompt": prompt, "request_id": "r"}).requests
    assert [(one.prompt, one.token_ids) for one in requests] == sources
    assert len({one.request_id for one in requests}) == len(requests)


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, [], [[]], [1, "a"], ["a", [1]], [True], [1.5], [[1], []], ["a"] * 65]
)
def test_prompts_that_are_none(prompt: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_completion({"prompt": prompt})
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("n", 0, InvalidArgument),
        ("n", -1, InvalidArgument),
        ("n", 65, InvalidArgument),
        ("n", 10**9, InvalidArgument),
        ("best_of", 3, InvalidArgument),
        ("echo", "yes", InvalidArgument),
        ("prompt_logprobs", 0, InvalidArgument),
        ("structured_outputs", {"json": {}, "regex": "a"}, InvalidArgument),
        ("structured_outputs", {"choice": []}, InvalidArgument),
        ("guided_json", {}, InvalidArgument),
        ("include_stop_str_in_output", True, InvalidArgument),
        ("skip_special_tokens", False, InvalidArgument),
        ("suffix", "end", InvalidArgument),
        ("response_format", {"type": "json_schema"}, InvalidArgument),
        ("response_format", {"type": "json_schema", "json_schema": {}}, InvalidArgument),
        ("response_format", {"type": "xml"}, Unimplemented),
        ("no_such_field", 1, InvalidArgument),
        ("max_tokens", "5", InvalidArgument),
        ("max_tokens", True, InvalidArgument),
        ("max_tokens", 5.0, InvalidArgument),
        ("temperature", "hot", InvalidArgument),
        ("temperature", 10**400, InvalidArgument),
        ("stream", "yes", InvalidArgument),
        ("stream_options", [], InvalidArgument),
        ("stop", 5, InvalidArgument),
        ("stop", [5], InvalidArgument),
        ("stop_token_ids", ["a"], InvalidArgument),
        ("logit_bias", {"seven": 1}, InvalidArgument),
        ("logit_bias", {"7": "x"}, InvalidArgument),
        ("logit_bias", {"-7": 1}, InvalidArgument),
        ("model", 7, InvalidArgument),
        ("chat_template", "{{ x }}", PermissionDenied),
        ("kv_transfer_params", {"do_remote_decode": True}, PermissionDenied),
        ("prompt_embeds", "AAAA", Unimplemented),
    ],
)
def test_fields_that_are_refused(name: str, value: object, kind: type[KvRelayError]) -> None:
    with pytest.raises(kind) as caught:
        parse_completion({"prompt": "hi", name: value})
    assert caught.value.field == name
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", 300, "temperature is 300; it must be less than or equal to 100"),
        ("max_tokens", "5", "max_tokens is '5'; it must be an integer"),
        ("stop", ["x", 5], "stop[1] is 5; it must be text"),
        ("stop", ["x"] * 20, "stop is a list of 20; it must have at most 16 items"),
        ("prompt", [1, "a"], "prompt[1] is 'a'; it must be an integer"),
        ("prompt", [[1], []], "prompt[1] is a list of 0; it must have at least 1 item"),
        ("guided_choice", ["a"], "guided_choice is not supported; use structured_outputs.choice"),
        ("regex", "a+", "regex is not supported; use structured_outputs.regex"),
        (
            "logit_bias",
            {"7": 1, "11": "x"},
            "logit_bias[\"11\"] is 'x'; it must be a number",
        ),
        (
            "logit_bias",
            {"7": 1, "the": 1},
            "logit_bias is {'7': 1, 'the': 1}; its keys must be token ids such as \"11\", not "
            '"the"',
        ),
        (
            "stream_options",
            {"include_usage": 3},
            "stream_options.include_usage is 3; it must be true or false",
        ),
    ],
)
def test_an_error_names_the_place_the_value_and_what_is_allowed(
    field: str, value: object, message: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_completion({"prompt": "hi", field: value})
    assert (caught.value.field, caught.value.message) == (field, message)


def test_null_is_absent() -> None:
    body = {"prompt": "hi", "temperature": None, "n": None, "no_such_field": None, "stop": None}
    assert parse_completion(body) == parse_completion({"prompt": "hi"})


def test_chat() -> None:
    completion = parse_chat(
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                },
            ],
            "max_completion_tokens": 5,
            "max_tokens": 9,
            "logprobs": True,
            "top_logprobs": 3,
        }
    )
    (request,) = completion.requests
    assert request.messages == (ChatMessage("system", "be brief"), ChatMessage("user", "ab"))
    assert (request.sampling.max_tokens, request.sampling.logprobs) == (5, 3)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({}, InvalidArgument),
        ({"messages": []}, InvalidArgument),
        ({"messages": ["hi"]}, InvalidArgument),
        ({"messages": [{"content": "x"}]}, InvalidArgument),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, Unimplemented),
        ({"messages": [{"role": "user", "content": [{"type": "no type"}]}]}, InvalidArgument),
        ({"messages": [{"role": "user", "content": "x"}], "prompt": "y"}, InvalidArgument),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, InvalidArgument),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
            InvalidArgument,
        ),
        ({"messages": [{"role": "user", "content": "x"}], "echo": True}, InvalidArgument),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            InvalidArgument,
        ),
    ],
)
def test_chats_that_are_refused(body: dict[str, object], kind: type[KvRelayError]) -> None:
    with pytest.raises(kind):
        parse_chat(json.loads(json.dumps(body)))


def test_n_choices_per_prompt_in_the_order_of_prompts() -> None:
    body = {"prompt": ["a", "b"], "n": 3, "best_of": 3, "seed": 5, "request_id": "r"}
    completion = parse_completion(body)
    assert completion.n == 3
    assert [one.prompt for one in completion.requests] == ["a", "a", "a", "b", "b", "b"]
    assert [one.request_id for one in completion.requests] == [f"r-{number}" for number in range(6)]
    seeds = [one.sampling.seed for one in completion.requests]
    assert seeds[0] == 5
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]
    assert parse_completion(body) == completion
    one_more = parse_completion(body | {"n": 4, "best_of": 4})
    assert [one.sampling.seed for one in one_more.requests[:3]] == seeds[:3]


def test_choices_without_a_seed_take_theirs_from_their_ids() -> None:
    requests = parse_completion({"prompt": "a", "n": 2}, "given").requests
    assert [(one.request_id, one.sampling.seed) for one in requests] == [
        ("given-0", None),
        ("given-1", None),
    ]


def test_the_bound_is_on_prompts_times_n() -> None:
    assert len(parse_completion({"prompt": ["a"] * 32, "n": 2}).requests) == 64
    with pytest.raises(InvalidArgument) as caught:
        parse_completion({"prompt": ["a"] * 33, "n": 2})
    assert caught.value.field == "n"


@pytest.mark.parametrize(
    ("echo", "logprobs", "scored"),
    [(True, 1, 1), (True, 0, 0), (True, None, None), (False, 1, None), (None, 1, None)],
)
def test_echo_with_logprobs_has_those_of_the_prompt(
    echo: bool | None, logprobs: int | None, scored: int | None
) -> None:
    completion = parse_completion({"prompt": "a", "echo": echo, "logprobs": logprobs})
    assert completion.echo == bool(echo)
    assert completion.requests[0].sampling.prompt_logprobs == scored
    assert completion.requests[0].sampling.logprobs == logprobs


def test_fields_that_change_nothing_are_passed_over() -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    more = {
        "parallel_tool_calls": True,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "max_tokens": None,
    }
    assert parse_chat(body | more) == parse_chat(body)


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, {"prompt": 5}]
)
def test_bodies_of_tokenize_that_are_refused(body: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        parse_tokenize(body)


@pytest.mark.parametrize(
    "body", [{}, {"tokens": 5}, {"tokens": ["a"]}, {"tokens": [True]}, {"tokens": [1], "x": 1}]
)
def test_bodies_of_detokenize_that_are_refused(body: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        parse_detokenize(body)
