"""Commands from a router to a worker: converts SessionRequest of proto/kvrelay/v1/worker.proto."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvrelay.errors import InvalidArgument
from kvrelay.protocol_version import Protocol, ours
from kvrelay.types.requests import SequenceSpec
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.wire.encoding.fields import optional, to_message, to_value
from kvrelay.wire.handoff_target import target_from_proto, target_to_proto
from kvrelay.wire.protocol_version import protocol_from_proto, protocol_to_proto
from kvrelay.wire.sampling import params_from_proto, params_to_proto
from kvrelay.worker_messages import (
    Abort,
    Command,
    Prefill,
    PrefixSource,
    Renew,
    Reserve,
    ResyncCache,
    RunLocal,
)

# Longest lease, in seconds.
_LONGEST_S = 1e9


@dataclass(frozen=True, slots=True)
class Hello:
    """A router's first message on a session."""

    router_id: str
    protocol: Protocol = field(default_factory=ours)


def command_to_proto(command: Command | Hello) -> pb.SessionRequest:
    """Converts a command to its message."""
    match command:
        case Hello(router_id, protocol):
            hello = pb.Hello(router_id=router_id, protocol=protocol_to_proto(protocol))
            return pb.SessionRequest(hello=hello)
        case Reserve(spec):
            reserve = to_message(pb.Reserve, command, spec=_spec_to_proto(spec))
            return pb.SessionRequest(reserve=reserve)
        case Prefill(spec, target, source):
            prefill = pb.Prefill(
                spec=_spec_to_proto(spec),
                target=target_to_proto(target),
                source=None if source is None else to_message(pb.PrefixSource, source),
            )
            return pb.SessionRequest(prefill=prefill)
        case RunLocal(spec):
            return pb.SessionRequest(run_local=pb.RunLocal(spec=_spec_to_proto(spec)))
        case Renew():
            return pb.SessionRequest(renew=to_message(pb.Renew, command))
        case Abort():
            return pb.SessionRequest(abort=to_message(pb.Abort, command))
        case ResyncCache():
            return pb.SessionRequest(resync_cache=pb.ResyncCache())


def command_key(message: pb.SessionRequest) -> tuple[str, int] | None:
    """Returns the (request id, attempt) of the command's sequence; None if the command is not about
    a sequence.
    """
    match message.WhichOneof("command"):
        case "reserve" | "prefill" | "run_local" as kind:
            spec = getattr(message, kind).spec
            return spec.request_id, spec.attempt
        case "abort":
            return message.abort.request_id, message.abort.attempt
        case _:
            return None


def command_from_proto(message: pb.SessionRequest) -> Command | Hello | None:
    """Converts a message to a command. Returns None for a command of a future version. Raises
    InvalidArgument for invalid durations.
    """
    match message.WhichOneof("command"):
        case "hello":
            return Hello(message.hello.router_id, protocol_from_proto(message.hello.protocol))
        case "reserve":
            _check_lease(message.reserve.lease_seconds)
            spec = _spec_from_proto(message.reserve.spec)
            return to_value(Reserve, message.reserve, spec=spec)
        case "prefill":
            return _prefill_from_proto(message.prefill)
        case "run_local":
            return RunLocal(_spec_from_proto(message.run_local.spec))
        case "renew":
            _check_lease(message.renew.lease_seconds)
            return Renew(tuple(message.renew.lease_ids), message.renew.lease_seconds)
        case "abort":
            return to_value(Abort, message.abort)
        case "resync_cache":
            return ResyncCache()
        case _:
            return None


def _prefill_from_proto(message: pb.Prefill) -> Prefill:
    source = to_value(PrefixSource, message.source) if message.HasField("source") else None
    return Prefill(_spec_from_proto(message.spec), target_from_proto(message.target), source)


def _spec_to_proto(spec: SequenceSpec) -> pb.SequenceSpec:
    return to_message(pb.SequenceSpec, spec, sampling=params_to_proto(spec.sampling))


def _spec_from_proto(message: pb.SequenceSpec) -> SequenceSpec:
    if math.isnan(message.deadline_s):
        raise InvalidArgument("deadline_s is not a number", field="deadline_s")
    if message.HasField("itl_s") and not message.itl_s > 0:
        raise InvalidArgument(f"itl_s is {message.itl_s:g}; allowed is > 0", field="itl_s")
    return to_value(
        SequenceSpec,
        message,
        token_ids=tuple(message.token_ids),
        sampling=params_from_proto(message.sampling),
        deadline_s=optional(message, "deadline_s"),
        weight=message.weight if message.HasField("weight") else 1.0,
        itl_s=optional(message, "itl_s"),
    )


def _check_lease(seconds: float) -> None:
    """Raises InvalidArgument for a lease that would never end."""
    if not 0 <= seconds <= _LONGEST_S:
        raise InvalidArgument(
            f"lease_seconds is {seconds:g}; allowed is 0 to {_LONGEST_S:g}", field="lease_seconds"
        )
