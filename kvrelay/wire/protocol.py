"""`kvrelay.protocol.Protocol` to proto/kvrelay/v1/cluster.proto and back."""

from __future__ import annotations

from kvrelay.protocol import MAX_FEATURES, MAX_TEXT, Protocol, printable
from kvrelay.v1 import cluster_pb2 as pb


def protocol_to_proto(protocol: Protocol) -> pb.Protocol:
    return pb.Protocol(
        version=protocol.version,
        oldest=protocol.oldest,
        features=protocol.features,
        release=protocol.release,
    )


def protocol_from_proto(message: pb.Protocol) -> Protocol:
    """Whatever a peer sends: texts are cut and made printable. A message that is not there is
    version 0.
    """
    features = tuple(
        one for one in message.features[:MAX_FEATURES] if len(one) <= MAX_TEXT and one.isprintable()
    )
    return Protocol(message.version, message.oldest, features, printable(message.release))
