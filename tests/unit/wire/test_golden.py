"""What earlier releases wrote is read as they meant it, and no field's number ever changes its
meaning.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet
from write_wire_golden import (
    CONVERTERS,
    NEXT,
    REGISTRY,
    descriptors,
    messages,
    plain,
    registry,
    serialized,
    values,
)

from kvrelay.state.registry_codec import decode

GOLDEN = Path(__file__).parent / "golden"
RELEASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
PACKAGE = "kvrelay.v1"
AGAIN = (
    "run scripts/write_wire_golden.py and look at its diff: it is what changes for peers of other "
    "releases"
)


def golden(release: str, name: str) -> Any:
    return json.loads((GOLDEN / release / f"{name}.json").read_text())


def described(release: str) -> FileDescriptorSet:
    return FileDescriptorSet.FromString((GOLDEN / release / "descriptors.binpb").read_bytes())


def present(name: str) -> type[Message]:
    return type(dict(messages())[name])


class Retired(NamedTuple):
    """Fields that a message had once, and that are read no more."""

    numbers: set[int]
    names: set[str]


def reserved(message: Message) -> Retired:
    described = DescriptorProto()
    message.DESCRIPTOR.CopyToProto(described)
    spans = described.reserved_range
    numbers = {number for span in spans for number in range(span.start, span.end)}
    return Retired(numbers, set(described.reserved_name))


def contains(now: Any, then: Any, where: str, without: Collection[str] = ()) -> None:
    """Every member of `then` but those `without` is in `now` with the same value; `now` may have
    more.
    """
    if isinstance(then, dict):
        assert isinstance(now, dict), where
        for name, value in then.items():
            if name in without:
                continue
            assert name in now, f"{where}.{name} is gone"
            contains(now[name], value, f"{where}.{name}")
    elif isinstance(then, list) and isinstance(now, dict):
        # A tuple has become an object, with the tuple's members first.
        _, *values = now.values()
        contains(values[: len(then)], then, where)
    elif isinstance(then, list) and then and isinstance(then[0], dict | list):
        assert len(now) == len(then), where
        for index, (one, other) in enumerate(zip(now, then, strict=True)):
            contains(one, other, f"{where}[{index}]")
    else:
        assert now == then, where


def test_there_is_a_release_besides_this_tree() -> None:
    assert NEXT in RELEASES
    assert len(RELEASES) >= 2


def test_the_examples_of_this_tree_are_what_it_writes() -> None:
    assert described(NEXT) == descriptors(), AGAIN
    assert golden(NEXT, "messages") == {name: serialized(one).hex() for name, one in messages()}, (
        AGAIN
    )
    assert golden(NEXT, "values") == json.loads(json.dumps(values())), AGAIN
    assert golden(NEXT, "registry") == registry(), AGAIN


@pytest.mark.parametrize("release", RELEASES)
def test_what_a_release_wrote_is_read_to_equal_values(release: str) -> None:
    pool = DescriptorPool()
    for file in described(release).file:
        pool.Add(file)
    examples = golden(release, "messages")
    assert examples.keys() <= {name for name, _ in messages()}, (
        "a message or a member of a oneof is gone"
    )
    for name, hexadecimal in examples.items():
        data = bytes.fromhex(hexadecimal)
        then = GetMessageClass(
            pool.FindMessageTypeByName(f"{PACKAGE}.{name.partition('.')[0]}")
        ).FromString(data)
        now = present(name).FromString(data)
        retired = reserved(now)
        unknown = {field.field_number for field in UnknownFieldSet(now)}
        assert unknown <= retired.numbers, (
            f"{name}: a field of {release} is unknown now and not reserved"
        )
        told = {"preserving_proto_field_name": True}
        meant = {
            key: value
            for key, value in MessageToDict(then, **told).items()
            if key not in retired.names
        }
        assert MessageToDict(now, **told) == meant, name


@pytest.mark.parametrize("release", RELEASES)
def test_converters_understand_what_a_release_wrote(release: str) -> None:
    examples = golden(release, "messages")
    for name, then in golden(release, "values").items():
        message = present(name).FromString(bytes.fromhex(examples[name]))
        now = json.loads(json.dumps(plain(CONVERTERS[name.partition(".")[0]](message))))
        contains(now, then, name, reserved(message).names)


@pytest.mark.parametrize("release", RELEASES)
def test_entries_in_redis_of_a_release_are_believed(release: str) -> None:
    for name, raw in golden(release, "registry").items():
        now = json.loads(json.dumps(dataclasses.asdict(decode(REGISTRY[name], raw.encode()))))
        contains(now, json.loads(raw)["value"], name)


def members(found: FileDescriptorSet) -> Iterator[tuple[str, DescriptorProto]]:
    def below(prefix: str, message: DescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
        yield f"{prefix}{message.name}", message
        for nested in message.nested_type:
            yield from below(f"{prefix}{message.name}.", nested)

    for file in found.file:
        for message in file.message_type:
            yield from below("", message)


def breaks(then: FileDescriptorSet, now: FileDescriptorSet) -> list[str]:
    """What a peer of `then` would misunderstand of a peer of `now`, or the other way round."""
    found = []
    current = dict(members(now))
    for name, message in members(then):
        other = current.get(name)
        if other is None:
            found.append(f"message {name} is gone")
            continue
        numbers = {field.number: field for field in other.field}
        kept = {number for span in other.reserved_range for number in range(span.start, span.end)}
        for field in message.field:
            successor = numbers.get(field.number)
            what = f"{name}.{field.name} = {field.number}"
            if successor is None:
                if field.number not in kept:
                    found.append(f"{what} is gone and its number not reserved")
                continue
            for part in ("name", "type", "label", "type_name", "proto3_optional"):
                before, after = getattr(field, part), getattr(successor, part)
                if before != after:
                    found.append(f"{what}: {part} was {before!r} and is {after!r}")
            if _oneof(message, field) != _oneof(other, successor):
                found.append(f"{what} has changed its oneof")
        for span in message.reserved_range:
            lost = [
                number
                for number in range(span.start, span.end)
                if number in numbers or number not in kept
            ]
            found += [
                f"{name}: number {number} was reserved and is not any more" for number in lost
            ]
    methods = dict(_methods(now))
    for method, signature in _methods(then):
        if methods.get(method) != signature:
            found.append(f"{method} was {signature} and is {methods.get(method)}")
    return found


def _oneof(message: DescriptorProto, field: Any) -> str:
    return message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""


def _methods(found: FileDescriptorSet) -> Iterator[tuple[str, tuple[object, ...]]]:
    for file in found.file:
        for service in file.service:
            for one in service.method:
                streams = one.client_streaming, one.server_streaming
                yield f"{service.name}.{one.name}", (one.input_type, one.output_type, *streams)


@pytest.mark.parametrize("release", RELEASES)
def test_no_number_of_a_release_means_something_else_now(release: str) -> None:
    assert breaks(described(release), descriptors()) == []


@pytest.mark.parametrize(
    "change", ["name", "type", "number", "oneof", "message", "method", "reserved"]
)
def test_a_change_that_would_be_misunderstood_is_found(change: str) -> None:
    then, now = descriptors(), descriptors()
    file = next(one for one in now.file if one.name.endswith("transfer.proto"))
    blocks = next(one for one in file.message_type if one.name == "KvBlocks")
    match change:
        case "name":
            blocks.field[0].name = "order"
        case "type":
            blocks.field[0].type = 3
        case "number":
            blocks.field[0].number = 99
        case "oneof":
            frame = next(one for one in file.message_type if one.name == "KvFrame")
            frame.field[0].ClearField("oneof_index")
        case "message":
            file.message_type.remove(blocks)
        case "method":
            file.service[0].method[0].server_streaming = True
        case "reserved":
            blocks.ClearField("reserved_range")
    assert breaks(then, now)


def test_the_script_writes_where_it_is_told_to(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[3] / "scripts" / "write_wire_golden.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "examples")],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "examples").iterdir()}
    assert names == {"descriptors.binpb", "messages.json", "values.json", "registry.json"}
