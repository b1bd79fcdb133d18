"""A client's request: converts GenerateRequest of proto/kvrelay/v1/inference.proto."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.errors import InvalidArgument
from kvrelay.types.chat import ChatMessage
from kvrelay.types.requests import Slo
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.encoding.fields import extend_field, optional, said, set_field, to_value
from kvrelay.wire.sampling import SamplingOptions, sampling_from_proto, sampling_to_proto


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A client's request, not yet validated. Exactly one of prompt, messages and token_ids should
    be set.
    """

    request_id: str = ""
    model: str = ""
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] = ()
    token_ids: tuple[int, ...] = ()
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    priority: int = 0
    # Token ids of this answer that the client already has.
    resume: tuple[int, ...] = ()
    # See `Tenant.salt_for`.
    cache_salt: str | None = field(default=None, repr=False)
    slo: Slo = field(default_factory=Slo)
    # Fingerprint of the model that gave the tokens in `resume`. A router with another model rejects
    # the request.
    system_fingerprint: str = ""


def request_to_proto(request: GenerateRequest) -> pb.GenerateRequest:
    """Converts a request to its message. Raises InvalidArgument, naming the field, for a value that
    the message cannot hold.
    """
    message = pb.GenerateRequest(sampling=sampling_to_proto(request.sampling))
    for name in ("request_id", "model", "prompt", "priority", "cache_salt", "system_fingerprint"):
        set_field(message, name, getattr(request, name))
    for name in ("ttft_ms", "itl_ms"):
        set_field(message.slo, name, getattr(request.slo, name))
    for name in ("token_ids", "resume"):
        extend_field(message, name, getattr(request, name))
    try:
        message.messages.extend(
            pb.ChatMessage(role=one.role, content=one.content) for one in request.messages
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"messages: {said(error)}; give role and content of each as text", field="messages"
        ) from error
    return message


def request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Converts a message to an unvalidated request."""
    return to_value(
        GenerateRequest,
        message,
        prompt=optional(message, "prompt"),
        messages=tuple(ChatMessage(one.role, one.content) for one in message.messages),
        token_ids=tuple(message.token_ids),
        sampling=sampling_from_proto(message.sampling),
        resume=tuple(message.resume),
        cache_salt=optional(message, "cache_salt"),
        slo=_slo_from_proto(message.slo),
    )


def _slo_from_proto(message: pb.Slo) -> Slo:
    return Slo(
        optional(message, "ttft_ms"),
        optional(message, "itl_ms"),
    )
