"""Requests that wait for workers: by priority, and fairly between tenants."""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from kvrelay.tenants import Tenant

MOST_HEADS = 4


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """A request's place. Tickets compare by their order of arrival."""

    number: int
    request_id: str = field(compare=False)
    priority: int = field(compare=False)
    # Of the prompt, and of the answer that the client has already
    tokens: int = field(compare=False)


class Share:
    """What one tenant has of the cluster and of the queue."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.counter = 0.0  # tokens served, over the tenant's weight
        self.running = 0
        self.waiting = 0
        self.waiting_tokens = 0

    @property
    def capped(self) -> bool:
        """Whether as many of its requests have workers as may at one time."""
        return self.tenant.max_running is not None and self.running >= self.tenant.max_running

    def charge(self, tokens: int) -> None:
        self.counter += tokens / self.tenant.weight


class _Level:
    """The waiting requests of one priority."""

    def __init__(self) -> None:
        # That had workers before, in order of arrival
        self.returned: list[tuple[Ticket, Share]] = []
        self.new: dict[Share, OrderedDict[str, Ticket]] = {}  # of each tenant, in order of arrival

    def __bool__(self) -> bool:
        return bool(self.returned or self.new)


class FairQueue:
    """Whose turn is next.

    Between priorities the order is strict, lower goes first, as in vLLM: a priority that could be
    overtaken would be none, and who may not starve is given the same one. Within a priority the
    tenant is next that was served the fewest tokens, of prompts and answers, for its weight: the
    Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024),
    with the weights of weighted fair queueing. A tenant that comes back after a while begins at the
    counter of the one that was served last (start-time fair queueing, Goyal et al., SIGCOMM 1996):
    idle time earns no credit. A tenant is passed over, though, while it holds so many batch slots
    that a further one would at once be another's that waits. Within a tenant it is first come,
    first served.

    Requests that had workers before and lost them go first in their priority: they are paid for,
    and their clients wait in mid-stream. Those that were preempted go first among their tenant's
    only, or they would take back what they gave. The queue is bounded, by `overflow`.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._shares: dict[str, Share] = {}
        self._where: dict[str, tuple[Ticket, Share]] = {}
        self._preempted: set[str] = set()
        self._virtual_time = 0.0  # counter of the tenant that was served last

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._where

    @property
    def tokens(self) -> int:
        """Of the prompts that wait."""
        return sum(one.waiting_tokens for one in self._shares.values())

    def share(self, tenant: Tenant) -> Share:
        """The tenant's, as it is described now."""
        share = self._shares.setdefault(tenant.name, Share(tenant))
        share.tenant = tenant
        return share

    @property
    def shares(self) -> Iterable[Share]:
        """Of all tenants that were seen."""
        return self._shares.values()

    def add(self, ticket: Ticket, share: Share, returned: bool, preempted: bool = False) -> None:
        """`returned`: it lost its workers. `preempted`: it gave its batch slot to another
        tenant.
        """
        if share.waiting == 0:
            share.counter = max(share.counter, self._virtual_time)
        level = self._levels.setdefault(ticket.priority, _Level())
        if returned:
            insort(level.returned, (ticket, share), key=lambda pair: pair[0])
        else:
            line = level.new.setdefault(share, OrderedDict())
            line[ticket.request_id] = ticket
            if preempted:
                self._preempted.add(ticket.request_id)
                _to_front(line, ticket)
        self._where[ticket.request_id] = ticket, share
        share.waiting += 1
        share.waiting_tokens += ticket.tokens

    def remove(self, request_id: str) -> None:
        """Nothing happens where it does not wait."""
        if request_id not in self._where:
            return
        ticket, share = self._where.pop(request_id)
        self._preempted.discard(request_id)
        share.waiting -= 1
        share.waiting_tokens -= ticket.tokens
        level = self._levels[ticket.priority]
        line = level.new.get(share)
        if line is not None and request_id in line:
            del line[request_id]
            if not line:
                del level.new[share]
        else:
            level.returned.remove((ticket, share))
        if not level:
            del self._levels[ticket.priority]

    def next(self, pausing: Callable[[str], bool]) -> Ticket | None:
        """The one whose turn it is; passes over those that are `pausing` and over tenants that are
        capped.
        """
        for priority in sorted(self._levels):
            level = self._levels[priority]
            for ticket, share in level.returned:
                if not share.capped and not pausing(ticket.request_id):
                    return ticket
            fit = {
                share: _first(level.new[share], pausing) for share in level.new if not share.capped
            }
            tickets = {share: ticket for share, ticket in fit.items() if ticket is not None}
            if shares := _below_share(list(tickets)):
                return tickets[min(shares, key=lambda one: (one.counter, tickets[one]))]
        return None

    def heads(self, pausing: Callable[[str], bool]) -> list[Ticket]:
        """The next request of each tenant, where other tenants have requests with workers.

        They are those of the most urgent priority that has any, as `next` would have them. The
        tenants that hold least for their weight come first, and MOST_HEADS of them are enough.
        """
        holding = {one for one in self._shares.values() if one.running}
        for priority in sorted(self._levels) if holding else ():
            level = self._levels[priority]
            heads: dict[Share, Ticket] = {}
            for ticket, share in level.returned:
                if share not in heads and not share.capped and not pausing(ticket.request_id):
                    heads[share] = ticket
            for share, line in level.new.items():
                if not share.capped and (first := _first(line, pausing)) is not None:
                    heads.setdefault(share, first)
            if heads:
                order = sorted(
                    heads,
                    key=lambda one: (one.running / one.tenant.weight, one.counter, heads[one]),
                )
                return [heads[one] for one in order if holding - {one}][:MOST_HEADS]
        return []

    def serve(self, ticket: Ticket) -> None:
        """Takes it out, since workers were found for it."""
        _, share = self._where[ticket.request_id]
        self._virtual_time = max(self._virtual_time, share.counter)
        self.remove(ticket.request_id)

    def ahead(self, share: Share, priority: int, tokens_each: float) -> int:
        """How many requests go before one of that tenant and priority which comes now.

        `tokens_each`: what a request is charged, on average.
        """
        own = self._levels.get(priority, _Level())
        # New requests that are more urgent; they are charged to their tenants
        before: Counter[Share] = Counter()
        total = len(own.returned)
        for more_urgent, level in self._levels.items():
            if more_urgent < priority:
                total += len(level.returned)
                before.update({one: len(line) for one, line in level.new.items()})

        def counter(one: Share, requests: int) -> float:
            """Where it will be after so many more of its requests."""
            now = one.counter if one.waiting else max(one.counter, self._virtual_time)
            return now + requests * tokens_each / one.tenant.weight

        mine = len(own.new.get(share, ()))
        turn = counter(share, before[share] + mine)
        for other, line in own.new.items():
            if other is not share:
                behind = (turn - counter(other, before[other])) * other.tenant.weight / tokens_each
                total += min(len(line), max(0, round(behind)))
        return total + before.total() + mine

    def overflow(self, share: Share, priority: int) -> str | None:
        """Whose place a request of that tenant and priority takes in a queue that is full; None: it
        has to go itself.

        A tenant alone may use the whole queue. Where others wait, the one with most requests
        waiting for its weight gives way, with the newest of its least urgent ones. So nobody is
        kept out of the queue by others beyond their share of it. Those that had workers before are
        not sent away.
        """
        newest = {
            (priority, one): request_id
            for priority, level in self._levels.items()
            for one, line in level.new.items()
            if (request_id := next(reversed(line))) not in self._preempted
        }

        def excess(one: Share) -> float:
            return (one.waiting + (one is share)) / one.tenant.weight

        largest = max((one for _, one in newest), key=excess, default=share)
        if excess(largest) <= excess(share):
            largest = share
        for least_urgent in sorted(self._levels, reverse=True):
            if largest is share and least_urgent <= priority:
                break
            if (least_urgent, largest) in newest:
                return newest[least_urgent, largest]
        return None

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)


def _below_share(shares: list[Share]) -> list[Share]:
    """Without those who would hold more for their weight than another one of them with a request
    more.

    Never empty, unless `shares` is. A request of those left out would have to give way to the other
    tenant at once.
    """
    least = min(((one.running + 1) / one.tenant.weight for one in shares), default=0.0)
    return [one for one in shares if one.running / one.tenant.weight < least]


def _to_front(line: OrderedDict[str, Ticket], ticket: Ticket) -> None:
    """Moves a preempted request before those that came after it: behind others that were preempted,
    at the most.
    """
    earlier = [one.request_id for one in takewhile(lambda one: one < ticket, line.values())]
    for request_id in (ticket.request_id, *reversed(earlier)):
        line.move_to_end(request_id, last=False)


def _first(line: OrderedDict[str, Ticket], pausing: Callable[[str], bool]) -> Ticket | None:
    """The first request of a tenant that need not pause."""
    return next((ticket for ticket in line.values() if not pausing(ticket.request_id)), None)
