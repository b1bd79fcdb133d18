"""What each tenant used, for Prometheus; a tenant is given its own series, operators all.

The label `tenant` takes the names in the tokens file, which are at most MAX_TENANTS; the series of
a tenant that left the file go with it. It is on counters alone: a histogram for each tenant would
be a series for each of its buckets.
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
    """An observer of requests' ends."""

    def __init__(self, model: str, access: Access, limits: Limits) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._access = access
        self._limits = limits
        self._requests: Counter[tuple[str, str]] = Counter()  # by tenant and how they ended
        self._tokens: Counter[tuple[str, str]] = Counter()  # by tenant and kind
        self.registry.register(self)

    def ended(self, stream: Stream) -> None:
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
        yield self._family(
            "tenant_requests", "Requests that ended, by how.", "finished_reason", self._requests
        )
        yield self._family(
            "tenant_tokens", "Tokens of prompts and of answers.", "kind", self._tokens
        )
        yield self._family(
            "tenant_refusals",
            "Requests over a limit of their tenant.",
            "limit",
            self._limits.refused,
        )
        for name, text, value in (
            (
                "unauthenticated",
                "Callers without a token that is known here.",
                self._access.refusals,
            ),
            (
                "tokens_file_errors",
                "Versions of the tokens file that could not be used.",
                self._access.failed_loads,
            ),
        ):
            family = CounterMetricFamily(f"kvrelay_{name}", text, labels=("model_name",))
            family.add_metric((self._model,), value)
            yield family

    def of(self, tenant: str) -> Iterator[Metric]:
        """The series of one tenant alone."""
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
