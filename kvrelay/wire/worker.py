"""The sessions between routers and workers: the service of proto/kvrelay/v1/worker.proto and its
messages.
"""

from __future__ import annotations

from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1.worker_pb2_grpc import (
    WorkerServiceServicer,
    WorkerServiceStub,
    add_WorkerServiceServicer_to_server,
)
from kvrelay.wire.commands import Hello, command_from_proto, command_key, command_to_proto
from kvrelay.wire.events import (
    Decoded,
    Welcome,
    decode_events,
    event_from_proto,
    event_to_proto,
)
from kvrelay.wire.handoff_target import target_from_proto, target_to_proto

__all__ = [
    "Decoded",
    "Hello",
    "Welcome",
    "WorkerServiceServicer",
    "WorkerServiceStub",
    "add_WorkerServiceServicer_to_server",
    "command_from_proto",
    "command_key",
    "command_to_proto",
    "decode_events",
    "event_from_proto",
    "event_to_proto",
    "pb",
    "target_from_proto",
    "target_to_proto",
]
