"""A part of an answer: converts GenerateResponse of proto/kvrelay/v1/inference.proto."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from math import isfinite
from typing import cast

from kvrelay.errors import InvalidArgument
from kvrelay.types.requests import (
    FinishReason,
    Ledger,
    Path,
    PromptLogprobs,
    TokenLogprobs,
    Usage,
)
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.encoding.fields import to_message, to_value
from kvrelay.wire.ledger import ledger_from_proto, ledger_to_proto


# Not frozen: an instance is made for each streamed token, and a frozen one takes five times as long
# to make.
@dataclass(slots=True)
class GenerateResponse:
    """Some tokens of an answer. Only the last response sets the fields from `finish_reason` to
    `ledger`.
    """

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
    # Set with the first token of the answer.
    prompt_logprobs: PromptLogprobs | None = None


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
        message.usage.CopyFrom(to_message(pb.Usage, response.usage))
    if response.ledger is not None:
        message.ledger.CopyFrom(ledger_to_proto(response.ledger))
    if response.system_fingerprint:
        message.system_fingerprint = response.system_fingerprint
    if response.prompt_logprobs is not None:
        message.prompt_logprobs.CopyFrom(prompt_logprobs_to_proto(response.prompt_logprobs))
    return message


def response_from_proto(message: pb.GenerateResponse) -> GenerateResponse:
    """Converts a message to a response."""
    return to_value(
        GenerateResponse,
        message,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(logprobs_from_proto(one) for one in message.logprobs),
        finish_reason=finish_reason_from_proto(message.finish_reason),
        usage=to_value(Usage, message.usage) if message.HasField("usage") else None,
        path=cast(Path, message.path) if message.path else None,
        ledger=ledger_from_proto(message.ledger) if message.HasField("ledger") else None,
        prompt_logprobs=prompt_logprobs_from_proto(message.prompt_logprobs)
        if message.HasField("prompt_logprobs")
        else None,
    )


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


def prompt_logprobs_to_proto(logprobs: PromptLogprobs) -> pb.PromptLogprobs:
    """Converts the logprobs of a prompt to their message."""
    return pb.PromptLogprobs(
        logprobs=logprobs.logprobs, top_ids=logprobs.top_ids, top_logprobs=logprobs.top_logprobs
    )


def prompt_logprobs_from_proto(message: pb.PromptLogprobs) -> PromptLogprobs:
    """Converts a message to the logprobs of a prompt. Raises InvalidArgument for lists whose
    lengths do not fit, for token ids below 0, and for logprobs that are no numbers.
    """
    places, top = len(message.logprobs), len(message.top_ids)
    if top != len(message.top_logprobs) or (top % places if places else top):
        raise InvalidArgument(
            f"{places} logprobs of a prompt do not fit {top} likely tokens with "
            f"{len(message.top_logprobs)} logprobs",
            field="prompt_logprobs",
        )
    ids = array("i", message.top_ids)
    if ids and min(ids) < 0:
        raise InvalidArgument("a likely token of a prompt is negative", field="prompt_logprobs")
    if not isfinite(sum(message.logprobs) + sum(message.top_logprobs)):
        raise InvalidArgument("a logprob of a prompt is no number", field="prompt_logprobs")
    return PromptLogprobs(array("f", message.logprobs), ids, array("f", message.top_logprobs))
