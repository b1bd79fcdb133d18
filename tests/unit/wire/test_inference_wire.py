from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidArgument
from kvrelay.types.chat import ChatMessage
from kvrelay.types.requests import (
    Attempt,
    Guidance,
    Handoff,
    Ledger,
    SamplingParams,
    Slo,
    TokenLogprobs,
    Usage,
)
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire import inference as wire

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
NUMBER = st.floats(allow_nan=False)
TEXT = st.text(max_size=20)  # without surrogates, which UTF-8 cannot carry
TOKENS = st.lists(INT32, max_size=8).map(tuple)
BIAS = st.dictionaries(INT32, NUMBER, max_size=4).map(lambda bias: tuple(sorted(bias.items())))

GIVEN = {
    "max_tokens": INT32,
    "temperature": NUMBER,
    "top_k": INT32,
    "top_p": NUMBER,
    "min_p": NUMBER,
    "seed": INT64,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "logprobs": INT32,
    "guidance": st.builds(Guidance, st.sampled_from(["json_schema", "regex", "lark"]), TEXT),
}
PLAIN = {
    "stop": st.lists(TEXT, max_size=3).map(tuple),
    "stop_token_ids": TOKENS,
    "ignore_eos": st.booleans(),
    "min_tokens": INT32,
    "logit_bias": BIAS,
}
SAMPLING = st.builds(
    wire.SamplingOptions, **{name: st.none() | values for name, values in GIVEN.items()}, **PLAIN
)
PARAMS = st.builds(
    SamplingParams,
    **{
        name: st.none() | values if name in ("seed", "logprobs", "guidance") else values
        for name, values in GIVEN.items()
    },
    **PLAIN,
)
# Only the HTTP endpoint takes more than role and content.
PLAIN_MESSAGE: dict[str, Any] = {
    "tool_calls": st.just(()),
    **dict.fromkeys(("reasoning", "tool_call_id", "name"), st.none()),
}
REQUESTS = st.builds(
    wire.GenerateRequest,
    request_id=TEXT,
    model=TEXT,
    prompt=st.none() | TEXT,
    messages=st.lists(st.builds(ChatMessage, TEXT, TEXT, **PLAIN_MESSAGE), max_size=3).map(tuple),
    token_ids=TOKENS,
    sampling=SAMPLING,
    priority=INT32,
    resume=TOKENS,
    cache_salt=st.none() | TEXT,
    slo=st.builds(Slo, st.none() | NUMBER, st.none() | NUMBER),
)
LOGPROBS = st.builds(
    TokenLogprobs, NUMBER, st.lists(st.tuples(INT32, NUMBER), max_size=3).map(tuple)
)
HANDOFFS = st.builds(Handoff, TEXT, INT64, INT64, INT64, INT64, NUMBER, NUMBER)
LEDGERS = st.builds(
    Ledger,
    phases=st.lists(st.tuples(TEXT, NUMBER), max_size=4).map(tuple),
    ttft_seconds=NUMBER,
    second_token_gap_seconds=NUMBER,
    decode_seconds=NUMBER,
    e2e_seconds=NUMBER,
    handoff=st.none() | HANDOFFS,
    attempts=st.lists(
        st.builds(
            Attempt,
            st.sampled_from(["local", "disaggregated"]),
            TEXT,
            TEXT,
            TEXT,
            TEXT,
            st.lists(st.tuples(TEXT, NUMBER), max_size=3).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
)
RESPONSES = st.builds(
    wire.GenerateResponse,
    request_id=TEXT,
    index=INT32,
    token_ids=TOKENS,
    text=TEXT,
    logprobs=st.lists(LOGPROBS, max_size=3).map(tuple),
    finish_reason=st.none() | st.sampled_from(["stop", "length", "cancelled", "error"]),
    usage=st.none() | st.builds(Usage, INT32, INT32, INT32),
    path=st.none() | st.sampled_from(["local", "disaggregated"]),
    why=TEXT,
    ledger=st.none() | LEDGERS,
)


@given(REQUESTS)
def test_a_request_survives_the_wire(request: wire.GenerateRequest) -> None:
    data = wire.request_to_proto(request).SerializeToString()
    assert wire.request_from_proto(pb.GenerateRequest.FromString(data)) == request


@given(RESPONSES)
def test_a_response_survives_the_wire(response: wire.GenerateResponse) -> None:
    data = wire.response_to_proto(response).SerializeToString()
    assert wire.response_from_proto(pb.GenerateResponse.FromString(data)) == response


@given(PARAMS)
def test_complete_parameters_survive_the_wire(params: SamplingParams) -> None:
    data = wire.params_to_proto(params).SerializeToString()
    assert wire.params_from_proto(pb.SamplingParams.FromString(data)) == params


def test_only_components_of_the_cluster_say_that_guidance_was_tried_out() -> None:
    tried = Guidance("regex", "a", tried_with="llguidance 1")
    message = wire.params_to_proto(SamplingParams(guidance=tried))
    assert (found := wire.params_from_proto(message).guidance) is not None
    assert found.tried_with == tried.tried_with
    assert (found := wire.sampling_from_proto(message).guidance) is not None
    assert not found.tried_with


def test_every_field_of_the_contract_has_a_place() -> None:
    assert {one.name for one in fields(wire.GenerateRequest)} == set(
        pb.GenerateRequest.DESCRIPTOR.fields_by_name
    )
    assert {one.name for one in fields(wire.GenerateResponse)} == set(
        pb.GenerateResponse.DESCRIPTOR.fields_by_name
    )
    sampling = set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    assert {one.name for one in fields(SamplingParams)} == sampling
    # The router sets it.
    assert {one.name for one in fields(wire.SamplingOptions)} == sampling - {"thinking"}


def test_unset_is_kept_apart_from_zero() -> None:
    unset = wire.sampling_from_proto(pb.SamplingParams())
    assert unset == wire.SamplingOptions()
    assert unset.with_defaults() == SamplingParams()
    zero = wire.sampling_from_proto(pb.SamplingParams(temperature=0.0, logprobs=0, max_tokens=0))
    assert (zero.temperature, zero.logprobs, zero.max_tokens) == (0.0, 0, 0)
    assert zero.with_defaults() == SamplingParams(temperature=0.0, logprobs=0, max_tokens=0)


def test_models_survive_the_wire() -> None:
    models = (
        wire.ModelInfo("demo", 4096, "float32", "LlamaForCausalLM"),
        wire.ModelInfo("b", 1, "bfloat16", ""),
    )
    assert wire.models_from_proto(wire.models_to_proto(models)) == models


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("max_tokens", wire.GenerateRequest(sampling=wire.SamplingOptions(max_tokens=2**31))),
        ("temperature", wire.GenerateRequest(sampling=wire.SamplingOptions(temperature="hot"))),  # type: ignore[arg-type]
        ("stop", wire.GenerateRequest(sampling=wire.SamplingOptions(stop=(1,)))),  # type: ignore[arg-type]
        ("logit_bias", wire.GenerateRequest(sampling=wire.SamplingOptions(logit_bias=((1, "a"),)))),  # type: ignore[arg-type]
        ("prompt", wire.GenerateRequest(prompt="\ud800")),
        ("token_ids", wire.GenerateRequest(token_ids=(2**40,))),
        ("resume", wire.GenerateRequest(resume=("one",))),  # type: ignore[arg-type]
        ("messages", wire.GenerateRequest(messages=(ChatMessage("user", 7),))),  # type: ignore[arg-type]
        ("messages", wire.GenerateRequest(messages=("hello",))),  # type: ignore[arg-type]
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(
    field: str, request_: wire.GenerateRequest
) -> None:
    with pytest.raises(InvalidArgument, match=field) as caught:
        wire.request_to_proto(request_)
    assert caught.value.field == field


def test_the_service_name_is_the_public_one() -> None:
    assert wire.SERVICE_NAME == "kvrelay.v1.InferenceService"
