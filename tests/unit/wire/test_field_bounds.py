"""Counts of fields on the wire, before a message is parsed."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from support.hostile_requests import GRPC_MESSAGES

from kvrelay.errors import InvalidArgument
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire import cluster, inference
from kvrelay.wire.encoding import varint
from kvrelay.wire.encoding.field_bounds import MAX_FIELDS, check_fields, repeated_fields
from router.api.grpc.bounds import field_bounds

REQUEST = pb.GenerateRequest.DESCRIPTOR
CONTEXT = 4096
BOUNDS = field_bounds(CONTEXT)


def cost(data: bytes, message: Descriptor = REQUEST) -> int:
    """Raises InvalidArgument."""
    return sum(check_fields(data, message, BOUNDS))


def test_each_repeated_field_that_a_client_can_send_has_a_bound() -> None:
    """What is new in a .proto file has to be thought about; without a bound it is refused."""
    pool = descriptor_pool.Default()
    services = [
        pool.FindServiceByName(one) for one in (inference.SERVICE_NAME, cluster.SERVICE_NAME)
    ]
    methods = [method for service in services for method in service.methods]
    assert len(methods) > 5
    fields = {field.full_name for method in methods for field in repeated_fields(method.input_type)}
    assert fields == set(BOUNDS)


@pytest.mark.parametrize("name", BOUNDS)
def test_a_field_at_its_bound_passes_and_one_over_it_is_named(name: str) -> None:
    kind, _, field = name.rpartition(".")
    message = {
        "kvrelay.v1.SamplingParams": pb.SamplingParams.DESCRIPTOR,
        REQUEST.full_name: REQUEST,
    }.get(kind, descriptor_pool.Default().FindMessageTypeByName(kind))
    number = message.fields_by_name[field].number
    entry = bytes([number << 3 | 2, 0])
    packed = message.fields_by_name[field].is_packed
    for count in (BOUNDS[name], BOUNDS[name] + 1):
        data = _packed(number, count) if packed else entry * count
        if count == BOUNDS[name]:
            cost(data, message)
        else:
            with pytest.raises(InvalidArgument, match="more than") as caught:
                cost(data, message)
            assert caught.value.field == field


def _packed(number: int, count: int) -> bytes:
    request = pb.GenerateRequest(token_ids=[300] * count)  # two bytes each
    data = request.SerializeToString()
    assert data[0] == 5 << 3 | 2
    return bytes([number << 3 | 2]) + data[1:]


_texts = st.text(max_size=5)
_ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)
_requests = st.builds(
    pb.GenerateRequest,
    request_id=_texts,
    prompt=st.none() | _texts,
    messages=st.lists(st.builds(pb.ChatMessage, role=_texts, content=_texts), max_size=5),
    token_ids=_ids,
    resume=_ids,
    priority=st.integers(-5, 5),
    sampling=st.builds(
        pb.SamplingParams,
        max_tokens=st.integers(1, 9),
        temperature=st.floats(0, 1),
        stop=st.lists(_texts, max_size=5),
        stop_token_ids=_ids,
        logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-1, 1), max_size=5),
    ),
)


@given(_requests)
def test_what_our_clients_write_passes(request: pb.GenerateRequest) -> None:
    data = request.SerializeToString()
    assert cost(data) <= 64 * len(data)


@given(_requests, st.data())
def test_counts_are_those_that_the_parser_finds(
    request: pb.GenerateRequest, data: st.DataObject
) -> None:
    """A bound below what is there refuses, one that is not below does not, however the message is
    cut and joined.
    """
    # Which merges the two
    written = request.SerializeToString() + data.draw(_requests).SerializeToString()
    merged = pb.GenerateRequest.FromString(written)
    for name, count in (
        ("token_ids", len(merged.token_ids)),
        ("messages", len(merged.messages)),
        ("resume", len(merged.resume)),
    ):
        key = f"{REQUEST.full_name}.{name}"
        sum(check_fields(written, REQUEST, {**BOUNDS, key: count}))
        if count:
            with pytest.raises(InvalidArgument) as caught:
                sum(check_fields(written, REQUEST, {**BOUNDS, key: count - 1}))
            assert caught.value.field == name


@given(st.binary(max_size=60))
def test_any_bytes_pass_or_are_refused(data: bytes) -> None:
    try:
        cost(data)
    except InvalidArgument:
        return
    try:
        pb.GenerateRequest.FromString(data)
    except DecodeError:
        return


def _tagged(number: int, wire_type: int, content: bytes) -> bytes:
    return varint.encoded(number << 3 | wire_type) + content


_numbers = st.sampled_from([*REQUEST.fields_by_number, 1005, 2**29 - 1])
_fields = st.one_of(
    st.builds(_tagged, _numbers, st.just(0), st.integers(0, 2**64 - 1).map(varint.encoded)),
    st.builds(_tagged, _numbers, st.just(2), st.sampled_from([b"\0", b"\2\1\1", b"\1x"])),
    st.builds(_tagged, _numbers, st.sampled_from([1, 5]), st.sampled_from([b"1234", b"12345678"])),
    # Groups, and what is no type at all.
    st.builds(_tagged, _numbers, st.sampled_from([3, 4, 6, 7]), st.just(b"")),
)


@given(st.lists(_fields, max_size=20))
@example([_tagged(1005, 3, b""), _tagged(1005, 4, b""), *[_tagged(4, 2, b"\0")] * 9])
def test_nothing_stops_the_counting_before_the_parser_stops(fields: list[bytes]) -> None:
    data, most = b"".join(fields), 3
    try:
        sum(check_fields(data, REQUEST, dict.fromkeys(BOUNDS, most)))
        parsed = pb.GenerateRequest.FromString(data)
    except (InvalidArgument, DecodeError):
        return
    for field, value in parsed.ListFields():
        assert not field.is_repeated or len(value) <= most


@pytest.mark.parametrize("name", GRPC_MESSAGES)
def test_what_passes_is_cheap_to_parse_and_the_look_itself_is_bounded(name: str) -> None:
    for size in (2**12, 2**16, 2**20):
        data = GRPC_MESSAGES[name](size)
        steps, costs = check_fields(data, REQUEST, BOUNDS), []
        with contextlib.suppress(InvalidArgument):
            costs.extend(steps)
        assert max(costs, default=0) <= max(2**14, len(data))
        assert sum(costs) <= 64 * MAX_FIELDS + 2 * len(data)
