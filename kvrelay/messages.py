"""What a router and a worker say to each other, one frozen value per message.

Commands go down a session to a worker, events come up. Both carry (request_id, attempt): a worker
runs a command once however often it arrives, and a router drops the events of an attempt that it
gave up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.errors import Code
from kvrelay.types import FinishReason, Handoff, PrefillTimings, SequenceSpec, TokenLogprobs

# Why a worker that is about to leave refuses new sequences and ends those that it has
DRAINING = "draining"

# How the message begins where a step gave nothing to one sequence of its batch
SEQUENCE_FAULT = "sequence fault"


@dataclass(frozen=True, slots=True)
class HandoffTarget:
    """A worker's promise of blocks, and how to reach them."""

    worker_id: str
    address: str
    epoch: int
    lease_id: int
    generation: int
    num_blocks: int
    cached_tokens: int  # leading tokens whose KV the decode worker already holds, in whole blocks
    layout_hash: str
    host_id: str
    transport: str = "auto"  # filled in by the router
    device: str = "cpu"  # that its KV lies on: cpu, cuda, or how many GPUs share it
    # Leave to push, see kvrelay/security/capability.py
    capability: str = field(default="", repr=False)
    protocol: int = 0  # version that the worker speaks


# Commands


@dataclass(frozen=True, slots=True)
class Reserve:
    """Decode worker: hold blocks for this sequence and run it once its KV is committed."""

    spec: SequenceSpec
    lease_seconds: float
    prefill_worker: str  # the one that may push to them


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A worker whose prefix cache probably holds more of a sequence than the prefill worker's
    own.
    """

    worker_id: str
    address: str
    cached_tokens: int
    capability: str = field(default="", repr=False)  # leave to fetch them for this request


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prefill worker: build the KV, push it to the target, report the first token."""

    spec: SequenceSpec
    target: HandoffTarget
    source: PrefixSource | None = None


@dataclass(frozen=True, slots=True)
class RunLocal:
    """Decode worker: prefill and decode this sequence by yourself."""

    spec: SequenceSpec


@dataclass(frozen=True, slots=True)
class Renew:
    lease_ids: tuple[int, ...]
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str
    attempt: int


Command = Reserve | Prefill | RunLocal | Renew | Abort


# Events


@dataclass(frozen=True, slots=True)
class Reserved:
    request_id: str
    attempt: int
    target: HandoffTarget


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker will not take the sequence now; another may."""

    request_id: str
    attempt: int
    reason: str  # full, or the worker's state: starting, DRAINING, stuck


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """New tokens of one sequence. `index` counts from the answer's start over all attempts."""

    request_id: str
    attempt: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    prefill: PrefillTimings | None = None  # with the first token of an attempt


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What one engine step gave one router."""

    sequences: tuple[SequenceTokens, ...]


@dataclass(frozen=True, slots=True)
class HandedOff:
    """Prefill worker: the decode worker acknowledged the commit; my part is done."""

    request_id: str
    attempt: int
    handoff: Handoff


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt is over on this worker. INVALID_ARGUMENT ends the request; other codes may be
    retried.

    UNAVAILABLE with a message that begins with DRAINING: the worker leaves, and nothing is wrong
    with the request. INTERNAL with one that begins with SEQUENCE_FAULT: the model has no next token
    for this sequence, by its own fault or the worker's, which another worker's attempt tells.
    """

    request_id: str
    attempt: int
    code: Code
    message: str

    @property
    def drains(self) -> bool:
        return self.code is Code.UNAVAILABLE and self.message.startswith(DRAINING)

    @property
    def of_sequence(self) -> bool:
        return self.code is Code.INTERNAL and self.message.startswith(SEQUENCE_FAULT)


Event = Reserved | Refused | TokenBatch | HandedOff | Failed
