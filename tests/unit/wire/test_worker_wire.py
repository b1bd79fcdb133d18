from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay import worker_messages as messages
from kvrelay.errors import Code, InvalidArgument
from kvrelay.protocol_version import Protocol
from kvrelay.types.requests import (
    Handoff,
    PrefillTimings,
    PromptLogprobs,
    SamplingParams,
    SequenceSpec,
    ThinkingMarkers,
)
from kvrelay.types.workers import TierKind
from kvrelay.wire import inference
from kvrelay.wire.worker import (
    Decoded,
    Hello,
    Welcome,
    command_from_proto,
    command_key,
    command_to_proto,
    decode_events,
    event_from_proto,
    event_to_proto,
    pb,
)

# Strategies come from the dataclasses themselves, so a field that the conversion forgets fails
# here.
PROTO_INTS = st.integers(0, 2**31 - 1)
st.register_type_strategy(int, PROTO_INTS)
# An ITL of 0 is refused.
st.register_type_strategy(float, st.floats(0, 1e9, exclude_min=True))
st.register_type_strategy(str, st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
st.register_type_strategy(
    SamplingParams,
    st.builds(
        SamplingParams,
        seed=PROTO_INTS,
        logprobs=st.none() | PROTO_INTS,
        prompt_logprobs=st.none() | PROTO_INTS,
        thinking_token_budget=st.none() | PROTO_INTS,
        thinking=st.none() | st.builds(ThinkingMarkers, st.none() | PROTO_INTS, PROTO_INTS),
        logit_bias=st.dictionaries(PROTO_INTS, st.floats(-100, 100)).map(
            lambda bias: tuple(sorted(bias.items()))
        ),
    ),
)
LOGPROBS = st.floats(-9999, 0, width=32)


@st.composite
def prompt_logprobs(draw: st.DrawFn) -> PromptLogprobs:
    places, top = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    own, ids, likely = (
        draw(st.lists(values, min_size=size, max_size=size))
        for values, size in (
            (LOGPROBS, places),
            (PROTO_INTS, places * top),
            (LOGPROBS, places * top),
        )
    )
    return PromptLogprobs(array("f", own), array("i", ids), array("f", likely))


st.register_type_strategy(PromptLogprobs, prompt_logprobs())
st.register_type_strategy(
    PrefillTimings,
    st.builds(
        PrefillTimings,
        fetched_tokens=...,
        fetch_seconds=...,
        fetched_from=st.sampled_from(["", *get_args(TierKind)]),
    ),
)
st.register_type_strategy(
    Protocol,
    st.builds(
        Protocol,
        PROTO_INTS,
        PROTO_INTS,
        st.lists(st.sampled_from(["a", "b"])).map(tuple),
        st.sampled_from(["", "1.0"]),
    ),
)
SPEC = SequenceSpec("a", 0, (1,), 1, SamplingParams())
COMMANDS = st.one_of(
    *(
        st.from_type(kind)
        for kind in (messages.Reserve, messages.Prefill, messages.RunLocal, messages.Renew)
    ),
    st.from_type(messages.Abort),
    st.from_type(Hello),
)
EVENTS = st.one_of(
    *(
        st.from_type(kind)
        for kind in (messages.Reserved, messages.Refused, messages.TokenBatch, messages.HandedOff)
    ),
    st.builds(messages.Failed, code=st.sampled_from(Code)),
    st.from_type(Welcome),
)


@given(COMMANDS)
def test_commands_survive_the_wire(command: messages.Command | Hello) -> None:
    wire = pb.SessionRequest.FromString(command_to_proto(command).SerializeToString())
    assert command_from_proto(wire) == command


@given(EVENTS)
def test_events_survive_the_wire(event: messages.Event | Welcome) -> None:
    wire = pb.SessionResponse.FromString(event_to_proto(event).SerializeToString())
    assert event_from_proto(wire) == event


def test_a_message_of_a_future_version_says_nothing() -> None:
    assert command_from_proto(pb.SessionRequest()) is None
    assert decode_events(pb.SessionResponse()) == Decoded()


@pytest.mark.parametrize("seconds", [math.inf, math.nan, -1.0])
def test_a_lease_without_an_end_is_an_error(seconds: float) -> None:
    for command in (messages.Reserve(SPEC, seconds, "prefill-0"), messages.Renew((1,), seconds)):
        with pytest.raises(InvalidArgument, match="lease_seconds"):
            command_from_proto(command_to_proto(command))


def test_a_deadline_that_is_no_number_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="deadline_s"):
        command_from_proto(command_to_proto(messages.RunLocal(replace(SPEC, deadline_s=math.nan))))


def test_an_impossible_value_fails_its_own_sequence_only() -> None:
    good = messages.SequenceTokens("good", 1, 0, (5,))
    batch = event_to_proto(messages.TokenBatch((good, replace(good, request_id="bad"))))
    batch.tokens.sequences[1].token_ids[0] = -1
    decoded = decode_events(batch)
    assert decoded.events == (messages.TokenBatch((good,)),)
    (failed,) = decoded.malformed
    assert (failed.request_id, failed.attempt, failed.code) == ("bad", 1, Code.INTERNAL)


@pytest.mark.parametrize(
    "command",
    [messages.Reserve, messages.Prefill, messages.RunLocal, messages.Renew, messages.Abort, Hello],
)
@given(st.data())
def test_a_commands_sequence_is_found_without_its_values(
    command: type, data: st.DataObject
) -> None:
    made = data.draw(st.from_type(command))
    key = command_key(command_to_proto(made))
    if isinstance(made, messages.Renew | Hello):
        assert key is None
    else:
        assert key == (
            (made.request_id, made.attempt) if isinstance(made, messages.Abort) else made.spec.key
        )


@pytest.mark.parametrize(
    ("own", "ids", "likely"),
    [
        ([-1.0], [7], []),
        ([-1.0, -2.0], [7], [-1.0]),
        ([], [7], [-1.0]),
        ([-1.0], [-7], [-1.0]),
        ([math.nan], [], []),
        ([-1.0], [7], [-math.inf]),
    ],
)
def test_impossible_logprobs_of_a_prompt_are_an_error(
    own: list[float], ids: list[int], likely: list[float]
) -> None:
    scores = PromptLogprobs(array("f", own), array("i", ids), array("f", likely))
    batch = messages.TokenBatch((messages.SequenceTokens("r", 0, 0, (5,), prompt_logprobs=scores),))
    with pytest.raises(InvalidArgument, match="prompt"):
        event_from_proto(event_to_proto(batch))


@pytest.mark.parametrize("seconds", [math.inf, -math.inf, math.nan, 1e300])
@pytest.mark.parametrize(
    "event",
    [
        lambda seconds: messages.HandedOff("r", 0, Handoff("shm", 1, 1, 1, 0, seconds, 0.1)),
        lambda seconds: messages.HandedOff("r", 0, Handoff("shm", 1, 1, 1, 0, 0.1, seconds)),
        lambda seconds: messages.TokenBatch(
            (messages.SequenceTokens("r", 0, 0, (5,), prefill=PrefillTimings(0.1, seconds, 0, 1)),)
        ),
    ],
)
def test_times_that_nobody_measured_are_an_error(
    event: Callable[[float], messages.HandedOff | messages.TokenBatch], seconds: float
) -> None:
    wire = event_to_proto(event(seconds))
    with pytest.raises(InvalidArgument, match="are not valid durations"):
        event_from_proto(wire)


@pytest.mark.parametrize(
    "tokens",
    [
        pb.SequenceTokens(request_id="r", token_ids=[5, -1]),
        *(
            pb.SequenceTokens(
                request_id="r", token_ids=[5], prefill=pb.PrefillTimings(**{name: -1})
            )
            for name in ("cached_tokens", "fetched_tokens", "chunks")
        ),
        pb.SequenceTokens(
            request_id="r", logprobs=[inference.pb.TokenLogprobs(top=[{"token_id": -1}])]
        ),
        pb.SequenceTokens(request_id="r", token_ids=[5], finish_reason="tired"),
    ],
)
def test_tokens_that_no_tokenizer_or_client_knows_are_an_error(tokens: pb.SequenceTokens) -> None:
    with pytest.raises(InvalidArgument):
        event_from_proto(pb.SessionResponse(tokens=pb.TokenBatch(sequences=[tokens])))


def test_an_unknown_code_is_internal() -> None:
    wire = pb.SessionResponse(failed=pb.Failed(request_id="a", code="TEAPOT", message="m"))
    assert event_from_proto(wire) == messages.Failed("a", 0, Code.INTERNAL, "m")


def test_no_deadline_and_one_that_is_over_are_two_things() -> None:
    spec = SequenceSpec("a", 0, (1,), 1, SamplingParams())
    for deadline_s in (None, 0.0):
        command = messages.RunLocal(replace(spec, deadline_s=deadline_s))
        wire = pb.SessionRequest.FromString(command_to_proto(command).SerializeToString())
        assert command_from_proto(wire) == command
