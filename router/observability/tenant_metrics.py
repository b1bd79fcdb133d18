"""Usage per tenant as Prometheus metrics. Tenants see their own series, operators see all.

The label `tenant` has the names in the tokens file, at most MAX_TENANTS. A tenant's series end when
the tenant leaves the file. Only counters have this label: a histogram per tenant would need a
series per bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.frontend.access import Access
from router.frontend.rate_limits import Limits
from router.runtime.stream import Stream


class TenantMetrics(Collector):
    """Counts each tenant's requests and tokens. An observer of ended requests."""

    def __init__(
        self, model: str, access: Access, limits: Limits, *, of_process: bool = True
    ) -> None:
        """of_process: includes what is counted before a request's model is known, once in a router
        of several models.
        """
        self.registry = CollectorRegistry()
        self._model = model
        self._access = access
        self._limits = limits
        self._of_process = of_process
        # By tenant and finish reason.
        self._requests: Counter[tuple[str, str]] = Counter()
        # By tenant and kind.
        self._tokens: Counter[tuple[str, str]] = Counter()
        self.registry.register(self)

    def ended(self, stream: Stream) -> None:
        """Counts the end of a request."""
        assert stream.ended is not None
        name, request = stream.request.tenant.name, stream.request
        if name:
            self._requests[name, stream.ended.finish_reason] += 1
            self._tokens[name, "prompt"] += len(request.token_ids)
            self._tokens[name, "generation"] += stream.num_tokens - len(request.resume)

    def keep(self, names: Collection[str]) -> None:
        """Forgets all other tenants."""
        for counter in (self._requests, self._tokens):
            for key in [one for one in counter if one[0] not in names]:
                del counter[key]

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of all tenants."""
        yield self._family(
            "tenant_requests",
            "Requests that ended, by finish reason.",
            "finished_reason",
            self._requests,
        )
        yield self._family(
            "tenant_tokens", "Prompt tokens and generated tokens.", "kind", self._tokens
        )
        if not self._of_process:
            return
        yield self._family(
            "tenant_refusals",
            "Requests rejected by a limit of their tenant.",
            "limit",
            self._limits.refused,
        )
        for name, text, value in (
            (
                "unauthenticated",
                "Calls without a valid token.",
                self._access.refusals,
            ),
            (
                "tokens_file_errors",
                "Invalid versions of the tokens file.",
                self._access.failed_loads,
            ),
        ):
            family = CounterMetricFamily(f"kvrelay_{name}", text, labels=("model_name",))
            family.add_metric((self._model,), value)
            yield family

    def of(self, tenant: str) -> Iterator[Metric]:
        """Yields the series of one tenant."""
        for family in self.collect():
            family.samples = [one for one in family.samples if one.labels.get("tenant") == tenant]
            if family.samples:
                yield family

    def _family(self, name: str, text: str, label: str, counts: Counter[tuple[str, str]]) -> Metric:
        family = CounterMetricFamily(
            f"kvrelay_{name}", text, labels=("model_name", "tenant", label)
        )
        for (tenant, value), count in counts.items():
            family.add_metric((self._model, tenant, value), count)
        return family
