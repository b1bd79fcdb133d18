"""The status page's files and its snapshot, from a real router over HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import httpx
import pytest
from support.router_harness import RouterHarness, running_router

import router.observability.dashboard
from kvrelay.types.control_plane import ScalingDecision
from router.runtime.driver import RECENT

LONG = list(range(10, 50))
SHORT = [11, 12, 13]
FILES = {
    one.name: one.read_text()
    for one in (resources.files("router.observability") / "page").iterdir()
}


@pytest.fixture
async def cluster() -> AsyncIterator[RouterHarness]:
    async with running_router(prefill=2, decode=2) as running:
        yield running


@pytest.fixture
async def http(cluster: RouterHarness) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def always_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot for each that asks."""
    monkeypatch.setattr(router.observability.dashboard, "SNAPSHOT_S", 0.0)


async def ask(http: httpx.AsyncClient, prompt: object = LONG, **more: Any) -> httpx.Response:
    return await http.post(
        "/v1/completions", json={"model": "demo", "prompt": prompt, "max_tokens": 8} | more
    )


async def status(http: httpx.AsyncClient) -> dict[str, Any]:
    response = await http.get("/status.json")
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


async def test_files_and_their_policy(http: httpx.AsyncClient) -> None:
    kinds = {
        "html": "text/html",
        "css": "text/css",
        "js": "text/javascript",
        "svg": "image/svg+xml",
    }
    assert (await http.get("/")).text == FILES["index.html"]
    for name, text in FILES.items():
        response = await http.get(f"/page/{name}")
        assert response.text == text
        assert response.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    for missing in ("/page/", "/page/nothing.js", "/page/..%2fmain.py", "/page/page.py"):
        assert (await http.get(missing)).status_code == 404
    assert (await http.post("/")).status_code == 405


@pytest.mark.parametrize("name", sorted(FILES))
def test_nothing_in_the_files_can_be_made_to_run_data_or_asks_another_server(name: str) -> None:
    text = FILES[name]
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "@import",
    ):
        assert word not in text
    assert set(re.findall(r"https?://[^\"'\s]+", text)) <= {"http://www.w3.org/2000/svg"}
    if name.endswith(".html"):
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)


async def test_a_request_is_a_row_of_sizes_and_times_only(http: httpx.AsyncClient) -> None:
    prompt = "Once upon a time there was a very secret word, and it was xylophone"
    text = (await ask(http, prompt)).json()["choices"][0]["text"]
    found = await status(http)
    (row,) = found["requests"]
    assert (row["state"], row["live"], row["path"], row["tokens"], row["max_tokens"]) == (
        "length", False, "disaggregated", 8, 8,
    )  # fmt: skip
    assert row["prefill"].startswith("prefill-")
    assert row["decode"].startswith("decode-")
    assert row["why"].endswith("is free first, 0 tokens queued")
    names = [name for name, _ in row["phases"]]
    assert names[:3] == ["tokenize", "queue", "reserve"]
    assert names[-1] == "decode"
    assert sum(ms for _, ms in row["phases"]) == pytest.approx(
        row["ledger"]["e2e_seconds"] * 1000, rel=0.5
    )
    assert row["handoff_at"][0] < row["handoff_at"][1]
    assert (row["ledger"]["handoff"]["transport"], row["ledger"]["attempts"][0]["outcome"]) == (
        "fake",
        "finished",
    )
    said = (await http.get("/status.json")).text
    assert "xylophone" not in said
    assert text not in said


async def test_figures_pools_and_decisions(cluster: RouterHarness, http: httpx.AsyncClient) -> None:
    cluster.registry.history = (ScalingDecision(12.0, "decode", 1, 2, "queue_depth is 8"),)
    cluster.registry.delays = (ScalingDecision(13.0, "decode", 2, 1, "not yet"),)
    cluster.registry.sizes = {"decode": 3}
    await ask(http)
    found = await status(http)
    assert (found["overview"], found["worker_prefix"]) == ([], "")
    assert (found["model"], found["max_model_len"], found["chat"]) == ("demo", 4096, True)
    assert (found["state"], found["registry"], found["running"], found["waiting"]) == (
        "ready",
        "ok",
        0,
        0,
    )
    assert found["totals"] == {
        "finished": 1, "failed": 0, "prompt_tokens": 40, "cached_tokens": 0,
        "generated_tokens": 8, "handoff_bytes": 64,
    }  # fmt: skip
    assert all(0 < one < 20 for one in found["ttft"] + found["itl"])
    assert [(one["name"], one["desired"], one["ready"], one["size"]) for one in found["pools"]] == [
        ("prefill", 2, 2, 2),
        ("decode", 3, 2, 2),
    ]
    assert [(one["id"], one["epoch"], one["state"]) for one in found["pools"][1]["workers"]] == [
        ("decode-0", 1, "ready"),
        ("decode-1", 1, "ready"),
    ]
    assert found["decisions"] == [
        {"unix_time": 12.0, "pool": "decode", "before": 1, "after": 2, "reason": "queue_depth is 8"}
    ]
    assert [(one["before"], one["reason"]) for one in found["delayed"]] == [(2, "not yet")]
    lengths = {len(series) for name, series in found["history"].items() if name != "every_s"}
    # All series grow together, by one each time that the clock of a slow machine passes every_s.
    assert len(lengths) == 1
    assert lengths != {0}


async def test_what_is_under_way_is_seen(cluster: RouterHarness, http: httpx.AsyncClient) -> None:
    for name in ("decode-0", "decode-1"):
        cluster.workers[name].may_step.clear()
    flying = asyncio.create_task(ask(http, SHORT))
    async with asyncio.timeout(60):
        while not (await status(http))["requests"]:
            await asyncio.sleep(0.01)
    (row,) = (await status(http))["requests"]
    assert (row["state"], row["live"], row["tokens"]) == ("prefilling", True, 0)
    assert row["phases"][-1][0] == "prefill"
    for name in ("decode-0", "decode-1"):
        cluster.workers[name].may_step.set()
    assert (await flying).status_code == 200
    (row,) = (await status(http))["requests"]
    assert (row["state"], row["live"]) == ("length", False)


async def test_the_snapshot_is_bounded(cluster: RouterHarness, http: httpx.AsyncClient) -> None:
    await asyncio.gather(*(ask(http, SHORT) for _ in range(RECENT + 20)))
    for number in range(2, 100):
        cluster.registry.entries[f"decode-{number}"] = cluster.workers["decode-0"].worker.info
    async with asyncio.timeout(60):
        while (found := await status(http))["pools"][1]["size"] < 100:
            await asyncio.sleep(0.05)
    assert len(found["pools"][1]["workers"]) == router.observability.dashboard.MAX_WORKERS
    rows = found["requests"]
    assert len(rows) == RECENT
    assert [row["at"] for row in rows] == sorted((row["at"] for row in rows), reverse=True)


async def test_one_snapshot_serves_all_viewers_and_they_are_not_too_many(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.observability.dashboard, "SNAPSHOT_S", 1e9)
    monkeypatch.setattr(router.observability.dashboard, "MAX_VIEWERS", 5)
    answers = await asyncio.gather(*(http.get("/status.json") for _ in range(8)))
    assert sorted(one.status_code for one in answers) == [200] * 5 + [429] * 3
    assert len({one.content for one in answers if one.status_code == 200}) == 1
    refused = next(one for one in answers if one.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert (
        refused.json()["error"]["message"]
        == "this tenant has the most status pages open that are allowed, 5; close one"
    )
    assert (await ask(http)).status_code == 200


async def test_a_registry_that_is_away_and_a_router_that_drains_are_told(
    cluster: RouterHarness, http: httpx.AsyncClient
) -> None:
    cluster.registry.away = True
    found = await status(http)
    assert (found["registry"], found["pools"][0]["size"]) == ("Redis at memory: away", 2)
    cluster.workers["decode-0"].may_step.clear()
    cluster.workers["decode-1"].may_step.clear()
    flying = asyncio.create_task(ask(http, SHORT))
    async with asyncio.timeout(60):
        while not (await status(http))["requests"]:
            await asyncio.sleep(0.01)
        cluster.stop()
        while (await status(http))["state"] != "draining":
            await asyncio.sleep(0.01)
    cluster.workers["decode-0"].may_step.set()
    cluster.workers["decode-1"].may_step.set()
    assert (await flying).status_code == 200
