"""What the router's pure core wants done; the driver does it."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import KvRelayError
from kvrelay.messages import Command
from kvrelay.types import FinishReason, Path, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Send:
    worker_id: str
    command: Command


@dataclass(frozen=True, slots=True)
class Emit:
    """The next tokens of the answer; the first has number `index`."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    path: Path


@dataclass(frozen=True, slots=True)
class End:
    """The request's end: an answer that is complete, or an error."""

    request_id: str
    finish_reason: FinishReason
    error: KvRelayError | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """Something about a worker that an operator should read in the log."""

    worker_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request gave its batch slot to another tenant's, for the log."""

    request_id: str
    worker_id: str
    why: str


Effect = Send | Emit | End | Notice | Preempted
