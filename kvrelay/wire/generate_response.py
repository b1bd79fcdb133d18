"""A part of an answer: converts GenerateResponse of proto/kvrelay/v1/inference.proto."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from kvrelay.types.requests import FinishReason, Ledger, Path, TokenLogprobs, Usage
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.fields import to_message, to_value
from kvrelay.wire.ledger import ledger_from_proto, ledger_to_proto


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
