"""What a client saw of its requests and an observer of the cluster, with times of one monotonic
clock. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from kvrelay.types.requests import Attempt

Status = str  # how an answer ended: a finish reason (stop, length), or the name of a gRPC status
WHOLE: frozenset[Status] = frozenset({"stop", "length"})


@dataclass(frozen=True, slots=True)
class Called:
    """A call was made; `resume` is how many tokens the client had by then."""

    at: float
    resume: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """Tokens `index`, `index` + 1, ... of the answer, as they stood in one response."""

    at: float
    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BrokeOff:
    """A call ended before the answer did, and the client went on with another."""

    at: float
    status: Status


@dataclass(frozen=True, slots=True)
class Ended:
    at: float
    status: Status
    attempts: tuple[Attempt, ...] = ()  # of the ledger, where there is one
    retry_after_s: float | None = None
    message: str = ""


Event = Called | Received | BrokeOff | Ended


@dataclass(slots=True)
class RequestHistory:
    """One request's events in the order in which they came."""

    request_id: str
    expected: tuple[int, ...] | None = None  # the answer of a run without a fault
    deadline_s: float | None = None  # from the first call on
    events: list[Event] = field(default_factory=list)

    @property
    def received(self) -> list[Received]:
        return [one for one in self.events if isinstance(one, Received)]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """As they came; `check_tokens` says whether that is the answer."""
        return tuple(token_id for one in self.received for token_id in one.token_ids)

    @property
    def ends(self) -> list[Ended]:
        return [one for one in self.events if isinstance(one, Ended)]

    @property
    def end(self) -> Ended:
        """The only one; `check_one_end` says whether there is exactly one."""
        return self.ends[-1]

    @property
    def began_at(self) -> float:
        return self.events[0].at

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return self.end.attempts

    @property
    def longest_gap_s(self) -> float:
        """Between one token's response and the next one's; 0 where there is none."""
        times = [one.at for one in self.received]
        return max((after - before for before, after in pairwise(times)), default=0.0)


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """What one worker said of itself when it was asked."""

    at: float
    worker_id: str
    pid: int
    epoch: int
    busy: int  # sequences that run, wait or hold a lease
    blocks_total: int
    blocks_held: int
    blocks_cached: int
    integrity_error: str = ""  # of free + cached + held = total, as of its last idle moment
    preemptions: int = 0
    state: str = "ready"
    leases: int = 0

    @property
    def at_rest(self) -> bool:
        return not self.busy and not self.blocks_held


@dataclass(frozen=True, slots=True)
class Evidence:
    """Something that only happens if the fault did: a wait status, a kernel's process state, bytes
    held back.
    """

    at: float
    what: str


@dataclass(slots=True)
class FaultRecord:
    """A fault and what shows that it happened. Without evidence it did not."""

    name: str
    victims: frozenset[str] = frozenset()  # workers that it ends or harms on purpose
    evidence: list[Evidence] = field(default_factory=list)


@dataclass(slots=True)
class Case:
    """All that was recorded of one fault: what the checkers look at."""

    lease_s: float
    requests: list[RequestHistory] = field(default_factory=list)  # that the fault was meant for
    bystanders: list[RequestHistory] = field(default_factory=list)
    faults: list[FaultRecord] = field(default_factory=list)
    before: list[WorkerSample] = field(default_factory=list)  # one of each worker
    after: list[WorkerSample] = field(default_factory=list)  # oldest first, until all are at rest

    @property
    def everyone(self) -> list[RequestHistory]:
        return [*self.requests, *self.bystanders]
