"""A hand-off target: converts HandoffTarget of proto/kvrelay/v1/worker.proto."""

from __future__ import annotations

from kvrelay.v1 import worker_pb2 as pb
from kvrelay.wire.encoding.fields import to_message, to_value
from kvrelay.worker_messages import HandoffTarget


def target_to_proto(target: HandoffTarget) -> pb.HandoffTarget:
    """Converts a hand-off target to its message."""
    return to_message(pb.HandoffTarget, target)


def target_from_proto(message: pb.HandoffTarget) -> HandoffTarget:
    """Converts a message to a hand-off target."""
    return to_value(HandoffTarget, message)
