"""The times of a request: converts Ledger of proto/kvrelay/v1/inference.proto."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.types.requests import Attempt, Fetch, Handoff, Ledger
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.encoding.fields import to_message, to_value


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
        phases=_phases_to_proto(ledger.phases),
        handoff=None if ledger.handoff is None else handoff_to_proto(ledger.handoff),
        attempts=[
            to_message(pb.Attempt, attempt, phases=_phases_to_proto(attempt.phases))
            for attempt in ledger.attempts
        ],
        fetch=None if ledger.fetch is None else to_message(pb.Fetch, ledger.fetch),
    )


def ledger_from_proto(message: pb.Ledger) -> Ledger:
    """Converts a message to a ledger."""
    return to_value(
        Ledger,
        message,
        phases=_phases_from_proto(message.phases),
        handoff=handoff_from_proto(message.handoff) if message.HasField("handoff") else None,
        attempts=tuple(
            to_value(Attempt, attempt, phases=_phases_from_proto(attempt.phases))
            for attempt in message.attempts
        ),
        fetch=to_value(Fetch, message.fetch) if message.HasField("fetch") else None,
    )


def _phases_to_proto(phases: Iterable[tuple[str, float]]) -> list[pb.Phase]:
    return [pb.Phase(name=name, seconds=seconds) for name, seconds in phases]


def _phases_from_proto(messages: Iterable[pb.Phase]) -> tuple[tuple[str, float], ...]:
    return tuple((phase.name, phase.seconds) for phase in messages)
