"""Memory budget for the unread requests of all tenants. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvrelay.errors import ResourceExhausted
from kvrelay.tenants import Tenant


class Holding:
    """The bytes that one request holds."""

    def __init__(self, tenant: str, evict: Callable[[], None]) -> None:
        self.tenant = tenant
        self.size = 0
        self.evicted = False
        self.evict = evict


class BodyBudget:
    """A shared budget that no tenant can use up at the expense of other tenants' shares.

    A tenant alone may use the whole budget. When the budget is used up, the tenant that holds the
    most bytes per weight loses its newest request, as in router.core.queueing.fair_queue.FairQueue:
    the request is evicted, or rejected if it is the request that asks for more.
    """

    def __init__(self, total: int, what: str) -> None:
        """`total` is in bytes. `what` completes the error message "too many ..."."""
        self.held = 0
        self.evictions = 0
        self._total = total
        self._what = what
        # By tenant, the newest last.
        self._holdings: dict[str, dict[Holding, None]] = {}
        self._sizes: dict[str, int] = {}
        self._weights: dict[str, float] = {}

    @contextmanager
    def holding(self, tenant: Tenant, evict: Callable[[], None]) -> Iterator[Holding]:
        """Holds a request's bytes until the context exits. `evict` is called at most once, on
        eviction; the caller must then end the request soon.
        """
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
        """Adds `amount` bytes to the request. Raises ResourceExhausted if the request has to go or
        has been evicted.
        """
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
        """Returns the error for a request that is evicted or rejected."""
        return ResourceExhausted(
            f"too many {self._what} at the same time; this tenant has the most, so send fewer "
            "at a time",
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
