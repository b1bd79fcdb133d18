"""Writes one example of each message between processes, as the code of this tree serializes it.

The examples of a release stay in tests/unit/wire/golden/RELEASE as long as its processes must work
with newer ones. The examples in `next` belong to this tree. Run the script after a change of a
message. The diff shows the changes on the wire.

    python scripts/write_wire_golden.py

Files: descriptors.binpb (a FileDescriptorSet), messages.json (name to bytes), values.json (the
messages as converted by kvrelay.wire), registry.json (values in Redis).
"""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, get_args, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

import kvrelay.v1
from kvrelay.state.registry_codec import encode
from kvrelay.types.control_plane import RouterLoad, ScalingDecision
from kvrelay.types.workers import PendingWorker, WorkerInfo
from kvrelay.wire import cluster, inference, store, transfer, worker
from kvrelay.wire.encoding import varint

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "unit" / "wire" / "golden"
NEXT = "next"
REGISTRY = {
    kind.__name__: kind for kind in (WorkerInfo, RouterLoad, PendingWorker, ScalingDecision)
}
# Values of fields for which the converters accept only certain strings.
WORDS = {
    "pool": "decode",
    "PoolStatus.name": "decode",
    "state": "ready",
    "finish_reason": "length",
    "code": "UNAVAILABLE",
    "path": "local",
    "address": "127.0.0.1:50051",
    "StoreBlocksRequest.layout_hash": "0123456789abcdef",
}
# Values of fields of bytes that have to be whole keys.
KEYS = {
    "CacheUpdate.stored": bytes(range(1, 17)),
    "CacheUpdate.removed": bytes(range(17, 25)),
    "StoreBlocksRequest.identities": bytes(range(1, 65)),
}
CONVERTERS = {
    "SessionRequest": worker.command_from_proto,
    "SessionResponse": worker.event_from_proto,
    "KvFrame": lambda message: transfer.frame_from_bytes(serialized(message)),
    "KvReceipt": transfer.receipt_from_proto,
    "FetchRequest": transfer.fetch_request_from_proto,
    "GenerateRequest": inference.request_from_proto,
    "GenerateResponse": inference.response_from_proto,
    "ListModelsResponse": inference.models_from_proto,
    "ClusterStatus": cluster.cluster_status_from_proto,
    "StoreBlocksRequest": store.store_blocks_from_proto,
    "GetStoreStatusResponse": store.status_from_proto,
}


def serialized(message: Message) -> bytes:
    """Serializes a message like a sender. The payload of hand-off blocks is the last field."""
    if message.DESCRIPTOR.name != "KvFrame" or message.WhichOneof("frame") != "blocks":
        return message.SerializeToString(deterministic=True)
    blocks = type(message.blocks)()
    blocks.CopyFrom(message.blocks)
    blocks.ClearField("payload")
    payload = type(blocks)(payload=message.blocks.payload)
    body = blocks.SerializeToString(deterministic=True) + payload.SerializeToString()
    return varint.tag(message.BLOCKS_FIELD_NUMBER) + varint.encoded(len(body)) + body


def descriptors() -> FileDescriptorSet:
    """Returns the descriptors of all .proto files. Imported files come first."""
    found = FileDescriptorSet()
    names: set[str] = set()

    def add(descriptor: Any) -> None:
        if descriptor.name not in names:
            names.add(descriptor.name)
            for dependency in descriptor.dependencies:
                add(dependency)
            descriptor.CopyToProto(found.file.add())

    for module in sorted(
        one.name for one in iter_modules(kvrelay.v1.__path__) if one.name.endswith("_pb2")
    ):
        add(import_module(f"kvrelay.v1.{module}").DESCRIPTOR)
    return found


def messages() -> Iterator[tuple[str, Message]]:
    """Yields (name, example with all fields set). A message with a oneof has one example per
    member.
    """
    modules = sorted(
        one.name for one in iter_modules(kvrelay.v1.__path__) if one.name.endswith("_pb2")
    )
    for module in modules:
        for name, descriptor in sorted(
            import_module(f"kvrelay.v1.{module}").DESCRIPTOR.message_types_by_name.items()
        ):
            members = [
                field
                for oneof in descriptor.oneofs
                if len(oneof.fields) > 1
                for field in oneof.fields
            ]
            for member in members or [None]:
                yield (
                    name if member is None else f"{name}.{member.name}",
                    example(descriptor, member),
                )


def example(descriptor: Descriptor, member: FieldDescriptor | None = None) -> Message:
    """Returns a message with all fields set, and `member` of its oneof."""
    message: Message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if (
            oneof is not None
            and len(oneof.fields) > 1
            and field is not member
            and field.name != (member or field).name
        ):
            continue
        _set(message, field)
    return message


def _set(message: Message, field: FieldDescriptor) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        getattr(message, field.name)[_scalar(key)] = _scalar(value)
    elif field.message_type is not None:
        below = getattr(message, field.name)
        copied = example(field.message_type)
        below.extend([copied, copied]) if field.is_repeated else below.CopyFrom(copied)
    elif field.is_repeated:
        getattr(message, field.name).extend([_scalar(field), _scalar(field)])
    else:
        setattr(message, field.name, _scalar(field))


def _scalar(field: FieldDescriptor) -> Any:
    """Returns a value that differs from the default and from other fields of the message."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return field.number + 0.5
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            whole = f"{field.containing_type.name}.{field.name}"
            return KEYS.get(whole) or f"{field.name} {field.number}".encode()
        case FieldDescriptor.CPPTYPE_STRING:
            whole = f"{field.containing_type.name}.{field.name}"
            return WORDS.get(whole) or WORDS.get(field.name) or f"{field.name}-{field.number}"
        case _:
            return 100 + field.number


def values() -> dict[str, Any]:
    """Returns the converted messages by name."""
    found = {}
    for name, message in messages():
        convert = CONVERTERS.get(name.partition(".")[0])
        if convert is not None:
            found[name] = plain(convert(message))
    return found


def plain(value: Any) -> Any:
    """Converts a value to JSON types. A dataclass includes its name."""
    if is_dataclass(value) and not isinstance(value, type):
        members = {one.name: plain(getattr(value, one.name)) for one in fields(value)}
        return {"type": type(value).__name__} | members
    if isinstance(value, tuple | list | array):
        return [plain(one) for one in value]
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    return getattr(value, "name", value)


def registry() -> dict[str, str]:
    """Returns the encoded registry values by name."""
    return {name: encode(_filled(kind)) for name, kind in REGISTRY.items()}


def _filled(kind: Any, prefix: str = "") -> Any:
    """Returns a dataclass value with all fields set that the registry stores."""
    hints = get_type_hints(kind)
    given: dict[str, Any] = {}
    for number, one in enumerate(fields(kind), 1):
        hint = hints[one.name]
        choices = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
        if is_dataclass(hint):
            given[one.name] = _filled(hint)
        elif one.name in WORDS:
            given[one.name] = WORDS[one.name]
        elif choices[0] is bool:
            given[one.name] = True
        elif choices[0] is int:
            given[one.name] = 100 + number
        elif choices[0] is float:
            given[one.name] = number + 0.5
        elif choices[0] is str and get_args(hint) and Ellipsis in get_args(hint):
            given[one.name] = (f"{one.name}-{number}",)
        elif hint is str:
            given[one.name] = f"{one.name}-{number}"
        elif one.default is MISSING:
            raise SystemExit(f"{kind.__name__}.{one.name}: no example for {hint}")
    return kind(**given)


def write(folder: Path) -> None:
    """Writes all files to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "descriptors.binpb").write_bytes(descriptors().SerializeToString(deterministic=True))
    hexadecimal = {name: serialized(one).hex() for name, one in messages()}
    for name, content in (
        ("messages", hexadecimal),
        ("values", values()),
        ("registry", registry()),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "release", nargs="?", default=NEXT, help="Name of the folder in tests/unit/wire/golden."
    )
    write(GOLDEN / parser.parse_args().release)
    return 0


if __name__ == "__main__":
    sys.exit(main())
