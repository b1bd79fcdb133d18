"""The queue of requests without workers: by priority, and fair between tenants."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import groupby, takewhile

from kvrelay.tenants import Tenant

MOST_HEADS = 4


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """A request's place in the queue. Tickets compare by their order of arrival."""

    number: int
    request_id: str = field(compare=False)
    priority: int = field(compare=False)
    # Tokens of the prompt and of the part of the answer that the client has already.
    tokens: int = field(compare=False)


# Requests of one tenant by priority and request id.
Lines = dict[int, OrderedDict[str, Ticket]]


# Whether prefill workers are busy for a tenant.
Busy = Callable[[str], bool]


class Share:
    """One tenant's use of the cluster and of the queue."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        # Tokens served, divided by the tenant's weight.
        self.counter = 0.0
        self.running = 0
        self.waiting = 0
        self.waiting_tokens = 0
        # The part of these requests that waits for a prefill worker.
        self.deferred = 0
        self.deferred_tokens = 0
        # Its new requests of each priority, in order of arrival, and these priorities in order.
        self.lines: Lines = {}
        self.priorities: list[int] = []
        # The part of `lines` that does not wait for a prefill worker.
        self.ready: Lines = {}

    @property
    def capped(self) -> bool:
        """Whether the tenant has reached its limit on requests with workers."""
        return self.tenant.max_running is not None and self.running >= self.tenant.max_running

    def charge(self, tokens: int) -> None:
        """Adds served tokens to the tenant's counter."""
        self.counter += tokens / self.tenant.weight

    def waiting_at(self, priority: int) -> int:
        """Returns the number of new requests of this priority."""
        return len(self.lines.get(priority, ()))

    def more_urgent(self, priority: int) -> int:
        """Returns the number of new requests that are more urgent than this priority."""
        urgent = self.priorities[: bisect_left(self.priorities, priority)]
        return sum(len(self.lines[one]) for one in urgent)


class FairQueue:
    """Orders requests by priority and by fair shares.

    - Between priorities, the order is strict, and the lower number goes first, as in vLLM. Requests
      that must not starve need the same priority.
    - Within a priority, the tenant with the fewest served tokens (prompts and answers) per weight
      is next: the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language
      Models" (OSDI 2024), with the weights of weighted fair queueing.
    - A returning tenant starts at the counter of the tenant that was served last (start-time fair
      queueing, Goyal et al., SIGCOMM 1996), so idle time earns no credit.
    - A tenant is skipped while it holds so many batch slots that a further slot would at once go to
      another waiting tenant.
    - Within a tenant, the order is first come, first served.
    - Requests that lost their workers go first in their priority: they have used compute, and their
      clients wait in mid-stream.
    - Preempted requests go first only within their tenant; otherwise they would take back their
      batch slots.
    - Requests that found all prefill workers busy are `deferred`. Others, which need no prefill
      worker, may overtake them.

    `overflow` bounds the queue.
    """

    def __init__(self) -> None:
        # Requests that had workers before, by priority, in order of arrival.
        self._returned: dict[int, list[tuple[Ticket, Share]]] = {}
        self._shares: dict[str, Share] = {}
        self._where: dict[str, tuple[Ticket, Share]] = {}
        self._preempted: set[str] = set()
        # Requests that wait for a prefill worker.
        self._deferred: set[str] = set()
        # Counter of the tenant that was served last.
        self._virtual_time = 0.0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._where

    @property
    def tokens(self) -> int:
        """Tokens of the waiting prompts."""
        return sum(one.waiting_tokens for one in self._shares.values())

    @property
    def deferred(self) -> tuple[int, int]:
        """Number and tokens of the requests that wait for a prefill worker, without those of capped
        tenants.
        """
        free = [one for one in self._shares.values() if not one.capped]
        return sum(one.deferred for one in free), sum(one.deferred_tokens for one in free)

    def deferred_beside(self, ticket: Ticket, share: Share) -> int:
        """Returns the tokens that prefill workers compute besides this request's, until the last
        deferred prompt of its tenant is computed. All tenants get the same time.
        """
        own = share.deferred_tokens
        own -= ticket.tokens if ticket.request_id in self._deferred else 0
        others = [one.deferred_tokens for one in self._shares.values() if one is not share]
        return own + sum(min(one, own + ticket.tokens) for one in others)

    @property
    def capped(self) -> tuple[int, int]:
        """Number and tokens of the requests of capped tenants."""
        capped = [one for one in self._shares.values() if one.capped]
        return sum(one.waiting for one in capped), sum(one.waiting_tokens for one in capped)

    def share(self, tenant: Tenant) -> Share:
        """Returns the tenant's share and updates it to the given tenant settings."""
        share = self._shares.setdefault(tenant.name, Share(tenant))
        share.tenant = tenant
        return share

    @property
    def shares(self) -> Iterable[Share]:
        """Shares of all tenants seen so far."""
        return self._shares.values()

    def add(self, ticket: Ticket, share: Share, returned: bool, preempted: bool = False) -> None:
        """Adds a waiting request.

        - returned: the request lost its workers.
        - preempted: the request gave its batch slot to another tenant.
        """
        if share.waiting == 0:
            share.counter = max(share.counter, self._virtual_time)
        if returned:
            pairs = self._returned.setdefault(ticket.priority, [])
            insort(pairs, (ticket, share), key=lambda pair: pair[0])
        else:
            if ticket.priority not in share.lines:
                insort(share.priorities, ticket.priority)
            for lines in (share.lines, share.ready):
                line = lines.setdefault(ticket.priority, OrderedDict())
                line[ticket.request_id] = ticket
                if preempted:
                    _to_front(line, ticket)
            if preempted:
                self._preempted.add(ticket.request_id)
        self._where[ticket.request_id] = ticket, share
        share.waiting += 1
        share.waiting_tokens += ticket.tokens

    def remove(self, request_id: str) -> None:
        """Removes the request. Does nothing if the request does not wait."""
        if request_id not in self._where:
            return
        ticket, share = self._where.pop(request_id)
        self._preempted.discard(request_id)
        share.waiting -= 1
        share.waiting_tokens -= ticket.tokens
        if request_id in self._deferred:
            self._deferred.remove(request_id)
            share.deferred -= 1
            share.deferred_tokens -= ticket.tokens
        if request_id in share.lines.get(ticket.priority, ()):
            _drop(share.ready, ticket)
            _drop(share.lines, ticket)
            if ticket.priority not in share.lines:
                share.priorities.remove(ticket.priority)
        else:
            self._returned[ticket.priority].remove((ticket, share))
            if not self._returned[ticket.priority]:
                del self._returned[ticket.priority]

    def defer(self, ticket: Ticket) -> None:
        """Records that the request waits for a prefill worker."""
        if ticket.request_id not in self._deferred:
            _, share = self._where[ticket.request_id]
            self._deferred.add(ticket.request_id)
            share.deferred += 1
            share.deferred_tokens += ticket.tokens
            _drop(share.ready, ticket)

    def next(self, pausing: Callable[[str], bool], busy: Busy) -> Ticket | None:
        """Returns the next request without removing it. Skips requests that are `pausing`, tenants
        that are capped, and the deferred requests of tenants for which prefill workers are `busy`.
        """
        for returned, lines in self._levels(busy):
            for ticket, share in returned:
                if not share.capped and not pausing(ticket.request_id):
                    return ticket
            fit = {share: _first(line, pausing) for share, line in lines}
            tickets = {share: ticket for share, ticket in fit.items() if ticket is not None}
            if shares := _below_share(list(tickets)):
                return tickets[min(shares, key=lambda one: (one.counter, tickets[one]))]
        return None

    def heads(self, pausing: Callable[[str], bool], busy: Busy) -> list[Ticket]:
        """Returns the next request of each tenant, if other tenants have requests with workers.

        All returned requests have the most urgent priority with any candidate, in the order of
        `next` within a tenant. The tenants with the fewest running requests per weight come first;
        at most MOST_HEADS are returned.
        """
        holding = {one for one in self._shares.values() if one.running}
        for returned, lines in self._levels(busy) if holding else ():
            heads: dict[Share, Ticket] = {}
            for ticket, share in returned:
                if share not in heads and not share.capped and not pausing(ticket.request_id):
                    heads[share] = ticket
            for share, line in lines:
                if (first := _first(line, pausing)) is not None:
                    heads.setdefault(share, first)
            if heads:
                order = sorted(
                    heads,
                    key=lambda one: (one.running / one.tenant.weight, one.counter, heads[one]),
                )
                return [heads[one] for one in order if holding - {one}][:MOST_HEADS]
        return []

    def is_behind(self, ticket: Ticket, share: Share) -> bool:
        """Whether the ticket is a waiting new request and its tenant has one that goes first."""
        line = share.lines.get(ticket.priority, ())
        return ticket.request_id in line and (
            next(iter(line)) != ticket.request_id or share.priorities[0] < ticket.priority
        )

    def serve(self, ticket: Ticket) -> None:
        """Removes the request from the queue, because it has workers now."""
        _, share = self._where[ticket.request_id]
        self._virtual_time = max(self._virtual_time, share.counter)
        self.remove(ticket.request_id)

    def ahead(self, share: Share, priority: int, tokens_each: float) -> int:
        """Returns the number of requests ahead of a request of this tenant and priority that
        arrives now. `tokens_each`: average tokens charged for a request.
        """
        # More urgent new requests. They are charged to their tenants.
        before = {one: one.more_urgent(priority) for one in self._shares.values()}
        returned = sum(len(line) for level, line in self._returned.items() if level <= priority)

        def counter(one: Share, requests: int) -> float:
            """Returns the tenant's counter after `requests` more of its requests."""
            now = one.counter if one.waiting else max(one.counter, self._virtual_time)
            return now + requests * tokens_each / one.tenant.weight

        mine = share.waiting_at(priority)
        turn = counter(share, before[share] + mine)
        total = returned + sum(before.values()) + mine
        for other in before:
            if other is not share and (waiting := other.waiting_at(priority)):
                behind = (turn - counter(other, before[other])) * other.tenant.weight / tokens_each
                total += min(waiting, max(0, round(behind)))
        return total

    def overflow(self, share: Share, priority: int) -> str | None:
        """Returns the request that a new request of this tenant and priority displaces from a full
        queue. None: the new request has to go.

        A tenant alone may use the whole queue. If other tenants wait too, the tenant with the most
        waiting requests per weight loses the newest of its least urgent requests. So no tenant
        keeps another out of its share of the queue. Requests that had workers before are never
        displaced.
        """
        newest = {
            one: found for one in self._shares.values() if (found := self._newest(one)) is not None
        }

        def excess(one: Share) -> float:
            return (one.waiting + (one is share)) / one.tenant.weight

        largest = max(newest, key=excess, default=share)
        if excess(largest) <= excess(share):
            largest = share
        found = newest.get(largest)
        if found is None or (largest is share and found.priority <= priority):
            return None
        return found.request_id

    def _newest(self, share: Share) -> Ticket | None:
        """Returns the newest of the tenant's least urgent requests that had no workers before."""
        lines = (share.lines[priority] for priority in reversed(share.priorities))
        newest = (line[next(reversed(line))] for line in lines)
        return next((one for one in newest if one.request_id not in self._preempted), None)

    def _levels(
        self, busy: Busy
    ) -> Iterator[tuple[list[tuple[Ticket, Share]], list[tuple[Share, OrderedDict[str, Ticket]]]]]:
        """Yields, most urgent priority first, the requests that had workers before and the new
        requests of each tenant that is not capped.
        """
        shares = [one for one in self._shares.values() if one.lines and not one.capped]
        seen = [(one, one.ready if busy(one.tenant.name) else one.lines) for one in shares]
        priorities = [
            one.priorities if lines is one.lines else sorted(lines) for one, lines in seen
        ]
        for priority, _ in groupby(merge(sorted(self._returned), *priorities)):
            returned = [
                (ticket, share)
                for ticket, share in self._returned.get(priority, ())
                if not (ticket.request_id in self._deferred and busy(share.tenant.name))
            ]
            found = [(one, lines.get(priority)) for one, lines in seen]
            yield returned, [(one, line) for one, line in found if line is not None]

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)


def _below_share(shares: list[Share]) -> list[Share]:
    """Drops the tenants that, per weight, hold more than another listed tenant would hold with one
    more request.

    Empty only if `shares` is empty. A request of a dropped tenant would at once be preempted in
    favour of the other tenant.
    """
    least = min(((one.running + 1) / one.tenant.weight for one in shares), default=0.0)
    return [one for one in shares if one.running / one.tenant.weight < least]


def _drop(lines: Lines, ticket: Ticket) -> None:
    """Removes the ticket from its line, if it is there."""
    line = lines.get(ticket.priority)
    if line is not None and line.pop(ticket.request_id, None) is not None and not line:
        del lines[ticket.priority]


def _to_front(line: OrderedDict[str, Ticket], ticket: Ticket) -> None:
    """Moves a preempted request ahead of later requests. Earlier preempted requests stay ahead of
    it.
    """
    earlier = [one.request_id for one in takewhile(lambda one: one < ticket, line.values())]
    for request_id in (ticket.request_id, *reversed(earlier)):
        line.move_to_end(request_id, last=False)


def _first(line: OrderedDict[str, Ticket], pausing: Callable[[str], bool]) -> Ticket | None:
    """Returns the tenant's first request that need not pause."""
    return next((ticket for ticket in line.values() if not pausing(ticket.request_id)), None)
