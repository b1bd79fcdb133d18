from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.router_harness import DEMO

from kvrelay.config.model_sections import ModelConfig
from kvrelay.errors import InvalidArgument, NotFound
from kvrelay.sampling_limits import check_params, check_sizes
from kvrelay.tenants import ANONYMOUS, Tenant
from kvrelay.types.chat import ChatMessage, ToolCall
from kvrelay.types.requests import SamplingParams
from kvrelay.wire.inference import GenerateRequest, SamplingOptions
from router.frontend.model_card import ModelCard
from router.frontend.validation import admit_sampling, check_request

CARD = ModelCard.load(DEMO, ModelConfig())
GOOD = GenerateRequest(prompt="Once upon a time", model="demo", request_id="a-1")


def sampling(**options: Any) -> GenerateRequest:
    return replace(GOOD, sampling=replace(SamplingOptions(), **options))


@pytest.mark.parametrize(
    "request_",
    [
        GOOD,
        GenerateRequest(prompt="x"),
        GenerateRequest(token_ids=(0, CARD.vocab_size - 1)),
        GenerateRequest(messages=(ChatMessage("user", "hello"), ChatMessage("assistant", ""))),
        sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=1),
        sampling(temperature=2.0, top_k=50, top_p=0.01, min_p=1.0, seed=2**63 - 1),
        sampling(stop=tuple("abcdefghijklmnop"), stop_token_ids=(3,), logprobs=20, min_tokens=1),
        sampling(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=1.3),
        sampling(logit_bias=tuple((one, -100.0) for one in range(300))),
        replace(GOOD, request_id="x" * 128, priority=-5),
        replace(GOOD, prompt="a\0b"),
        GenerateRequest(messages=(ChatMessage("tool", "ELF\0\1"), ChatMessage("user", "\0"))),
    ],
)
def test_good_requests_pass(request_: GenerateRequest) -> None:
    check_request(request_, CARD)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (GenerateRequest(), "prompt"),
        (replace(GOOD, prompt=""), "prompt"),
        (replace(GOOD, prompt="half \ud83d pair"), "prompt"),
        (replace(GOOD, token_ids=(1,)), "token_ids"),
        (replace(GOOD, messages=(ChatMessage("user", "x"),)), "messages"),
        (GenerateRequest(messages=(ChatMessage("us\0er", "x"),)), "messages"),
        (GenerateRequest(messages=(ChatMessage("", "x"),)), "messages"),
        (GenerateRequest(token_ids=(1, -1)), "token_ids"),
        (GenerateRequest(token_ids=(CARD.vocab_size,)), "token_ids"),
        (replace(GOOD, resume=(5000,)), "resume"),
        (replace(GOOD, priority=2**31), "priority"),
        (replace(GOOD, request_id="a\r\nb"), "request_id"),
        (replace(GOOD, request_id="a\x07b"), "request_id"),
        (replace(GOOD, request_id="naïve"), "request_id"),
        (replace(GOOD, request_id=" a"), "request_id"),
        (replace(GOOD, request_id="a "), "request_id"),
        (GenerateRequest(messages=(ChatMessage("half \ud83d", "x"),)), "messages"),
        (GenerateRequest(messages=(ChatMessage("user", "half \ud83d"),)), "messages"),
        (replace(GOOD, request_id="x" * 10_000), "request_id"),
        (sampling(max_tokens=0), "max_tokens"),
        (sampling(max_tokens=-1), "max_tokens"),
        (sampling(max_tokens=2**31), "max_tokens"),
        (sampling(temperature=-0.1), "temperature"),
        (sampling(temperature=101.0), "temperature"),
        (sampling(top_k=-1), "top_k"),
        (sampling(top_p=0.0), "top_p"),
        (sampling(top_p=1.1), "top_p"),
        (sampling(min_p=-0.1), "min_p"),
        (sampling(min_p=1.1), "min_p"),
        (sampling(seed=-1), "seed"),
        (sampling(seed=2**63), "seed"),
        (sampling(presence_penalty=2.1), "presence_penalty"),
        (sampling(frequency_penalty=-2.1), "frequency_penalty"),
        *(
            (sampling(repetition_penalty=one), "repetition_penalty")
            for one in (0.0, 5e-324, 1e-38, 0.0099, 100.1)
        ),
        (sampling(logprobs=21), "logprobs"),
        (sampling(logprobs=-1), "logprobs"),
        (sampling(min_tokens=-1), "min_tokens"),
        (sampling(stop=("",)), "stop"),
        (sampling(stop=("x" * 257,)), "stop"),
        (sampling(stop=("a\0",)), "stop"),
        (sampling(stop=tuple(str(one) for one in range(17))), "stop"),
        (sampling(stop_token_ids=(CARD.vocab_size,)), "stop_token_ids"),
        (sampling(stop_token_ids=(1,) * 1025), "stop_token_ids"),
        (sampling(logit_bias=((CARD.vocab_size, 1.0),)), "logit_bias"),
        (sampling(logit_bias=((1, 101.0),)), "logit_bias"),
        (sampling(logit_bias=((1, math.nan),)), "logit_bias"),
        (sampling(logit_bias=tuple((one, 1.0) for one in range(301))), "logit_bias"),
        *(
            (sampling(**{name: value}), name)
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
            )
            for value in (math.nan, math.inf, -math.inf)
        ),
    ],
)
def test_bad_fields_are_named(bad: GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_request(bad, CARD)
    assert caught.value.field == field
    assert len(caught.value.message) < 300


def test_the_place_of_bad_text_in_a_conversation_is_told() -> None:
    call = ToolCall("1", "f", "half \ud83d")
    messages = (ChatMessage("user", "x"), ChatMessage("assistant", None, tool_calls=(call,)))
    with pytest.raises(InvalidArgument, match=r"messages\[1\]\.tool_calls\[0\]\.arguments .* at 5"):
        check_request(GenerateRequest(messages=messages), CARD)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (
            (CARD.vocab_size, 1.0),
            "is for a token id that the model does not have; allowed are 0 to",
        ),
        ((-1, 1.0), "is for a token id that the model does not have; allowed are 0 to"),
        ((5, 1e6), "is 1000000.0; allowed are numbers from -100 to 100"),
    ],
)
def test_an_entry_of_logit_bias_is_named_by_its_key(entry: tuple[int, float], told: str) -> None:
    bias = ((1, 1.0), entry)
    named = re.escape(f'logit_bias["{entry[0]}"] {told}')
    with pytest.raises(InvalidArgument, match=f"^{named}"):
        check_request(sampling(logit_bias=bias), CARD)
    with pytest.raises(InvalidArgument, match=f"^{named}"):
        check_params(SamplingParams(logit_bias=bias, seed=1), CARD.vocab_size)


def test_an_error_says_value_and_range() -> None:
    with pytest.raises(
        InvalidArgument,
        match=r"^repetition_penalty is 1e-38; allowed is 0.01 to "
        r"100$",
    ):
        check_request(sampling(repetition_penalty=1e-38), CARD)
    with pytest.raises(InvalidArgument, match=r"^top_p is -1.0; allowed is above 0, at most 1$"):
        check_request(sampling(top_p=-1.0), CARD)
    with pytest.raises(InvalidArgument, match=r"^max_tokens is 0; allowed is 1 to the end of the"):
        check_request(sampling(max_tokens=0), CARD)


@given(
    st.builds(
        sampling,
        temperature=st.floats(0, 2),
        top_p=st.floats(0, 1, exclude_min=True),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        logprobs=st.integers(0, 20),
        seed=st.integers(0, 2**63 - 1),
        logit_bias=st.dictionaries(
            st.integers(0, CARD.vocab_size - 1), st.floats(-100, 100), max_size=5
        ).map(lambda bias: tuple(bias.items())),
    )
)
def test_what_openai_allows_is_allowed_and_no_worker_refuses_what_a_router_lets_in(
    asked: GenerateRequest,
) -> None:
    check_request(asked, CARD)
    admitted = admit_sampling(asked, "r", 10, 4096, ANONYMOUS)
    check_params(admitted, CARD.vocab_size)
    check_sizes(admitted, CARD.vocab_size)


def test_unknown_model_is_not_found() -> None:
    with pytest.raises(NotFound) as caught:
        check_request(replace(GOOD, model="gpt-9"), CARD)
    assert "demo" in caught.value.message


def test_unset_max_tokens_is_cut_to_the_context() -> None:
    assert admit_sampling(GOOD, "r", 10, 4096, ANONYMOUS).max_tokens == 64
    assert admit_sampling(GOOD, "r", 4090, 4096, ANONYMOUS).max_tokens == 6
    assert admit_sampling(sampling(max_tokens=6), "r", 4090, 4096, ANONYMOUS).max_tokens == 6


@pytest.mark.parametrize(
    ("tokens_per_minute", "most"),
    [(None, 4086), (10**6, 4086), (5000, 500), (100, 64)],
)
def test_an_answer_to_messages_may_fill_the_context_and_a_tenth_of_the_tenants_limit(
    tokens_per_minute: int | None, most: int
) -> None:
    chat = GenerateRequest(messages=(ChatMessage("user", "x"),))
    tenant = Tenant("a", tokens_per_minute=tokens_per_minute)
    assert admit_sampling(chat, "r", 10, 4096, tenant).max_tokens == most


@pytest.mark.parametrize(
    ("bad", "num_tokens", "field"),
    [
        (sampling(max_tokens=7), 4090, "max_tokens"),
        (GOOD, 4096, "prompt"),
        (GOOD, 9000, "prompt"),
        (GOOD, 0, "prompt"),
        (GenerateRequest(token_ids=(1,)), 4096, "token_ids"),
        (GenerateRequest(messages=(ChatMessage("user", "x"),)), 4096, "messages"),
        (sampling(max_tokens=3, min_tokens=4), 10, "min_tokens"),
        (replace(sampling(max_tokens=3), resume=(1, 2, 3, 4)), 10, "resume"),
    ],
)
def test_what_does_not_fit_is_named(bad: GenerateRequest, num_tokens: int, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        admit_sampling(bad, "r", num_tokens, 4096, ANONYMOUS)
    assert caught.value.field == field


def test_seed_is_kept_or_drawn_from_the_request_id() -> None:
    assert admit_sampling(sampling(seed=0), "r", 10, 4096, ANONYMOUS).seed == 0
    drawn = admit_sampling(GOOD, "r", 10, 4096, ANONYMOUS).seed
    assert drawn is not None
    assert 0 <= drawn < 2**63
    assert admit_sampling(GOOD, "r", 99, 4096, ANONYMOUS).seed == drawn
    assert admit_sampling(GOOD, "s", 10, 4096, ANONYMOUS).seed != drawn


def test_context_is_the_smaller_of_model_and_configuration() -> None:
    assert CARD.info.max_model_len == 4096
    assert ModelCard.load(DEMO, ModelConfig(max_model_len=100)).info.max_model_len == 100
    assert ModelCard.load(DEMO, ModelConfig(max_model_len=10_000)).info.max_model_len == 4096
    assert (CARD.eos_token_ids, CARD.info.id) == (frozenset({2}), "demo")
    assert CARD.info.architecture == "LlamaForCausalLM"
