"""The messages between a router and a worker, one frozen dataclass per message.

Commands go from the router to the worker, events from the worker to the router. Both carry
(request_id, attempt). A worker runs a command once, even if it arrives several times. A router
drops the events of an attempt that it has given up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.errors import Code
from kvrelay.types.block_keys import DEVICE_TIER
from kvrelay.types.requests import (
    FinishReason,
    Handoff,
    PrefillTimings,
    PromptLogprobs,
    SequenceSpec,
    TokenLogprobs,
)

# The reason with which a draining worker refuses new sequences and fails its current ones.
DRAINING = "draining"

# Prefix of the message when a step gave no token for one sequence of its batch.
SEQUENCE_FAULT = "sequence fault"


@dataclass(frozen=True, slots=True)
class HandoffTarget:
    """A lease of blocks on a worker, and how to reach them."""

    worker_id: str
    address: str
    epoch: int
    lease_id: int
    generation: int
    num_blocks: int
    # Leading tokens, in whole blocks, whose KV the decode worker already holds.
    cached_tokens: int
    layout_hash: str
    host_id: str
    # Set by the router.
    transport: str = "auto"
    # Device of the worker's KV: cpu, cuda, or the number of GPUs that share it.
    device: str = "cpu"
    # Permission to push; see kvrelay/security/capability.py.
    capability: str = field(default="", repr=False)
    # Protocol version of the worker.
    protocol: int = 0


# Commands


@dataclass(frozen=True, slots=True)
class Reserve:
    """To a decode worker: lease blocks for this sequence, and run it once its KV is committed."""

    spec: SequenceSpec
    lease_seconds: float
    # The only worker that may push to these blocks.
    prefill_worker: str


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A worker whose prefix cache probably holds more of a sequence than the prefill worker's own
    cache.
    """

    worker_id: str
    address: str
    cached_tokens: int
    # Permission to fetch these tokens for this request.
    capability: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Prefill:
    """To a prefill worker: compute the KV, push it to the target, and report the first token."""

    spec: SequenceSpec
    target: HandoffTarget
    source: PrefixSource | None = None


@dataclass(frozen=True, slots=True)
class RunLocal:
    """To a decode worker: prefill and decode this sequence on this worker."""

    spec: SequenceSpec


@dataclass(frozen=True, slots=True)
class Renew:
    """To a decode worker: extend these leases by `lease_seconds`."""

    lease_ids: tuple[int, ...]
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class Abort:
    """To any worker: stop this attempt and release its resources."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class ResyncCache:
    """To any worker: send a new snapshot of the prefix cache, because an update is missing."""


Command = Reserve | Prefill | RunLocal | Renew | Abort | ResyncCache


# Events


@dataclass(frozen=True, slots=True)
class Reserved:
    """From a decode worker: the blocks are leased; `target` says where to push."""

    request_id: str
    attempt: int
    target: HandoffTarget


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker does not accept the sequence now; another worker may."""

    request_id: str
    attempt: int
    # full, adapter (it is not loaded), or the worker's state: starting, DRAINING, stuck.
    reason: str


# Not frozen: an instance is made for each streamed token, and a frozen one takes five times as long
# to make.
@dataclass(slots=True)
class SequenceTokens:
    """New tokens of one sequence. `index` counts from the start of the answer, over all
    attempts.
    """

    request_id: str
    attempt: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    # Set with the first token of an attempt.
    prefill: PrefillTimings | None = None
    # Set with the first token of an answer, if asked for.
    prompt_logprobs: PromptLogprobs | None = None
    # Tokens before these whose KV was dropped (`kv.eviction`).
    dropped_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """All tokens of one engine step for one router."""

    sequences: tuple[SequenceTokens, ...]


@dataclass(frozen=True, slots=True)
class HandedOff:
    """From a prefill worker: the decode worker has acknowledged the commit, and the prefill is
    complete.
    """

    request_id: str
    attempt: int
    handoff: Handoff


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt has ended on this worker. INVALID_ARGUMENT ends the request; the router may retry
    other codes.

    - UNAVAILABLE with a message that begins with DRAINING: the worker leaves; the request is fine.
    - INTERNAL with a message that begins with SEQUENCE_FAULT: the model gave no next token for this
      sequence. The cause is the sequence or the worker; an attempt on another worker shows which.
    """

    request_id: str
    attempt: int
    code: Code
    message: str

    @property
    def drains(self) -> bool:
        """Whether the attempt failed because the worker drains."""
        return self.code is Code.UNAVAILABLE and self.message.startswith(DRAINING)

    @property
    def of_sequence(self) -> bool:
        """Whether the attempt failed because the model gave no next token for this sequence."""
        return self.code is Code.INTERNAL and self.message.startswith(SEQUENCE_FAULT)


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    """Which blocks the prefix cache of a worker holds: a part of a snapshot, or what has changed.

    `stored` and `removed` are packed block keys; see `kvrelay.types.block_keys`.
    """

    # Counts the updates of a session from 1. A gap means that an update is lost.
    number: int
    # First part of a snapshot: what the router knew of the tier is void.
    begins: bool = False
    # The router now knows the whole tier, so `blocks` and `checksum` hold for what it knows.
    complete: bool = True
    tier: int = DEVICE_TIER
    stored: bytes = b""
    removed: bytes = b""
    # Number of blocks that the tier holds now, and the XOR of their keys.
    blocks: int = 0
    checksum: int = 0


Event = Reserved | Refused | TokenBatch | HandedOff | Failed | CacheUpdate
