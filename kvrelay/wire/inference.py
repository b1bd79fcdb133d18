"""The messages of the public API: converts proto/kvrelay/v1/inference.proto to and from frozen
dataclasses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from kvrelay.errors import InvalidArgument
from kvrelay.types import (
    Attempt,
    FinishReason,
    Handoff,
    Ledger,
    Path,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)

__all__ = [
    "SERVICE_NAME",
    "GenerateRequest",
    "GenerateResponse",
    "InferenceServiceServicer",
    "InferenceServiceStub",
    "ModelInfo",
    "SamplingOptions",
    "add_InferenceServiceServicer_to_server",
    "finish_reason_from_proto",
    "handoff_from_proto",
    "handoff_to_proto",
    "ledger_from_proto",
    "ledger_to_proto",
    "logprobs_from_proto",
    "logprobs_to_proto",
    "models_from_proto",
    "models_to_proto",
    "params_from_proto",
    "params_to_proto",
    "pb",
    "request_from_proto",
    "request_to_proto",
    "response_from_proto",
    "response_to_proto",
    "sampling_from_proto",
    "sampling_to_proto",
]

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The sampling options of a client. None means unset and takes the default of
    SamplingParams.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def with_defaults(self) -> SamplingParams:
        """Returns the parameters, with the defaults of SamplingParams for unset options."""
        return SamplingParams(
            **{name: value for name in _FIELDS if (value := getattr(self, name)) is not None}
        )


_FIELDS = tuple(one.name for one in fields(SamplingOptions))
_OPTIONAL = tuple(one.name for one in fields(SamplingOptions) if one.default is None)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A client's request, not yet validated. Exactly one of prompt, messages and token_ids should
    be set.
    """

    request_id: str = ""
    model: str = ""
    prompt: str | None = None
    # (role, content) pairs.
    messages: tuple[tuple[str, str], ...] = ()
    token_ids: tuple[int, ...] = ()
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    priority: int = 0
    # Token ids of this answer that the client already has.
    resume: tuple[int, ...] = ()
    # See `Tenant.salt_for`.
    cache_salt: str | None = field(default=None, repr=False)
    # Fingerprint of the model that gave the tokens in `resume`. A router with another model rejects
    # the request.
    system_fingerprint: str = ""


# Not frozen: an instance is made for each streamed token, and a frozen one takes five times as long
# to make.
@dataclass(slots=True)
class GenerateResponse:
    """Some tokens of an answer. Only the last response sets the fields after `logprobs`."""

    request_id: str
    # Index of the first token of this response, counted from the start of the answer.
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    path: Path | None = None
    why: str = ""
    ledger: Ledger | None = None
    # Fingerprint of the model. The first response with tokens sets this field too.
    system_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that a router serves."""

    id: str
    # Tokens of prompt and answer together.
    max_model_len: int
    dtype: str
    architecture: str
    # Token ids are below this number; 0 if the router does not report it.
    vocab_size: int = 0


def request_to_proto(request: GenerateRequest) -> pb.GenerateRequest:
    """Converts a request to its message. Raises InvalidArgument, naming the field, for a value that
    the message cannot hold.
    """
    message = pb.GenerateRequest(sampling=sampling_to_proto(request.sampling))
    for name in ("request_id", "model", "prompt", "priority", "cache_salt", "system_fingerprint"):
        _set(message, name, getattr(request, name))
    for name in ("token_ids", "resume"):
        _extend(message, name, getattr(request, name))
    try:
        message.messages.extend(
            pb.ChatMessage(role=role, content=content) for role, content in request.messages
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"messages: {error}; give (role, content) pairs of text", field="messages"
        ) from error
    return message


def request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Converts a message to an unvalidated request."""
    return GenerateRequest(
        request_id=message.request_id,
        model=message.model,
        prompt=message.prompt if message.HasField("prompt") else None,
        messages=tuple((one.role, one.content) for one in message.messages),
        token_ids=tuple(message.token_ids),
        sampling=sampling_from_proto(message.sampling),
        priority=message.priority,
        resume=tuple(message.resume),
        cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
        system_fingerprint=message.system_fingerprint,
    )


def response_to_proto(response: GenerateResponse) -> pb.GenerateResponse:
    """Converts a response to its message. Unset fields stay unset."""
    message = pb.GenerateResponse(
        request_id=response.request_id,
        index=response.index,
        token_ids=response.token_ids,
        text=response.text,
    )
    if response.logprobs:
        message.logprobs.extend(map(logprobs_to_proto, response.logprobs))
    if response.finish_reason is not None:
        message.finish_reason = response.finish_reason
    if response.path is not None:
        message.path = response.path
    if response.why:
        message.why = response.why
    if response.usage is not None:
        message.usage.CopyFrom(_to_message(pb.Usage, response.usage))
    if response.ledger is not None:
        message.ledger.CopyFrom(ledger_to_proto(response.ledger))
    if response.system_fingerprint:
        message.system_fingerprint = response.system_fingerprint
    return message


def response_from_proto(message: pb.GenerateResponse) -> GenerateResponse:
    """Converts a message to a response."""
    return GenerateResponse(
        request_id=message.request_id,
        index=message.index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=tuple(logprobs_from_proto(one) for one in message.logprobs),
        finish_reason=finish_reason_from_proto(message.finish_reason),
        usage=_to_value(Usage, message.usage) if message.HasField("usage") else None,
        path=cast(Path, message.path) if message.path else None,
        why=message.why,
        ledger=ledger_from_proto(message.ledger) if message.HasField("ledger") else None,
        system_fingerprint=message.system_fingerprint,
    )


def sampling_to_proto(sampling: SamplingOptions | SamplingParams) -> pb.SamplingParams:
    """Converts sampling options to their message. Raises InvalidArgument, naming the field, for a
    value that the message cannot hold.
    """
    message = pb.SamplingParams()
    for name in (*_OPTIONAL, "ignore_eos", "min_tokens"):
        _set(message, name, getattr(sampling, name))
    for name in ("stop", "stop_token_ids"):
        _extend(message, name, getattr(sampling, name))
    try:
        message.logit_bias.update(sampling.logit_bias)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"logit_bias: {error}; give token ids and numbers", field="logit_bias"
        ) from error
    return message


def sampling_from_proto(message: pb.SamplingParams) -> SamplingOptions:
    """Converts a message to sampling options. Unset fields become None."""
    return SamplingOptions(**_given(message))


params_to_proto = sampling_to_proto


def params_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Converts a message to a complete set of parameters, as components of the cluster exchange
    it.
    """
    return SamplingParams(**_given(message))


def _given(message: pb.SamplingParams) -> dict[str, Any]:
    return {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)} | {
        "stop": tuple(message.stop),
        "stop_token_ids": tuple(message.stop_token_ids),
        "ignore_eos": message.ignore_eos,
        "min_tokens": message.min_tokens,
        "logit_bias": tuple(sorted(message.logit_bias.items())),
    }


def finish_reason_from_proto(text: str) -> FinishReason | None:
    """Converts the text on the wire; empty becomes None."""
    return cast(FinishReason, text) if text else None


def logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    """Converts the logprobs of one token to their message."""
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top=[
            pb.TokenLogprob(token_id=token_id, logprob=logprob)
            for token_id, logprob in logprobs.top
        ],
    )


def logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs:
    """Converts a message to the logprobs of one token."""
    return TokenLogprobs(message.logprob, tuple((one.token_id, one.logprob) for one in message.top))


def handoff_to_proto(handoff: Handoff) -> pb.Handoff:
    """Converts a hand-off to its message."""
    return _to_message(pb.Handoff, handoff)


def handoff_from_proto(message: pb.Handoff) -> Handoff:
    """Converts a message to a hand-off."""
    return _to_value(Handoff, message)


def ledger_to_proto(ledger: Ledger) -> pb.Ledger:
    """Converts a ledger to its message."""
    return pb.Ledger(
        phases=[pb.Phase(name=name, seconds=seconds) for name, seconds in ledger.phases],
        ttft_seconds=ledger.ttft_seconds,
        second_token_gap_seconds=ledger.second_token_gap_seconds,
        decode_seconds=ledger.decode_seconds,
        e2e_seconds=ledger.e2e_seconds,
        handoff=None if ledger.handoff is None else handoff_to_proto(ledger.handoff),
        attempts=[_to_message(pb.Attempt, attempt) for attempt in ledger.attempts],
    )


def ledger_from_proto(message: pb.Ledger) -> Ledger:
    """Converts a message to a ledger."""
    return Ledger(
        phases=tuple((phase.name, phase.seconds) for phase in message.phases),
        ttft_seconds=message.ttft_seconds,
        second_token_gap_seconds=message.second_token_gap_seconds,
        decode_seconds=message.decode_seconds,
        e2e_seconds=message.e2e_seconds,
        handoff=handoff_from_proto(message.handoff) if message.HasField("handoff") else None,
        attempts=tuple(_to_value(Attempt, attempt) for attempt in message.attempts),
    )


def models_to_proto(models: Sequence[ModelInfo]) -> pb.ListModelsResponse:
    """Converts the models of a router to the response that lists them."""
    return pb.ListModelsResponse(models=[_to_message(pb.Model, model) for model in models])


def models_from_proto(message: pb.ListModelsResponse) -> tuple[ModelInfo, ...]:
    """Converts the response that lists the models of a router."""
    return tuple(_to_value(ModelInfo, model) for model in message.models)


MessageT = TypeVar("MessageT", bound=Message)
ValueT = TypeVar("ValueT")


def _to_message(kind: type[MessageT], value: Any) -> MessageT:
    """Builds a message that has the fields of the dataclass."""
    return kind(**{one.name: getattr(value, one.name) for one in fields(value)})


def _to_value(kind: type[ValueT], message: Message) -> ValueT:
    """Builds a dataclass that has the fields of the message."""
    return kind(**{one.name: getattr(message, one.name) for one in fields(cast(Any, kind))})


def _set(message: Message, name: str, value: object) -> None:
    """Sets a scalar field; None leaves it unset. Raises InvalidArgument for a value that does not
    fit.
    """
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name}: {value!r:.80}: {error}", field=name) from error


def _extend(message: Message, name: str, values: object) -> None:
    try:
        getattr(message, name).extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name}: {error}", field=name) from error
