"""Converts `kvrelay.protocol_version.Protocol` to and from proto/kvrelay/v1/cluster.proto."""

from __future__ import annotations

from kvrelay.protocol_version import MAX_FEATURES, MAX_TEXT, Protocol, printable
from kvrelay.v1 import cluster_pb2 as pb


def protocol_to_proto(protocol: Protocol) -> pb.Protocol:
    """Converts a protocol to its message."""
    return pb.Protocol(
        version=protocol.version,
        oldest=protocol.oldest,
        features=protocol.features,
        release=protocol.release,
    )


def protocol_from_proto(message: pb.Protocol) -> Protocol:
    """Converts a peer's message to a protocol. Accepts any content: long texts are cut and made
    printable. A missing message becomes version 0.
    """
    features = tuple(
        one for one in message.features[:MAX_FEATURES] if len(one) <= MAX_TEXT and one.isprintable()
    )
    return Protocol(message.version, message.oldest, features, printable(message.release))
