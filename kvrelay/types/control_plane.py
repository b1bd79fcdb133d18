"""Values of controllers and routers. Frozen, slotted, without I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvrelay.types.workers import PoolName


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The controllers' lease, as stored in Redis. `owner` is empty while the lease is free."""

    owner: str = ""
    term: int = 0
    # Number of renewals in this term.
    beat: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """Proof of leadership that a controller sends with each of its writes."""

    owner: str
    term: int


ControllerState = Literal["standby", "claiming", "leading"]


@dataclass(frozen=True, slots=True)
class ControllerInfo:
    """A controller's entry in the registry."""

    controller_id: str
    state: ControllerState
    # Term of the controller's lease; 0 without a lease.
    term: int = 0


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """An adapter that an operator has loaded, as stored in Redis."""

    name: str
    # The folder, for the router and all workers.
    path: str
    # Hash of the files.
    adapter_id: str
    # True once all workers have loaded it, so that requests may name it.
    served: bool = False


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """A change of a pool's size, with its reason. `unix_time` is in seconds."""

    unix_time: float
    pool: PoolName
    before: int
    after: int
    reason: str


# Requests of which a router reports the tokens.
RECENT = 64


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The tokens of a request that has left its workers."""

    prompt_tokens: int
    # Prompt tokens that were not computed.
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """A router's entry in the registry. p95 values cover the last measuring window; None if nothing
    was measured in it.
    """

    router_id: str
    running: int = 0
    # Requests without workers.
    waiting: int = 0
    # Tokens of the waiting requests.
    waiting_tokens: int = 0
    # The part of these requests that waits for a prefill worker, and its tokens.
    waiting_for_prefill: int = 0
    waiting_prefill_tokens: int = 0
    # The part whose tenant has reached its limit on running requests, and its tokens.
    waiting_at_limit: int = 0
    waiting_tokens_at_limit: int = 0
    finished: int = 0
    failed: int = 0
    rss_bytes: int = 0
    ttft_p95_ms: float | None = None
    itl_p95_ms: float | None = None
    certificate_note: str = ""
    # Protocol version of the router.
    protocol: int = 0
    # Processes of the router that the figures are the sum of; 0 if an older router does not say.
    processes: int = 1
    # Requests that have begun on a worker since the router's start.
    begun: int = 0
    # A sample of the last requests that have left their workers, at most RECENT.
    recent: tuple[RequestShape, ...] = ()
