"""The status page at `/`: its files, and the snapshot of a model that it polls once a second.

The page polls instead of holding a stream open. So a slow or closed browser costs nothing, and a
page in several tabs does not use up the few connections that a browser opens to a server.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvrelay.clock import Clock
from kvrelay.errors import ResourceExhausted
from kvrelay.tenants import Role, Tenant
from kvrelay.types.control_plane import ScalingDecision
from kvrelay.types.workers import POOLS, WorkerLoad
from kvrelay.wire.cluster import ClusterStatus, PoolStatus, WorkerStatus
from router.frontend.frontend import Frontend
from router.observability import recent_requests
from router.observability.history import SAMPLE_S, History, Sample
from router.observability.recent_requests import read_rows
from router.observability.status import ClusterView
from router.observability.traffic import RouterTraffic
from router.runtime.driver import RECENT, Driver
from router.sibling_processes import Siblings

# A snapshot younger than this is served again. Pages poll once a second.
SNAPSHOT_S = 0.9
# Limit on viewers of one tenant per snapshot.
MAX_VIEWERS = 64
# Limit on shown workers per pool.
MAX_WORKERS = 64
MAX_TIERS = 4
# Limit on models in the overview.
MAX_MODELS = 32
_TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src "
        "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
Json = dict[str, Any]


class StatusPage:
    """Serves the status page. Without viewers it only takes one sample and the last rows every
    SAMPLE_S seconds.
    """

    def __init__(
        self,
        frontend: Frontend,
        driver: Driver,
        traffic: Callable[[], Awaitable[RouterTraffic]],
        view: ClusterView,
        clock: Clock,
        siblings: Siblings,
    ) -> None:
        self._frontend = frontend
        self._driver = driver
        self._traffic = traffic
        self._view = view
        self._clock = clock
        self._siblings = siblings
        self._topic = f"requests of {view.model}"
        siblings.answer(self._topic, self._answer)
        # The drivers of all models of this router, by the model's name.
        self.drivers: Mapping[str, Driver] = {}
        self._history = History()
        self._rows = recent_requests.Rows(driver.recent)
        self._making = asyncio.Lock()
        # JSON, by whether the viewer sees the cluster.
        self._figures: dict[bool, str] = {}
        # The figures with the requests that each viewer may see.
        self._snapshots: dict[Tenant, bytes] = {}
        self._made_at = float("-inf")
        # Served snapshots by tenant.
        self._given: Counter[str] = Counter()

    async def status(self, request: Request) -> Response:
        """Returns the snapshot. All viewers of a tenant within SNAPSHOT_S get the same bytes, up to
        MAX_VIEWERS of them.

        A tenant sees its own requests and whether the cluster serves. The roles monitor and admin
        see the figures of the whole cluster, and admin sees the requests of all tenants. Raises
        ResourceExhausted for more viewers.
        """
        viewer: Tenant = request.state.tenant
        async with self._making:
            if self._clock.now() - self._made_at >= SNAPSHOT_S:
                self._figures = await self._make()
                self._made_at = self._clock.now()
                self._given.clear()
                self._snapshots.clear()
            if viewer not in self._snapshots:
                requests = await self._requests(viewer)
                figures = self._figures[viewer.sees_cluster]
                self._snapshots[viewer] = f'{figures[:-1]},"requests":{requests}}}'.encode()
        self._given[viewer.name] += 1
        if self._given[viewer.name] > MAX_VIEWERS:
            raise ResourceExhausted(
                f"this tenant has the most status pages open that are allowed, {MAX_VIEWERS}; "
                "close one",
                retry_after_s=1.0,
            )
        return Response(self._snapshots[viewer], headers=_HEADERS, media_type="application/json")

    async def _requests(self, viewer: Tenant) -> str:
        """Returns the newest requests that the viewer may see, as JSON."""
        others = await self._siblings.ask(
            self._topic, read_rows, viewer=viewer.name, roles=sorted(viewer.roles)
        )
        own = self._own_requests(viewer)
        return recent_requests.newest((read_rows(own), *others), RECENT) if others else own

    async def _answer(self, viewer: str, roles: Sequence[Role]) -> bytes:
        return self._own_requests(Tenant(viewer, frozenset(roles))).encode()

    def _own_requests(self, viewer: Tenant) -> str:
        live = (
            one
            for one in self._driver.newest()
            if recent_requests.may_see(viewer, one.request.tenant.name)
        )
        return self._rows.json(islice(live, RECENT), viewer, self._clock.now(), RECENT)

    async def run(self) -> None:
        """Records the history and the rows of ended requests until cancelled."""
        while True:
            self._history.add(await self._sample())
            self._rows.keep(self._clock.now())
            await asyncio.sleep(SAMPLE_S)

    async def _sample(self) -> Sample:
        traffic = await self._traffic()
        load = traffic.load
        counts = {one.load.router_id: one.totals for one in traffic.parts}
        rates = self._history.rate(counts, self._clock.now())
        prefill = [one.load for one in self._driver.known if one.pool == "prefill"]
        decode = [one.load for one in self._driver.known if one.pool == "decode"]
        ttft, itl = traffic.ttft(50, 95), traffic.itl(50, 95)
        return Sample(
            generated_per_s=rates["generated_tokens"],
            prompt_per_s=rates["prompt_tokens"],
            running=load.running,
            waiting=load.waiting,
            prefill_queue=sum(one.waiting for one in prefill) + load.waiting_for_prefill,
            decode_kv=_held(decode),
            prefill_workers=len(prefill),
            decode_workers=len(decode),
            ttft_p50=ttft[0],
            ttft_p95=ttft[1],
            itl_p50=itl[0],
            itl_p95=itl[1],
        )

    async def _make(self) -> dict[bool, str]:
        traffic = await self._traffic()
        status = await self._view.status(traffic.load)
        now = self._clock.now()
        service = {
            # Clock of the requests' times, in ms.
            "now": round(now * 1000, 2),
            "model": status.model,
            "models": status.models,
            "overview": self._overview(),
            "worker_prefix": self._view.worker_prefix,
            "max_model_len": self._frontend.max_model_len,
            "chat": self._frontend.text.has_chat,
            "state": status.state,
        }
        # Outsiders get no counts: two successive counts reveal the lengths of a request between
        # them.
        outside = service | {
            "cluster": False,
            "registry": "ok" if status.registry == "ok" else "away",
            "pools": [_pool(one) | {"workers": []} for one in status.pools],
        }
        inside = (
            service
            | {"cluster": True, "registry": status.registry}
            | self._cluster_figures(status, traffic)
        )
        return {
            sees: json.dumps(one, separators=(",", ":"))
            for sees, one in ((False, outside), (True, inside))
        }

    def _overview(self) -> list[Json]:
        """Returns the states and pool sizes of all models of a router with several."""
        if len(self.drivers) < 2:
            return []
        return [_model(name, one) for name, one in islice(self.drivers.items(), MAX_MODELS)]

    def _cluster_figures(self, status: ClusterStatus, traffic: RouterTraffic) -> Json:
        router = status.router
        return {
            "router": {
                "id": router.router_id,
                # Those that have answered lately.
                "processes": len(traffic.parts),
                "rss_bytes": router.rss_bytes,
                "waiting_tokens": router.waiting_tokens,
                "waiting_for_prefill": router.waiting_for_prefill,
            },
            "running": router.running,
            "waiting": router.waiting,
            "totals": traffic.totals,
            "ttft": traffic.ttft(50, 95),
            "itl": traffic.itl(50, 95),
            "pools": [_pool(one) for one in status.pools],
            "decisions": [_decision(one) for one in status.decisions],
            "delayed": [_decision(one) for one in status.delayed],
            "history": {"every_s": SAMPLE_S} | self._history.columns(),
        }


def _decision(decision: ScalingDecision) -> Json:
    return asdict(decision) | {"reason": decision.reason[: recent_requests.MAX_WHY]}


def page_files() -> list[Route]:
    """Returns the routes of the page's files. They need no token."""
    folder = resources.files("router.observability") / "page"
    files = {
        one.name: one.read_bytes()
        for one in folder.iterdir()
        if one.name.rpartition(".")[2] in _TYPES
    }
    return [
        Route("/", _file("index.html", files["index.html"]), methods=["GET"]),
        *(
            Route(f"/page/{name}", _file(name, body), methods=["GET"])
            for name, body in files.items()
        ),
    ]


def _model(name: str, driver: Driver) -> Json:
    ready, sizes = driver.ready(), Counter(one.pool for one in driver.known)
    return {
        "name": name,
        "state": driver.state,
        "pools": [{"name": pool, "ready": ready[pool], "size": sizes[pool]} for pool in POOLS],
    }


def _pool(pool: PoolStatus) -> Json:
    states = [one.state for one in pool.workers]
    return {
        "name": pool.name,
        "desired": pool.desired,
        "ready": states.count("ready"),
        "size": len(states),
        "workers": [_worker(one) for one in pool.workers[:MAX_WORKERS]],
    }


def _worker(worker: WorkerStatus) -> Json:
    load = worker.load
    return {
        "id": worker.worker_id,
        "epoch": worker.epoch,
        "state": worker.state,
        "running": load.running,
        "waiting": load.waiting,
        "leases": load.leases,
        "blocks_total": load.blocks_total,
        "blocks_held": load.blocks_held,
        "blocks_cached": load.blocks_cached,
        "kv_bytes": load.kv_bytes,
        "rss_bytes": load.rss_bytes,
        "tokens_per_s": round(load.tokens_per_second, 1),
        "preemptions": load.preemptions,
        "unfit": worker.unfit[: recent_requests.MAX_WHY],
        "tiers": [
            {
                "kind": one.kind[:16],
                "blocks": one.blocks,
                "used_bytes": one.used_bytes,
                "size_bytes": one.size_bytes,
                "hits": one.hits,
                "misses": one.misses,
                "errors": one.errors,
                "error": one.error[: recent_requests.MAX_WHY],
            }
            for one in load.tiers[:MAX_TIERS]
        ],
        "integrity": "" if load.integrity_ok else load.integrity_error[: recent_requests.MAX_WHY],
    }


def _held(loads: list[WorkerLoad]) -> float | None:
    total = sum(one.blocks_total for one in loads)
    return sum(one.blocks_held for one in loads) / total if total else None


def _file(name: str, body: bytes) -> Callable[[Request], Awaitable[Response]]:
    async def give(request: Request) -> Response:
        return Response(body, headers=_HEADERS, media_type=_TYPES[name.rpartition(".")[2]])

    return give
