"""The session messages between routers and workers: converts proto/kvrelay/v1/worker.proto to and
from `kvrelay.messages`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, get_args

from kvrelay.errors import Code, InvalidArgument
from kvrelay.messages import (
    Abort,
    Command,
    Event,
    Failed,
    HandedOff,
    HandoffTarget,
    Prefill,
    PrefixSource,
    Refused,
    Renew,
    Reserve,
    Reserved,
    RunLocal,
    SequenceTokens,
    TokenBatch,
)
from kvrelay.protocol import Protocol, ours
from kvrelay.types import FinishReason, PrefillTimings, SequenceSpec
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1.worker_pb2_grpc import (
    WorkerServiceServicer,
    WorkerServiceStub,
    add_WorkerServiceServicer_to_server,
)
from kvrelay.wire.inference import (
    handoff_from_proto,
    handoff_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    params_from_proto,
    params_to_proto,
)
from kvrelay.wire.protocol import protocol_from_proto, protocol_to_proto

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
]


@dataclass(frozen=True, slots=True)
class Hello:
    """A router's first message on a session."""

    router_id: str
    protocol: Protocol = field(default_factory=ours)


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


def command_to_proto(command: Command | Hello) -> pb.SessionRequest:
    """Converts a command to its message."""
    match command:
        case Hello(router_id, protocol):
            return pb.SessionRequest(
                hello=pb.Hello(router_id=router_id, protocol=protocol_to_proto(protocol))
            )
        case Reserve(spec, lease_seconds, prefill_worker):
            return pb.SessionRequest(
                reserve=pb.Reserve(
                    spec=_spec_to_proto(spec),
                    lease_seconds=lease_seconds,
                    prefill_worker=prefill_worker,
                )
            )
        case Prefill(spec, target, source):
            return pb.SessionRequest(
                prefill=pb.Prefill(
                    spec=_spec_to_proto(spec),
                    target=target_to_proto(target),
                    source=_source_to_proto(source),
                )
            )
        case RunLocal(spec):
            return pb.SessionRequest(run_local=pb.RunLocal(spec=_spec_to_proto(spec)))
        case Renew(lease_ids, lease_seconds):
            return pb.SessionRequest(
                renew=pb.Renew(lease_ids=lease_ids, lease_seconds=lease_seconds)
            )
        case Abort(request_id, attempt):
            return pb.SessionRequest(abort=pb.Abort(request_id=request_id, attempt=attempt))


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
            reserve = message.reserve
            _check_lease(reserve.lease_seconds)
            return Reserve(
                _spec_from_proto(reserve.spec), reserve.lease_seconds, reserve.prefill_worker
            )
        case "prefill":
            prefill = message.prefill
            source = None
            if prefill.HasField("source"):
                known = prefill.source
                source = PrefixSource(
                    known.worker_id, known.address, known.cached_tokens, known.capability
                )
            return Prefill(
                _spec_from_proto(prefill.spec), target_from_proto(prefill.target), source
            )
        case "run_local":
            return RunLocal(_spec_from_proto(message.run_local.spec))
        case "renew":
            _check_lease(message.renew.lease_seconds)
            return Renew(tuple(message.renew.lease_ids), message.renew.lease_seconds)
        case "abort":
            return Abort(message.abort.request_id, message.abort.attempt)
        case _:
            return None


def event_to_proto(event: Event | Welcome) -> pb.SessionResponse:
    """Converts an event to its message."""
    match event:
        case Welcome(worker_id, epoch, lending_key, protocol):
            welcome = pb.Welcome(worker_id=worker_id, epoch=epoch, lending_key=lending_key)
            welcome.protocol.CopyFrom(protocol_to_proto(protocol))
            return pb.SessionResponse(welcome=welcome)
        case Reserved(request_id, attempt, target):
            return pb.SessionResponse(
                reserved=pb.Reserved(
                    request_id=request_id, attempt=attempt, target=target_to_proto(target)
                )
            )
        case Refused(request_id, attempt, reason):
            return pb.SessionResponse(
                refused=pb.Refused(request_id=request_id, attempt=attempt, reason=reason)
            )
        case TokenBatch(sequences):
            return pb.SessionResponse(
                tokens=pb.TokenBatch(sequences=[_tokens_to_proto(one) for one in sequences])
            )
        case HandedOff(request_id, attempt, handoff):
            return pb.SessionResponse(
                handed_off=pb.HandedOff(
                    request_id=request_id, attempt=attempt, handoff=handoff_to_proto(handoff)
                )
            )
        case Failed(request_id, attempt, code, text):
            return pb.SessionResponse(
                failed=pb.Failed(
                    request_id=request_id, attempt=attempt, code=code.name, message=text
                )
            )


def event_from_proto(message: pb.SessionResponse) -> Event | Welcome:
    """Converts a message to an event. Raises InvalidArgument for an event of a future version, and
    for invalid times.
    """
    match message.WhichOneof("event"):
        case "welcome":
            welcome = message.welcome
            return Welcome(
                welcome.worker_id,
                welcome.epoch,
                welcome.lending_key,
                protocol_from_proto(welcome.protocol),
            )
        case "reserved":
            body = message.reserved
            return Reserved(body.request_id, body.attempt, target_from_proto(body.target))
        case "refused":
            return Refused(
                message.refused.request_id, message.refused.attempt, message.refused.reason
            )
        case "tokens":
            return TokenBatch(tuple(_tokens_from_proto(one) for one in message.tokens.sequences))
        case "handed_off":
            done = message.handed_off
            handoff = handoff_from_proto(done.handoff)
            _check_times(handoff.seconds, handoff.exposed_seconds)
            return HandedOff(done.request_id, done.attempt, handoff)
        case "failed":
            failed = message.failed
            code = Code[failed.code] if failed.code in Code.__members__ else Code.INTERNAL
            return Failed(failed.request_id, failed.attempt, code, failed.message)
        case unknown:
            raise InvalidArgument(
                f"session event {unknown!r} is unknown to this version", field="event"
            )


def decode_events(message: pb.SessionResponse) -> Decoded:
    """Decodes a message without raising: an impossible value fails only the sequence that it
    belongs to. An event of a future version gives an empty result.
    """
    kind = message.WhichOneof("event")
    if kind is None:
        return Decoded()
    try:
        return Decoded((event_from_proto(message),))
    except InvalidArgument as error:
        if kind != "tokens":
            return Decoded(malformed=(_malformed(getattr(message, kind), error),))
    good: list[SequenceTokens] = []
    bad: list[Failed] = []
    for sequence in message.tokens.sequences:
        try:
            good.append(_tokens_from_proto(sequence))
        except InvalidArgument as error:
            bad.append(_malformed(sequence, error))
    return Decoded((TokenBatch(tuple(good)),) if good else (), tuple(bad))


def _malformed(body: Any, error: InvalidArgument) -> Failed:
    return Failed(body.request_id, body.attempt, Code.INTERNAL, f"malformed event: {error.message}")


def _spec_to_proto(spec: SequenceSpec) -> pb.SequenceSpec:
    return pb.SequenceSpec(
        request_id=spec.request_id,
        attempt=spec.attempt,
        token_ids=spec.token_ids,
        prompt_len=spec.prompt_len,
        sampling=params_to_proto(spec.sampling),
        salt=spec.salt,
        priority=spec.priority,
        deadline_s=spec.deadline_s,
        tenant=spec.tenant,
        weight=spec.weight,
    )


def _spec_from_proto(message: pb.SequenceSpec) -> SequenceSpec:
    if math.isnan(message.deadline_s):
        raise InvalidArgument("deadline_s is not a number", field="deadline_s")
    return SequenceSpec(
        request_id=message.request_id,
        attempt=message.attempt,
        token_ids=tuple(message.token_ids),
        prompt_len=message.prompt_len,
        sampling=params_from_proto(message.sampling),
        salt=message.salt,
        priority=message.priority,
        deadline_s=message.deadline_s if message.HasField("deadline_s") else None,
        tenant=message.tenant,
        weight=message.weight if message.HasField("weight") else 1.0,
    )


_LONGEST_S = 1e9
_FINISH_REASONS: dict[str, FinishReason] = {one: one for one in get_args(FinishReason)}
_TARGET_FIELDS = HandoffTarget.__dataclass_fields__.keys()


def _source_to_proto(source: PrefixSource | None) -> pb.PrefixSource | None:
    if source is None:
        return None
    return pb.PrefixSource(
        worker_id=source.worker_id,
        address=source.address,
        cached_tokens=source.cached_tokens,
        capability=source.capability,
    )


def target_to_proto(target: HandoffTarget) -> pb.HandoffTarget:
    """Converts a hand-off target to its message."""
    return pb.HandoffTarget(**{name: getattr(target, name) for name in _TARGET_FIELDS})


def target_from_proto(message: pb.HandoffTarget) -> HandoffTarget:
    """Converts a message to a hand-off target."""
    return HandoffTarget(**{name: getattr(message, name) for name in _TARGET_FIELDS})


def _tokens_to_proto(tokens: SequenceTokens) -> pb.SequenceTokens:
    timings = tokens.prefill
    return pb.SequenceTokens(
        request_id=tokens.request_id,
        attempt=tokens.attempt,
        index=tokens.index,
        token_ids=tokens.token_ids,
        logprobs=[logprobs_to_proto(one) for one in tokens.logprobs],
        finish_reason=tokens.finish_reason or "",
        prefill=None
        if timings is None
        else pb.PrefillTimings(
            queue_seconds=timings.queue_seconds,
            compute_seconds=timings.compute_seconds,
            cached_tokens=timings.cached_tokens,
            chunks=timings.chunks,
            fetched_tokens=timings.fetched_tokens,
            fetch_seconds=timings.fetch_seconds,
        ),
    )


def _tokens_from_proto(message: pb.SequenceTokens) -> SequenceTokens:
    """Decodes the tokens of one sequence. This runs for each streamed token, so it skips fields
    that are not set. Raises InvalidArgument.
    """
    token_ids = tuple(message.token_ids)
    logprobs = tuple(map(logprobs_from_proto, message.logprobs)) if message.logprobs else ()
    if min(token_ids, default=0) < 0 or any(
        token_id < 0 for one in logprobs for token_id, _ in one.top
    ):
        raise InvalidArgument(
            f"a token of {message.request_id!r:.200} is negative", field="token_ids"
        )
    return SequenceTokens(
        message.request_id,
        message.attempt,
        message.index,
        token_ids,
        logprobs,
        _finish_reason(message.finish_reason) if message.finish_reason else None,
        _timings_from_proto(message.prefill) if message.HasField("prefill") else None,
    )


def _finish_reason(text: str) -> FinishReason:
    """Raises InvalidArgument for a finish reason of a future version, because clients would not
    know it either.
    """
    reason = _FINISH_REASONS.get(text)
    if reason is None:
        raise InvalidArgument(
            f"finish reason {text!r:.40} is unknown to this version", field="finish_reason"
        )
    return reason


def _check_lease(seconds: float) -> None:
    """Raises InvalidArgument for a lease that would never end."""
    if not 0 <= seconds <= _LONGEST_S:
        raise InvalidArgument(
            f"lease_seconds is {seconds:g}; allowed is 0 to {_LONGEST_S:g}", field="lease_seconds"
        )


def _check_times(*seconds: float) -> None:
    """Raises InvalidArgument for times that no worker can have measured, because sums with them
    would not be numbers.
    """
    if not all(abs(one) <= _LONGEST_S for one in seconds):
        raise InvalidArgument(
            f"times {seconds} are not valid durations in seconds", field="seconds"
        )


def _timings_from_proto(message: pb.PrefillTimings) -> PrefillTimings:
    _check_times(message.queue_seconds, message.compute_seconds, message.fetch_seconds)
    return PrefillTimings(
        message.queue_seconds,
        message.compute_seconds,
        message.cached_tokens,
        message.chunks,
        message.fetched_tokens,
        message.fetch_seconds,
    )
