"""Who gives up a batch slot so that another tenant gets its share: a pure function that also says
why.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# That an attempt gives before it is preempted, if its request was preempted before
PROGRESS_TOKENS = 16
MIN_RUN_S = 1.0  # that such an attempt runs
# Least run time of such an attempt, over the time that it took to get to its first token
START_RATIO = 4.0
# That an attempt of a tenant within its share runs while a tenant that has nothing waits
TURN_S = 5.0


@dataclass(frozen=True, slots=True)
class Running:
    """A request that has workers. Its attempt is the live one; seconds count from that attempt's
    begin.
    """

    request_id: str
    number: int  # order of arrival
    tenant: str
    priority: int
    worker_id: str  # that decodes it
    held_tokens: int  # of prompt and answer
    new_tokens: int  # of this attempt
    ran_s: float
    start_s: float | None  # up to its first token; None until it is there
    preemptions: int  # of the request so far
    fixed: bool = False  # it stays, whatever it holds

    @property
    def cost(self) -> tuple[int, int, int, int]:
        """Order in which a tenant's requests give way: least urgent, seldom preempted, cheap to
        restore, young.
        """
        return (
            -self.priority,
            self.preemptions,
            self.held_tokens if self.new_tokens else 0,
            -self.number,
        )

    @property
    def settled(self) -> bool:
        """Whether it may be preempted: for the first time always, then each time after it got
        on.
        """
        return not self.preemptions or self._ran(MIN_RUN_S)

    @property
    def had_turn(self) -> bool:
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
    """What a decode worker has, and what is left of it."""

    worker_id: str
    slots: int
    free_slots: int
    tokens: int  # that its KV blocks hold; 0 if that is not known
    free_tokens: int
    soon_s: float = math.inf  # until a request on it has ended for certain, at its pace


@dataclass(frozen=True, slots=True)
class Preemption:
    """The victims, all on one worker, and why they give way."""

    worker_id: str
    victims: tuple[str, ...]
    why: str


class Shares:
    """What each tenant holds of all batch slots and KV tokens. `running` are the requests on the
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
        """The larger of its parts of slots and tokens, over its weight, if it held so many more."""
        part = (self._held[tenant] + slots) / max(1, self.slots)
        if self._tokens:
            part = max(part, (self._held_tokens[tenant] + tokens) / self._tokens)
        return part / self.tenants[tenant].weight

    def slots_of(self, tenant: str) -> int:
        return self._held[tenant]

    def without(self, victims: Sequence[Running]) -> Shares:
        gone = {one.request_id for one in victims}
        return Shares(
            self.rooms, [one for one in self.running if one.request_id not in gone], self.tenants
        )


def preempt(waiting: Waiting, shares: Shares) -> Preemption | None:
    """The cheapest preemption that makes room for a request; None if its tenant has to wait.

    A tenant's share is dominant resource fairness (Ghodsi et al., NSDI 2011): the larger of its
    parts of all batch slots and of all KV tokens, over its weight. It is judged as it would be
    afterwards.

    - A request gives way if its tenant is then still not below the tenant that waits. So the move
      is never reversed, and with one tenant nobody is preempted.
    - Slots are whole. A tenant that has none takes turns with one that was served more tokens,
      TURN_S each.
    - Within the tenant with the largest share the order is that of `Running.cost`. Requests that
      are more urgent than the waiting one stay, since priorities are strict.
    - Nobody gives way where a slot comes free in less time than the victim needs to start again.
    """
    plans = [plan for room in shares.rooms if (plan := _plan(waiting, room, shares)) is not None]
    if not plans:
        return None
    room, victims = min(
        plans, key=lambda plan: (len(plan[1]), sum(one.held_tokens for one in plan[1]))
    )
    restart_s = max(one.start_s or 0.0 for one in victims)
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
    """The victims that make room on that worker."""
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
    for victim in tuple(victims):  # those before it may be too small to matter
        others = [one for one in victims if one is not victim]
        if enough(others):
            victims = others
    return (room, victims) if victims else None


def _victim(waiting: Waiting, worker_id: str, shares: Shares) -> Running | None:
    """The next to give way on that worker: of the tenant with the largest share of those that have
    to.
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
