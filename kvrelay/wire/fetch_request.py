"""A request for KV of a prefix cache: converts FetchRequest of proto/kvrelay/v1/transfer.proto."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.protocol_version import Protocol, ours
from kvrelay.v1 import transfer_pb2 as pb
from kvrelay.wire.encoding.fields import to_message, to_value
from kvrelay.wire.handoff_target import target_from_proto, target_to_proto
from kvrelay.wire.protocol_version import protocol_from_proto, protocol_to_proto
from kvrelay.worker_messages import HandoffTarget


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Requests the KV of these tokens. The KV is pushed to the lease of the requesting worker.

    Tokens whose KV is cached at the target are not pushed. A worker of release 0.1, which
    identifies blocks by 64-bit hashes, sends no tokens.
    """

    request_id: str
    attempt: int
    # From the start of the sequence to the end of the requested KV.
    token_ids: tuple[int, ...]
    target: HandoffTarget
    # Tokens that the capability covers, from the start of the request.
    granted_tokens: int
    capability: str = field(repr=False)
    # Salt of the sequence.
    salt: str = field(default="", repr=False)
    # Hash of the files of the sequence's adapter; empty for the base model.
    adapter: str = ""
    # Protocol of the requesting worker.
    protocol: Protocol = field(default_factory=ours)


def fetch_request_to_proto(request: FetchRequest) -> pb.FetchRequest:
    """Converts a fetch request to its message."""
    return to_message(
        pb.FetchRequest,
        request,
        target=target_to_proto(request.target),
        protocol=protocol_to_proto(request.protocol),
    )


def fetch_request_from_proto(message: pb.FetchRequest) -> FetchRequest:
    """Converts a message to a fetch request."""
    return to_value(
        FetchRequest,
        message,
        token_ids=tuple(message.token_ids),
        target=target_from_proto(message.target),
        protocol=protocol_from_proto(message.protocol),
    )
