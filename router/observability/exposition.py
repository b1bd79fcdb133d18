"""What `/metrics` answers, at a bounded share of the event loop's time however many ask."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from kvrelay.clock import Clock
from kvrelay.tenants import Tenant
from router.observability.tenant_metrics import TenantMetrics

SPACING = 20.0  # a text is given again for so many times as long as it took to make


class Exposition:
    """Prometheus text, by what the caller may see.

    The roles monitor and admin see the series of the cluster and of all tenants. Another tenant
    sees its own series: counters of the whole cluster, read twice, tell the prompt and answer
    lengths of a request that came between.
    """

    def __init__(self, cluster: CollectorRegistry, tenants: TenantMetrics, clock: Clock) -> None:
        self._cluster = cluster
        self._tenants = tenants
        self._clock = clock
        self._texts: dict[str, bytes] = {}  # by tenant; empty: all series
        self._stale_at = float("-inf")

    def text(self, viewer: Tenant) -> bytes:
        """A text that is some tens of milliseconds old at the most, for a cluster of usual size."""
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
    """The series that carry one tenant's name."""

    def __init__(self, tenants: TenantMetrics, name: str) -> None:
        super().__init__()
        self._tenants = tenants
        self._name = name

    def collect(self) -> list[Metric]:
        return list(self._tenants.of(self._name))
