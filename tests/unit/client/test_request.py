from __future__ import annotations

import contextlib
from typing import Any

import pytest

from kvrelay.client.request import GenerateOptions, build_request
from kvrelay.errors import InvalidArgument
from kvrelay.types.chat import ChatMessage
from kvrelay.types.requests import Guidance, Slo
from kvrelay.wire.generate_request import request_to_proto
from kvrelay.wire.inference import SamplingOptions


def test_what_is_left_out_stays_unset() -> None:
    request = build_request("Once", {"max_tokens": None, "stop": None})
    assert (request.prompt, request.request_id, request.model, request.priority) == (
        "Once",
        "",
        "",
        0,
    )
    assert request.sampling == SamplingOptions(seed=request.sampling.seed)


def test_every_option_finds_its_place() -> None:
    options = GenerateOptions(
        messages=[{"role": "user", "content": "hi"}, ("assistant", "yo")],
        model="demo",
        max_tokens=3,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        seed=11,
        stop="END",
        stop_token_ids=[2],
        ignore_eos=True,
        min_tokens=1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={7: 1.0, 3: -1.0},
        logprobs=0,
        prompt_logprobs=2,
        thinking_token_budget=5,
        request_id="mine",
        priority=-1,
        resume=[5],
        cache_salt="mine alone",
        slo={"ttft_ms": 500},
        system_fingerprint="fp_a.b",
        guidance=Guidance("regex", "a+"),
    )
    assert options.keys() | {"token_ids"} == GenerateOptions.__annotations__.keys()
    request = build_request(None, options)
    assert request.messages == (ChatMessage("user", "hi"), ChatMessage("assistant", "yo"))
    assert (request.model, request.request_id, request.priority, request.resume) == (
        "demo",
        "mine",
        -1,
        (5,),
    )
    assert request.cache_salt == "mine alone"
    assert request.slo == Slo(ttft_ms=500)
    assert request.sampling == SamplingOptions(
        3,
        0.5,
        4,
        0.9,
        0.1,
        11,
        ("END",),
        (2,),
        True,
        1,
        0.1,
        0.2,
        1.1,
        ((3, -1.0), (7, 1.0)),
        0,
        Guidance("regex", "a+"),
        2,
        5,
    )


def test_a_seed_is_drawn_once_so_that_a_resumed_answer_goes_on_alike() -> None:
    seeds = {build_request("p", {}).sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (None, {}),
        ("p", {"token_ids": [1]}),
        ("p", {"messages": [("user", "x")]}),
        (None, {"stop": "x"}),
    ],
)
def test_exactly_one_kind_of_prompt(prompt: str | None, options: GenerateOptions) -> None:
    with pytest.raises(InvalidArgument, match="exactly one of prompt, messages and token_ids"):
        build_request(prompt, options)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [{"role": "user"}]),
        ("messages", 3),
        ("stop", 5),
        ("resume", 7),
        ("logit_bias", [1]),
    ],
)
def test_a_value_of_the_wrong_kind_names_its_field(field: str, value: Any) -> None:
    prompt = None if field == "messages" else "p"
    with pytest.raises(InvalidArgument, match=field) as caught:
        build_request(prompt, {field: value})  # type: ignore[misc]
    assert caught.value.field == field


@pytest.mark.parametrize("field", sorted(GenerateOptions.__annotations__.keys() - {"ignore_eos"}))
@pytest.mark.parametrize("value", [True, False])
def test_a_truth_value_is_no_number(field: str, value: bool) -> None:
    prompt = None if field in ("messages", "token_ids") else "p"
    with pytest.raises(InvalidArgument, match=field) as caught:
        build_request(prompt, {field: value})  # type: ignore[misc]
    assert caught.value.field == field


@pytest.mark.parametrize("exponent", [400, 5000])
@pytest.mark.parametrize("field", sorted(GenerateOptions.__annotations__))
def test_a_number_beyond_a_float_is_an_error_of_its_field(field: str, exponent: int) -> None:
    """By itself, and inside of each kind of value. The larger one is also beyond what Python turns
    into text.
    """
    prompt = None if field in ("messages", "token_ids") else "p"
    number = 10**exponent
    values = (number, -number, [number], {"1": number}, {"9" * exponent: 1.0}, {"ttft_ms": number})
    for value in values:
        with contextlib.suppress(InvalidArgument):
            request_to_proto(build_request(prompt, {field: value}))  # type: ignore[misc]


def test_an_unknown_option_is_a_programming_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_new_tokens'"):
        build_request("p", {"max_new_tokens": 5})  # type: ignore[typeddict-unknown-key]
