"""The times of a request: converts Ledger of proto/kvrelay/v1/inference.proto."""

from __future__ import annotations

from kvrelay.types.requests import Attempt, Fetch, Handoff, Ledger
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.fields import to_message, to_value


def handoff_to_proto(handoff: Handoff) -> pb.Handoff:
    """Converts a hand-off to its message."""
    return to_message(pb.Handoff, handoff)


def handoff_from_proto(message: pb.Handoff) -> Handoff:
    """Converts a message to a hand-off."""
    return to_value(Handoff, message)


def ledger_to_proto(ledger: Ledger) -> pb.Ledger:
    """Converts a ledger to its message."""
    return to_message(
        pb.Ledger,
        ledger,
        phases=[pb.Phase(name=name, seconds=seconds) for name, seconds in ledger.phases],
        handoff=None if ledger.handoff is None else handoff_to_proto(ledger.handoff),
        attempts=[to_message(pb.Attempt, attempt) for attempt in ledger.attempts],
        fetch=None if ledger.fetch is None else to_message(pb.Fetch, ledger.fetch),
    )


def ledger_from_proto(message: pb.Ledger) -> Ledger:
    """Converts a message to a ledger."""
    return to_value(
        Ledger,
        message,
        phases=tuple((phase.name, phase.seconds) for phase in message.phases),
        handoff=handoff_from_proto(message.handoff) if message.HasField("handoff") else None,
        attempts=tuple(to_value(Attempt, attempt) for attempt in message.attempts),
        fetch=to_value(Fetch, message.fetch) if message.HasField("fetch") else None,
    )
