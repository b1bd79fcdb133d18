"""The response of `/metrics`. Its share of the event loop's time is bounded for any scrape rate."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

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

    def __init__(
        self,
        cluster: Sequence[CollectorRegistry],
        tenants: Sequence[TenantMetrics],
        clock: Clock,
    ) -> None:
        """`cluster` and `tenants`: the metrics of each model."""
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
                else generate_latest(_Merged(one.of(key) for one in self._tenants))
            )
            self._stale_at = now + SPACING * (time.thread_time() - began)
        return self._texts[key]

    def _whole(self) -> bytes:
        registries = [*self._cluster, *(one.registry for one in self._tenants)]
        return generate_latest(_Merged(one.collect() for one in registries))


class _Merged(CollectorRegistry):
    """The metric families of several sources. A family of several models is one family."""

    def __init__(self, sources: Iterable[Iterable[Metric]]) -> None:
        super().__init__()
        self._sources = sources

    def collect(self) -> Iterable[Metric]:
        """Returns the metric families."""
        families: dict[str, Metric] = {}
        for source in self._sources:
            for family in source:
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        return families.values()
