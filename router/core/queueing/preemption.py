"""Preemption: which requests give up their batch slots so that another tenant gets its share. A
pure function that returns its reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Tokens that an attempt gives before its request can be preempted again.
PROGRESS_TOKENS = 16
# Run time of an attempt before its request can be preempted again.
MIN_RUN_S = 1.0
# Least run time of such an attempt, as a multiple of its time to the first token.
START_RATIO = 4.0
# Run time of an attempt of a tenant within its share while a tenant without batch slots waits.
TURN_S = 5.0
# Longest wait of a request that spares another request a restart.
SPARED_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class Running:
    """A request with workers. Seconds count from the start of its live attempt."""

    request_id: str
    # Order of arrival.
    number: int
    tenant: str
    priority: int
    # The decode worker.
    worker_id: str
    # Tokens with KV on the decode worker.
    held_tokens: int
    # Tokens of the live attempt.
    new_tokens: int
    ran_s: float
    # Time to the attempt's first token. None before that token.
    start_s: float | None
    # Number of preemptions of the request so far.
    preemptions: int
    # True if the request must not be preempted.
    fixed: bool = False

    @property
    def cost(self) -> tuple[int, int, int, int]:
        """Sort key for preemption within a tenant: least urgent first, then rarely preempted, cheap
        to restore, and young requests.
        """
        return (
            -self.priority,
            self.preemptions,
            self.held_tokens if self.new_tokens else 0,
            -self.number,
        )

    @property
    def settled(self) -> bool:
        """Whether the request may be preempted: always for the first time, later only after the
        attempt has made progress.
        """
        return not self.preemptions or self._ran(MIN_RUN_S)

    @property
    def had_turn(self) -> bool:
        """Whether the attempt has run for its turn of TURN_S."""
        return self._ran(TURN_S)

    def _ran(self, seconds: float) -> bool:
        least = max(seconds, START_RATIO * (self.start_s or 0.0))
        return self.new_tokens >= PROGRESS_TOKENS and self.ran_s >= least


@dataclass(frozen=True, slots=True)
class Waiting:
    """The next request of a tenant, for which no worker has room."""

    request_id: str
    tenant: str
    priority: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Standing:
    """A tenant's weight and its virtual token counter."""

    weight: float
    counter: float


@dataclass(frozen=True, slots=True)
class Room:
    """Capacity of a decode worker, and its free part."""

    worker_id: str
    slots: int
    free_slots: int
    # Capacity of the worker's KV blocks; 0 if unknown.
    tokens: int
    free_tokens: int
    # Time until a request on the worker has certainly ended, at its pace.
    soon_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Preemption:
    """The preempted requests, all on one worker, and the reason."""

    worker_id: str
    victims: tuple[str, ...]
    why: str


class Shares:
    """Each tenant's share of all batch slots and KV tokens. `running` are the requests on the
    workers of `rooms`.
    """

    def __init__(
        self, rooms: Sequence[Room], running: Sequence[Running], tenants: Mapping[str, Standing]
    ) -> None:
        self.rooms = rooms
        self.running = running
        self.tenants = tenants
        self.slots = sum(room.slots for room in rooms)
        self._tokens = sum(room.tokens for room in rooms)
        self._held: Counter[str] = Counter()
        self._held_tokens: Counter[str] = Counter()
        for one in running:
            self._held[one.tenant] += 1
            self._held_tokens[one.tenant] += one.held_tokens

    def of(self, tenant: str, slots: int = 0, tokens: int = 0) -> float:
        """Returns the larger of the tenant's fractions of slots and tokens, divided by its weight,
        as if it held `slots` and `tokens` more.
        """
        part = (self._held[tenant] + slots) / max(1, self.slots)
        if self._tokens:
            part = max(part, (self._held_tokens[tenant] + tokens) / self._tokens)
        return part / self.tenants[tenant].weight

    def slots_of(self, tenant: str) -> int:
        """Returns the number of batch slots that the tenant holds."""
        return self._held[tenant]

    def without(self, victims: Sequence[Running]) -> Shares:
        """Returns the shares after the victims' preemption."""
        gone = {one.request_id for one in victims}
        return Shares(
            self.rooms, [one for one in self.running if one.request_id not in gone], self.tenants
        )


def preempt(waiting: Waiting, shares: Shares) -> Preemption | None:
    """Returns the cheapest preemption that makes room for a request. None if its tenant has to
    wait.

    A tenant's share follows dominant resource fairness (Ghodsi et al., NSDI 2011): the larger of
    its fractions of all batch slots and of all KV tokens, divided by its weight. The rules compare
    shares after the preemption.
    - A request is preempted if its tenant's share is then still not below the waiting tenant's
      share. So a preemption is never reversed, and with one tenant there is no preemption.
    - Batch slots are indivisible. A tenant without slots takes turns of TURN_S with a tenant that
      was served more tokens.
    - Within the tenant with the largest share, `Running.cost` gives the order. Requests that are
      more urgent than the waiting request stay, since priorities are strict.
    - There is no preemption if a slot becomes free sooner than the victim could restart, and within
      SPARED_WAIT_S.
    """
    plans = [plan for room in shares.rooms if (plan := _plan(waiting, room, shares)) is not None]
    if not plans:
        return None
    room, victims = min(
        plans, key=lambda plan: (len(plan[1]), sum(one.held_tokens for one in plan[1]))
    )
    restart_s = min(SPARED_WAIT_S, max(one.start_s or 0.0 for one in victims))
    only_slots = not room.tokens or waiting.num_tokens <= room.free_tokens
    if only_slots and min(one.soon_s for one, _ in plans) <= restart_s:
        return None
    tenant = victims[0].tenant
    why = (
        f"tenant {tenant!r} has {shares.slots_of(tenant)} of {shares.slots} batch slots, "
        f"tenant {waiting.tenant!r} waits with {shares.slots_of(waiting.tenant)}"
    )
    return Preemption(room.worker_id, tuple(one.request_id for one in victims), why)


def _plan(waiting: Waiting, room: Room, shares: Shares) -> tuple[Room, list[Running]] | None:
    """Returns the victims that make room on the worker, or None."""
    slots = 1 - room.free_slots
    tokens = waiting.num_tokens - room.free_tokens if room.tokens else 0
    victims: list[Running] = []

    def enough(gone: list[Running]) -> bool:
        return len(gone) >= slots and sum(one.held_tokens for one in gone) >= tokens

    while not enough(victims):
        victim = _victim(waiting, room.worker_id, shares.without(victims) if victims else shares)
        if victim is None:
            return None
        victims.append(victim)
    # An earlier victim may be too small to matter.
    for victim in tuple(victims):
        others = [one for one in victims if one is not victim]
        if enough(others):
            victims = others
    return (room, victims) if victims else None


def _victim(waiting: Waiting, worker_id: str, shares: Shares) -> Running | None:
    """Returns the next victim on the worker: a request of the tenant with the largest share among
    the tenants that have to give way.
    """
    mine = shares.of(waiting.tenant, 1, waiting.num_tokens)
    empty_handed = shares.slots_of(waiting.tenant) == 0
    served = shares.tenants[waiting.tenant].counter

    def gives_way(one: Running) -> bool:
        if (
            one.fixed
            or one.worker_id != worker_id
            or one.tenant == waiting.tenant
            or one.priority < waiting.priority
        ):
            return False
        if shares.of(one.tenant, -1, -one.held_tokens) >= mine:
            return one.settled
        return empty_handed and shares.tenants[one.tenant].counter > served and one.had_turn

    candidates = filter(gives_way, shares.running)
    return min(candidates, key=lambda one: (-shares.of(one.tenant), one.cost), default=None)
