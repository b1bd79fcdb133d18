"""Events from a worker to a router: converts SessionResponse of proto/kvrelay/v1/worker.proto."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvrelay.errors import Code, InvalidArgument
from kvrelay.protocol_version import Protocol, ours
from kvrelay.types.block_keys import KEY_BYTES, MAX_KEYS
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.wire.encoding.fields import to_message, to_value
from kvrelay.wire.handoff_target import target_from_proto, target_to_proto
from kvrelay.wire.ledger import handoff_from_proto, handoff_to_proto
from kvrelay.wire.protocol_version import protocol_from_proto, protocol_to_proto
from kvrelay.wire.sequence_tokens import check_times, tokens_from_proto, tokens_to_proto
from kvrelay.worker_messages import (
    CacheUpdate,
    Event,
    Failed,
    HandedOff,
    Refused,
    Reserved,
    SequenceTokens,
    TokenBatch,
)


@dataclass(frozen=True, slots=True)
class Welcome:
    """A worker's answer to Hello."""

    worker_id: str
    epoch: int
    # Key for the capabilities to fetch from the worker's prefix cache.
    lending_key: bytes = field(default=b"", repr=False)
    protocol: Protocol = field(default_factory=ours)


@dataclass(frozen=True, slots=True)
class Decoded:
    """The content of one message on a session, decoded by a router.

    `malformed`: the attempts for which the message has impossible values. The router treats them as
    failed, although the worker does not know of the failure.
    """

    events: tuple[Event | Welcome, ...] = ()
    malformed: tuple[Failed, ...] = ()


def event_to_proto(event: Event | Welcome) -> pb.SessionResponse:
    """Converts an event to its message."""
    match event:
        case Welcome(protocol=protocol):
            welcome = to_message(pb.Welcome, event, protocol=protocol_to_proto(protocol))
            return pb.SessionResponse(welcome=welcome)
        case Reserved(target=target):
            reserved = to_message(pb.Reserved, event, target=target_to_proto(target))
            return pb.SessionResponse(reserved=reserved)
        case Refused():
            return pb.SessionResponse(refused=to_message(pb.Refused, event))
        case TokenBatch(sequences):
            batch = pb.TokenBatch(sequences=[tokens_to_proto(one) for one in sequences])
            return pb.SessionResponse(tokens=batch)
        case HandedOff(handoff=handoff):
            handed_off = to_message(pb.HandedOff, event, handoff=handoff_to_proto(handoff))
            return pb.SessionResponse(handed_off=handed_off)
        case Failed(code=code):
            return pb.SessionResponse(failed=to_message(pb.Failed, event, code=code.name))
        case CacheUpdate():
            return pb.SessionResponse(cache=to_message(pb.CacheUpdate, event))


def event_from_proto(message: pb.SessionResponse) -> Event | Welcome:
    """Converts a message to an event. Raises InvalidArgument for an event of a future version, for
    invalid times, and for keys that are no whole keys or too many.
    """
    match message.WhichOneof("event"):
        case "welcome":
            protocol = protocol_from_proto(message.welcome.protocol)
            return to_value(Welcome, message.welcome, protocol=protocol)
        case "reserved":
            target = target_from_proto(message.reserved.target)
            return to_value(Reserved, message.reserved, target=target)
        case "refused":
            return to_value(Refused, message.refused)
        case "tokens":
            return TokenBatch(tuple(map(tokens_from_proto, message.tokens.sequences)))
        case "handed_off":
            handoff = handoff_from_proto(message.handed_off.handoff)
            check_times(handoff.seconds, handoff.exposed_seconds)
            return to_value(HandedOff, message.handed_off, handoff=handoff)
        case "failed":
            name = message.failed.code
            code = Code[name] if name in Code.__members__ else Code.INTERNAL
            return to_value(Failed, message.failed, code=code)
        case "cache":
            return _cache_from_proto(message.cache)
        case unknown:
            raise InvalidArgument(
                f"session event {unknown!r} is unknown to this version", field="event"
            )


def _cache_from_proto(message: pb.CacheUpdate) -> CacheUpdate:
    for name in ("stored", "removed"):
        size = len(getattr(message, name))
        if size % KEY_BYTES or size > MAX_KEYS * KEY_BYTES:
            raise InvalidArgument(
                f"{name} has {size} bytes; allowed are at most {MAX_KEYS} keys of {KEY_BYTES} "
                "bytes",
                field=name,
            )
    return to_value(CacheUpdate, message)


def decode_events(message: pb.SessionResponse) -> Decoded:
    """Decodes a message without raising: an impossible value fails only the sequence that it
    belongs to. An event of a future version gives an empty result, and so does an impossible update
    of the cache: the router then misses its number.
    """
    kind = message.WhichOneof("event")
    if kind is None:
        return Decoded()
    try:
        return Decoded((event_from_proto(message),))
    except InvalidArgument as error:
        if kind == "cache":
            return Decoded()
        if kind != "tokens":
            return Decoded(malformed=(_malformed(getattr(message, kind), error),))
    good: list[SequenceTokens] = []
    bad: list[Failed] = []
    for sequence in message.tokens.sequences:
        try:
            good.append(tokens_from_proto(sequence))
        except InvalidArgument as error:
            bad.append(_malformed(sequence, error))
    return Decoded((TokenBatch(tuple(good)),) if good else (), tuple(bad))


def _malformed(body: Any, error: InvalidArgument) -> Failed:
    return Failed(body.request_id, body.attempt, Code.INTERNAL, f"malformed event: {error.message}")
