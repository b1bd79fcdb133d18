"""What a tenant is told of the others: nothing, by any route, while they come, run and go."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.router_harness import RouterHarness, running_router
from support.tokens import Tokens, bearer

import kvrelay
import router.observability.dashboard
import router.observability.exposition
from router.core.path_policy import Assignment

LONG = list(range(10, 50))
OTHER = list(range(60, 100))
PATHS = ("/status.json", "/metrics", "/version", "/openapi.json", "/health")


@dataclass
class Neighbours:
    router: RouterHarness
    http: httpx.AsyncClient
    spy: str
    victim: str
    monitor: str
    admin: str


@pytest.fixture
async def neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Neighbours]:
    monkeypatch.setattr(router.observability.dashboard, "SNAPSHOT_S", 0.0)
    monkeypatch.setattr(router.observability.exposition, "SPACING", 0.0)
    tokens = Tokens(tmp_path / "tokens.yaml")
    names = {name: tokens.add(name) for name in ("spy", "victim")}
    names |= {role: tokens.add(role, roles=[role]) for role in ("monitor", "admin")}
    async with (
        running_router(tokens_file=tokens.path) as running,
        httpx.AsyncClient(base_url=running.http, timeout=60) as http,
    ):
        yield Neighbours(running, http, **names)


async def complete(
    neighbours: Neighbours, token: str, max_tokens: int = 8, prompt: list[int] = LONG
) -> dict[str, Any]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    answer = await neighbours.http.post("/v1/completions", json=body, headers=bearer(token))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def readable(
    neighbours: Neighbours, token: str, paths: tuple[str, ...] = PATHS
) -> dict[str, str]:
    """All that the routes without a body tell this token, without what only time changes."""
    found = {}
    for path in paths:
        answer = await neighbours.http.get(path, headers=bearer(token))
        assert answer.status_code == 200, path
        found[path] = re.sub(r'"now":[0-9.]+', '"now":0', answer.text)
    return found


async def test_what_a_tenant_reads_does_not_depend_on_the_others(neighbours: Neighbours) -> None:
    before = await readable(neighbours, neighbours.spy, (*PATHS, "/v1/models"))
    for name in ("prefill-0", "decode-0"):
        neighbours.router.workers[name].may_step.clear()
    flying = [asyncio.create_task(complete(neighbours, neighbours.victim, n)) for n in (3, 77)]
    async with asyncio.timeout(60):
        while len(neighbours.router.workers["decode-0"].worker.sequences) < 2:
            await asyncio.sleep(0.01)
    assert await readable(neighbours, neighbours.spy, (*PATHS, "/v1/models")) == before
    for name in ("prefill-0", "decode-0"):
        neighbours.router.workers[name].may_step.set()
    await asyncio.gather(*flying)
    assert await readable(neighbours, neighbours.spy, (*PATHS, "/v1/models")) == before
    for token in (neighbours.monitor, neighbours.admin):
        seen = await readable(neighbours, token)
        assert '"generated_tokens":80' in seen["/status.json"]
        assert 'kvrelay_generation_tokens_total{model_name="demo"} 80.0' in seen["/metrics"]
        assert 'tenant="victim"' in seen["/metrics"]


async def test_why_and_ledger_have_no_figures_of_others(neighbours: Neighbours) -> None:
    alone = (await complete(neighbours, neighbours.spy))["kvrelay"]
    neighbours.router.workers["prefill-0"].may_step.clear()
    flying = [
        asyncio.create_task(complete(neighbours, neighbours.victim, prompt=OTHER)),
        asyncio.create_task(complete(neighbours, neighbours.spy, prompt=OTHER)),
    ]
    async with asyncio.timeout(60):
        while len(neighbours.router.workers["prefill-0"].worker.prompts) < 2:
            await asyncio.sleep(0.01)
    neighbours.router.workers["prefill-0"].may_step.set()
    beside = (await asyncio.gather(*flying))[1]["kvrelay"]
    assert (
        beside["why"]
        == alone["why"]
        == "40 uncached prompt tokens are at least local_below_tokens=8; prefill-0 is free first"
    )
    told = [one["ledger"]["attempts"][0]["why"] for one in (alone, beside)]
    assert told == [alone["why"]] * 2


async def test_each_tenant_is_told_of_its_own_use(neighbours: Neighbours) -> None:
    await complete(neighbours, neighbours.victim)
    text = (await neighbours.http.get("/metrics", headers=bearer(neighbours.victim))).text
    assert (
        'kvrelay_tenant_tokens_total{kind="generation",model_name="demo",tenant="victim"} 8.0'
        in text
    )
    assert not [
        line
        for line in text.splitlines()
        if not line.startswith("#") and 'tenant="victim"' not in line
    ]
    (row,) = (await neighbours.http.get("/status.json", headers=bearer(neighbours.victim))).json()[
        "requests"
    ]
    assert (row["tenant"], row["tokens"]) == ("victim", 8)


async def test_a_monitor_reads_and_does_nothing_else(neighbours: Neighbours) -> None:
    body = {"model": "demo", "prompt": LONG}
    answer = await neighbours.http.post(
        "/v1/completions", json=body, headers=bearer(neighbours.monitor)
    )
    assert answer.status_code == 403
    async with kvrelay.AsyncClient(neighbours.router.grpc, token=neighbours.monitor) as client:
        with pytest.raises(kvrelay.PermissionDenied):
            await client.generate("p").result()


def test_the_reason_with_its_load_is_for_operators() -> None:
    placed = Assignment(
        "disaggregated",
        "d",
        "p",
        "least_loaded",
        "p is free first",
        3,
        load="900 tokens queued",
    )
    assert placed.why_for(kvrelay.tenants.ANONYMOUS) == "p is free first, 900 tokens queued"
    assert placed.why_for(kvrelay.tenants.Tenant("acme")) == "p is free first"
