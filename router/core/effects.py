"""The effects that the router's pure core returns. The driver carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import KvRelayError
from kvrelay.types.requests import FinishReason, Path, PromptLogprobs, TokenLogprobs
from kvrelay.worker_messages import Command


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command to a worker."""

    worker_id: str
    command: Command


# Not frozen: an instance is made for each streamed token, and a frozen one takes five times as long
# to make.
@dataclass(slots=True)
class Emit:
    """Pass the answer's next tokens to the client. The first of them has number `index`."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    path: Path
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class End:
    """End the request, with a complete answer or an error."""

    request_id: str
    finish_reason: FinishReason
    error: KvRelayError | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """Log a message about a worker for the operator."""

    worker_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Preempted:
    """Log that a request gave its batch slot to another tenant's request."""

    request_id: str
    worker_id: str
    why: str


Effect = Send | Emit | End | Notice | Preempted
