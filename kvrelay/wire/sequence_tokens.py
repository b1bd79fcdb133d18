"""New tokens of sequences: converts TokenBatch of proto/kvrelay/v1/worker.proto."""

from __future__ import annotations

from typing import get_args

from kvrelay.errors import InvalidArgument
from kvrelay.types.requests import FinishReason, PrefillTimings
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.wire.encoding.fields import to_message, to_value
from kvrelay.wire.generate_response import (
    logprobs_from_proto,
    logprobs_to_proto,
    prompt_logprobs_from_proto,
    prompt_logprobs_to_proto,
)
from kvrelay.worker_messages import SequenceTokens

_LONGEST_S = 1e9
_FINISH_REASONS: dict[str, FinishReason] = {one: one for one in get_args(FinishReason)}


def tokens_to_proto(tokens: SequenceTokens) -> pb.SequenceTokens:
    """Converts the tokens of one sequence to their message. This runs for each streamed token, so
    it names the fields.
    """
    timings, scores = tokens.prefill, tokens.prompt_logprobs
    return pb.SequenceTokens(
        request_id=tokens.request_id,
        attempt=tokens.attempt,
        index=tokens.index,
        token_ids=tokens.token_ids,
        logprobs=[logprobs_to_proto(one) for one in tokens.logprobs],
        finish_reason=tokens.finish_reason or "",
        prefill=None if timings is None else to_message(pb.PrefillTimings, timings),
        prompt_logprobs=None if scores is None else prompt_logprobs_to_proto(scores),
        dropped_tokens=tokens.dropped_tokens,
    )


def tokens_from_proto(message: pb.SequenceTokens) -> SequenceTokens:
    """Converts a message to the tokens of one sequence. This runs for each streamed token, so it
    skips fields that are not set. Raises InvalidArgument.
    """
    token_ids = tuple(message.token_ids)
    logprobs = tuple(map(logprobs_from_proto, message.logprobs)) if message.logprobs else ()
    if (token_ids and min(token_ids) < 0) or (
        logprobs and any(token_id < 0 for one in logprobs for token_id, _ in one.top)
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
        prompt_logprobs_from_proto(message.prompt_logprobs)
        if message.HasField("prompt_logprobs")
        else None,
        max(0, message.dropped_tokens),
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


def check_times(*seconds: float) -> None:
    """Raises InvalidArgument for times that no worker can have measured, because sums with them
    would not be numbers.
    """
    if not all(abs(one) <= _LONGEST_S for one in seconds):
        raise InvalidArgument(
            f"times {seconds} are not valid durations in seconds", field="seconds"
        )


def _check_counts(message: pb.PrefillTimings) -> None:
    """Raises InvalidArgument for counts that no worker can have, because sums of them are told."""
    for field in ("cached_tokens", "fetched_tokens", "chunks"):
        if (value := getattr(message, field)) < 0:
            raise InvalidArgument(f"{field} {value} is out of range; it is at least 0", field=field)


def _timings_from_proto(message: pb.PrefillTimings) -> PrefillTimings:
    check_times(message.queue_seconds, message.compute_seconds, message.fetch_seconds)
    _check_counts(message)
    # It becomes a label and a text for people.
    source = message.fetched_from if message.fetched_from.isidentifier() else ""
    return to_value(PrefillTimings, message, fetched_from=source[:16])
