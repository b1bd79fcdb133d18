"""The response of `/metrics`. Its share of the event loop's time is bounded for any scrape rate."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from kvrelay.clock import Clock
from kvrelay.tenants import Tenant
from router.observability.tenant_metrics import TenantMetrics

# A text is reused for this many times its generation time.
SPACING = 20.0


class Exposition:
    """Prometheus text, limited to what the caller may see.

    The roles monitor and admin see the series of the cluster and of all tenants. Other tenants see
    only their own series: two successive counts of the whole cluster reveal the prompt and answer
    lengths of a request between them.
    """

    def __init__(self, cluster: CollectorRegistry, tenants: TenantMetrics, clock: Clock) -> None:
        self._cluster = cluster
        self._tenants = tenants
        self._clock = clock
        # By tenant name. The empty name has all series.
        self._texts: dict[str, bytes] = {}
        self._stale_at = float("-inf")

    def text(self, viewer: Tenant) -> bytes:
        """Returns the viewer's text. In a cluster of usual size it is at most some tens of
        milliseconds old.
        """
        now = self._clock.now()
        if now >= self._stale_at:
            self._texts.clear()
        key = "" if viewer.sees_cluster else viewer.name
        if key not in self._texts:
            began = time.thread_time()
            self._texts[key] = (
                self._whole()
                if viewer.sees_cluster
                else generate_latest(_OwnSeries(self._tenants, key))
            )
            self._stale_at = now + SPACING * (time.thread_time() - began)
        return self._texts[key]

    def _whole(self) -> bytes:
        return generate_latest(self._cluster) + generate_latest(self._tenants.registry)


class _OwnSeries(CollectorRegistry):
    """The series with one tenant's name."""

    def __init__(self, tenants: TenantMetrics, name: str) -> None:
        super().__init__()
        self._tenants = tenants
        self._name = name

    def collect(self) -> list[Metric]:
        """Returns the tenant's metric families."""
        return list(self._tenants.of(self._name))
