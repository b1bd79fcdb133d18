"""The response of `/metrics`. Its share of the event loop's time is bounded for any scrape rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from kvrelay.clock import Clock
from kvrelay.tenants import Tenant
from router.observability.tenant_metrics import TenantMetrics
from router.sibling_processes import Siblings

# A text is reused for this many times its generation time.
SPACING = 20.0
# Label of the series of one of several processes of a router.
PROCESS = "router_process"
_TOPIC = "metrics"
_HELP = b"\n# HELP "


class Exposition:
    """Prometheus text, limited to what the caller may see.

    The roles monitor and admin see the series of the cluster and of all tenants. Other tenants see
    only their own series: two successive counts of the whole cluster reveal the prompt and answer
    lengths of a request between them.

    In a router of several processes, the text of each has the series of all of them, with the label
    PROCESS. Workers and pools have one series, from the process that answers.
    """

    def __init__(
        self,
        process: Sequence[CollectorRegistry],
        cluster: Sequence[CollectorRegistry],
        tenants: Sequence[TenantMetrics],
        clock: Clock,
        siblings: Siblings,
    ) -> None:
        """The metrics of each model.

        - process: of this process.
        - cluster: of the workers and pools.
        - tenants: of this process, by tenant.
        """
        self._process = process
        self._cluster = cluster
        self._tenants = tenants
        self._siblings = siblings
        # By tenant name. The empty name has all series.
        self._shares = _Spaced(clock)
        self._texts = _Spaced(clock)
        siblings.answer(_TOPIC, self._answer)

    async def text(self, viewer: Tenant) -> bytes:
        """Returns the viewer's text. In a cluster of usual size it is at most some tens of
        milliseconds old.
        """
        name = "" if viewer.sees_cluster else viewer.name
        if (known := self._texts.fresh(name)) is not None:
            return known
        others = await self._siblings.ask(_TOPIC, _checked, name=name)
        # Another scrape may have made it meanwhile.
        return self._texts.made(name, lambda: self._whole(name, others))

    def _whole(self, name: str, others: Sequence[bytes]) -> bytes:
        shares = (self._share(name), *others)
        if name:
            return joined(shares)
        cluster = _Merged(one.collect() for one in self._cluster)
        return joined((*shares, generate_latest(cluster)))

    async def _answer(self, name: str) -> bytes:
        return self._share(name)

    def _share(self, name: str) -> bytes:
        """Returns the series of this process."""
        return self._shares.made(name, lambda: self._series(name))

    def _series(self, name: str) -> bytes:
        if name:
            sources: list[Iterable[Metric]] = [one.of(name) for one in self._tenants]
        else:
            registries = [*self._process, *(one.registry for one in self._tenants)]
            sources = [one.collect() for one in registries]
        number = self._siblings.number
        return generate_latest(_Merged(sources, {} if number is None else {PROCESS: str(number)}))


class _Spaced:
    """Texts that are made for at most 1 / SPACING of the time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._texts: dict[str, bytes] = {}
        self._stale_at = float("-inf")

    def fresh(self, key: str) -> bytes | None:
        """Returns the text, or None if it is to be made."""
        if self._clock.now() >= self._stale_at:
            self._texts.clear()
        return self._texts.get(key)

    def made(self, key: str, make: Callable[[], bytes]) -> bytes:
        """Returns the text, and makes it unless it is fresh. All texts are stale a while after one
        was made.
        """
        if (known := self.fresh(key)) is not None:
            return known
        now, began = self._clock.now(), time.thread_time()
        self._texts[key] = make()
        self._stale_at = now + SPACING * (time.thread_time() - began)
        return self._texts[key]


class _Merged(CollectorRegistry):
    """The metric families of several sources. A family of several models is one family. All samples
    have the labels `extra`.
    """

    def __init__(
        self, sources: Iterable[Iterable[Metric]], extra: dict[str, str] | None = None
    ) -> None:
        super().__init__()
        self._sources = sources
        self._extra = extra or {}

    def collect(self) -> Iterable[Metric]:
        """Returns the metric families."""
        families: dict[str, Metric] = {}
        for source in self._sources:
            for family in source:
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        if self._extra:
            for family in families.values():
                family.samples = [
                    one._replace(labels={**one.labels, **self._extra}) for one in family.samples
                ]
        return families.values()


def _checked(text: bytes) -> bytes:
    """Returns the text of another process. Raises ValueError if it cannot be joined."""
    if not text.startswith(_HELP[1:]) or joined([text]) != text:
        raise ValueError("not a text of metrics")
    return text


def joined(texts: Sequence[bytes]) -> bytes:
    """Joins texts of generate_latest to one in which each family occurs once, as Prometheus
    demands.
    """
    families: dict[bytes, list[bytes]] = {}
    for text in texts:
        for block in (b"\n" + text).split(_HELP)[1:]:
            help_, type_, *samples = block.rstrip(b"\n").split(b"\n", 2)
            name = help_.split(b" ", 1)[0]
            families.setdefault(name, [_HELP[1:] + help_, type_]).extend(samples)
    return b"".join(line + b"\n" for family in families.values() for line in family)
