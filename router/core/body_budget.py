"""How many bytes of unread requests the tenants may have here together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvrelay.errors import ResourceExhausted
from kvrelay.tenants import Tenant


class Holding:
    """The bytes of one request."""

    def __init__(self, tenant: str, evict: Callable[[], None]) -> None:
        self.tenant = tenant
        self.size = 0
        self.evicted = False
        self.evict = evict


class BodyBudget:
    """A bound for all, of which nobody is kept out by others beyond their share.

    A tenant alone may use it all. When it is used up, the tenant that holds most for its weight
    gives way, as in router.core.queueing.fair_queue.FairQueue: its newest request is evicted, or
    refused if it is the one that asks for more.
    """

    def __init__(self, total: int, what: str) -> None:
        """`what` is too much, for the message: "too many ..."."""
        self.held = 0
        self.evictions = 0
        self._total = total
        self._what = what
        self._holdings: dict[str, dict[Holding, None]] = {}  # by tenant, the newest last
        self._sizes: dict[str, int] = {}
        self._weights: dict[str, float] = {}

    @contextmanager
    def holding(self, tenant: Tenant, evict: Callable[[], None]) -> Iterator[Holding]:
        """`evict` is called once if the request has to go; it is to end soon then."""
        name = tenant.name
        holding = Holding(name, evict)
        self._holdings.setdefault(name, {})[holding] = None
        self._sizes.setdefault(name, 0)
        self._weights[name] = tenant.weight
        try:
            yield holding
        finally:
            self._drop(holding)

    def grow(self, holding: Holding, amount: int) -> None:
        """Raises ResourceExhausted when this one has to go, or has been evicted."""
        if holding.evicted:
            raise self.refusal()
        holding.size += amount
        self._sizes[holding.tenant] += amount
        self.held += amount
        while self.held > self._total:
            most = max(
                self._sizes,
                key=lambda name: (self._sizes[name] / self._weights[name], name == holding.tenant),
            )
            if most == holding.tenant:
                raise self.refusal()
            victim = next(one for one in reversed(self._holdings[most]) if one.size)
            victim.evicted = True
            self.evictions += 1
            self._drop(victim)
            victim.evict()

    def refusal(self) -> ResourceExhausted:
        return ResourceExhausted(
            f"too many {self._what} at one time; this tenant has the most of them, so send fewer "
            f"at a time",
            retry_after_s=1.0,
        )

    def _drop(self, holding: Holding) -> None:
        name, size = holding.tenant, holding.size
        holdings = self._holdings.get(name)
        if holdings is None or holding not in holdings:
            return
        del holdings[holding]
        holding.size = 0
        self.held -= size
        self._sizes[name] -= size
        if not holdings:
            del self._holdings[name], self._sizes[name], self._weights[name]
