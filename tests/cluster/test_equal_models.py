"""Two models of one cluster with the same weights, and so with the same version: what is limited,
loaded, unloaded or put to sleep by one name does not touch the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.adapters import save_adapter
from support.cluster_status import first_status
from support.router_harness import DEMO
from support.running_cluster import ANY_PORT
from support.thinking_model import END, thinking_model
from support.tokens import Tokens, bearer

from kvrelay.client import AsyncClient
from kvrelay.client.admin import AdminClient
from kvrelay.client.aio import AsyncStream
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import FailedPrecondition, InvalidArgument
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.wire.cluster import ClusterStatus, WorkerStatus

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

LONG, SHORT = "long", "short"
TENANTS: dict[str, dict[str, Any]] = {
    "free": {},
    # The next one comes a minute later.
    "few": {"requests_per_minute": 1},
    "narrow": {"max_running": 1},
    "brief": {"max_reasoning_tokens": 2},
    "operator": {"roles": ["admin"]},
}
POLICY = """\
interval_s: 0.2
decode:
  min_replicas: 0
  metrics: [{name: queue_depth, target: 4}]
  downscale_delay_s: 5
"""
PROMPT = [2 + (7 * i) % 90 for i in range(60)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
QUESTION = [{"role": "user", "content": "Is there rain?"}]
# The context of the second model, which the first one's is far above.
CONTEXT = 256


@dataclass
class Cluster:
    local: LocalCluster
    tokens: dict[str, str]
    http: httpx.AsyncClient
    clients: dict[str, AsyncClient]

    async def post(self, path: str, body: dict[str, Any], tenant: str = "free") -> httpx.Response:
        return await self.http.post(path, json=body, headers=bearer(self.tokens[tenant]))

    async def ask(self, model: str, tenant: str = "free", **more: Any) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "return_token_ids": True}
        return await self.post("/v1/completions", body | GREEDY | more, tenant)

    async def answer(self, model: str, tenant: str = "free", **more: Any) -> list[int]:
        response = await self.ask(model, tenant, **more)
        assert response.status_code == 200, response.text
        found: list[int] = response.json()["choices"][0]["token_ids"]
        return found

    def stream(self, model: str, count: int, tenant: str = "free") -> AsyncStream:
        client = self.clients[tenant]
        return client.generate(
            token_ids=PROMPT, model=model, max_tokens=count, temperature=0.0, ignore_eos=True
        )

    def admin(self, model: str = "") -> AdminClient:
        address, token = self.local.endpoints.admin, self.tokens["operator"]
        return AdminClient(address, token=token, model=model)

    async def status(self, model: str) -> ClusterStatus:
        with self.admin(model) as admin:
            return await asyncio.to_thread(admin.status)

    async def decoders(self, model: str) -> tuple[WorkerStatus, ...]:
        return (await self.status(model)).pools[1].workers

    async def load(self, model: str, name: str, folder: Path) -> None:
        with self.admin(model) as admin:
            await asyncio.to_thread(admin.load_adapter, name, str(folder))

    async def unload(self, name: str) -> None:
        with self.admin() as admin:
            await asyncio.to_thread(admin.unload_adapter, name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("equal")
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    tokens = Tokens(folder / "tokens.json")
    secrets = {name: tokens.add(name, **entry) for name, entry in TENANTS.items()}
    model = {"path": thinking_model(folder), "dtype": "float32"}
    shared = {"prefill": {"replicas": 0}, "decode": {"replicas": 1, "chunk_tokens": 64}}
    config = ClusterConfig.model_validate(
        {
            "listen": ANY_PORT,
            "security": {"tokens_file": str(tokens.path)},
            "kv": {"memory": "32MiB", "block_size": 16},
            "slo": None,
            "models": {
                LONG: {
                    "model": model,
                    "autoscaling": str(policy),
                    **shared,
                },
                SHORT: {
                    "model": model | {"max_model_len": CONTEXT},
                    "adapters": {"max_loaded": 1, "max_rank": 4},
                    **shared,
                },
            },
        }
    )
    async with LocalCluster(config, quiet=True) as local:
        clients = {
            name: AsyncClient(local.endpoints.grpc, token=token) for name, token in secrets.items()
        }
        async with httpx.AsyncClient(base_url=local.endpoints.http, timeout=120) as http:
            yield Cluster(local, secrets, http, clients)
        for client in clients.values():
            await client.close()


@pytest.mark.long
async def test_the_models_are_one_version(cluster: Cluster) -> None:
    long, short = await cluster.ask(LONG), await cluster.ask(SHORT)
    assert long.json()["system_fingerprint"] == short.json()["system_fingerprint"]
    assert [one.json()["model"] for one in (long, short)] == [LONG, SHORT]


async def test_each_has_its_own_context(cluster: Cluster) -> None:
    longer = PROMPT * 5
    refused = await cluster.ask(SHORT, prompt=longer)
    assert refused.status_code == 400
    assert f"context of the model is {CONTEXT}" in refused.json()["error"]["message"]
    assert len(await cluster.answer(LONG, prompt=longer)) == 8


async def test_requests_per_minute_hold_for_all_models_of_a_tenant(cluster: Cluster) -> None:
    assert (await cluster.ask(LONG, "few")).status_code == 200
    for model in (LONG, SHORT):
        assert (await cluster.ask(model, "few")).status_code == 429
        assert (await cluster.ask(model)).status_code == 200


async def test_running_requests_of_one_model_do_not_count_in_the_other(cluster: Cluster) -> None:
    async with cluster.stream(LONG, 3000, "narrow") as running:
        await anext(running)
        waits = asyncio.create_task(cluster.answer(LONG, "narrow"))

        async def status() -> ClusterStatus:
            return await cluster.status(LONG)

        await first_status(status, lambda one: one.router.waiting == 1, "one waits", 60)
        assert await cluster.answer(SHORT, "narrow") == await cluster.answer(SHORT)
        assert not waits.done()
    assert await waits == await cluster.answer(LONG)


async def test_thinking_is_limited_for_each_tenant_in_both(cluster: Cluster) -> None:
    body = {
        "messages": QUESTION,
        "max_tokens": 16,
        "return_token_ids": True,
        "chat_template_kwargs": {"enable_thinking": True},
        "ignore_eos": True,
        "seed": 3,
    }

    async def tokens(model: str, tenant: str, **more: Any) -> tuple[int, ...]:
        response = await cluster.post(
            "/v1/chat/completions", body | {"model": model} | more, tenant
        )
        assert response.status_code == 200, response.text
        return tuple(response.json()["choices"][0]["token_ids"])

    # All at once, so that the limits of one batch meet.
    asked = [(model, tenant) for model in (LONG, SHORT) for tenant in ("free", "brief")]
    given = await asyncio.gather(*(tokens(*one) for one in asked))
    found = dict(zip(asked, given, strict=True))
    for tenant in ("free", "brief"):
        assert found[LONG, tenant] == found[SHORT, tenant]
    free, brief = found[LONG, "free"], found[LONG, "brief"]
    assert free[:2] == brief[:2]
    assert free[2] != END == brief[2], "the end follows the second token of thinking"
    # A smaller budget counts, and a larger one does not go beyond the tenant's.
    for budget, length in ((0, 0), (1, 1), (9, 2)):
        limited = [
            await tokens(one, "brief", thinking_token_budget=budget) for one in (LONG, SHORT)
        ]
        assert [one.index(END) for one in limited] == [length, length]


@pytest.mark.long
async def test_adapters_of_one_do_not_touch_the_other(cluster: Cluster, tmp_path: Path) -> None:
    base = Path(DEMO)
    small, other = (save_adapter(tmp_path / f"{i}", base, seed=i) for i in (1, 2))
    wide = save_adapter(tmp_path / "wide", base, seed=3, rank=8)
    with pytest.raises(InvalidArgument, match="the rank is 8; allowed is"):
        await cluster.load(SHORT, "wide", wide)
    await cluster.load(LONG, "wide", wide)
    await cluster.load(SHORT, "small", small)
    with pytest.raises(FailedPrecondition, match="max_loaded"):
        await cluster.load(SHORT, "other", other)
    with pytest.raises(FailedPrecondition, match="name of another model"):
        await cluster.load(LONG, "small", small)
    await cluster.load(LONG, "small-long", small)
    await cluster.load(LONG, "other", other)
    changed = await cluster.answer("small-long", max_tokens=120)
    assert changed == await cluster.answer("small", max_tokens=120)
    assert changed[:8] != await cluster.answer(LONG)

    # One model unloads the files that an answer of the other runs with.
    async with cluster.stream("small-long", 120) as running:
        await anext(running)
        await cluster.unload("small")
        assert (await cluster.ask("small")).status_code == 404
        assert list((await running.result()).token_ids) == changed
    assert await cluster.answer("small-long", max_tokens=120) == changed
    # Its place is free now, in the one model only.
    await cluster.load(SHORT, "again", other)
    assert await cluster.answer("again") == await cluster.answer("other")
    with cluster.admin() as admin:
        listed = {(one.name, one.model) for one in await asyncio.to_thread(admin.adapters)}
    assert listed == {
        ("again", SHORT),
        *((name, LONG) for name in ("wide", "small-long", "other")),
    }
    for name in ("again", "wide", "small-long", "other"):
        await cluster.unload(name)


@pytest.mark.long
async def test_one_sleeps_and_the_other_does_not(cluster: Cluster, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "lora", Path(DEMO), seed=4)
    await cluster.load(LONG, "lora-long", folder)
    await cluster.load(SHORT, "lora-short", folder)
    names = (LONG, SHORT, "lora-long", "lora-short")
    before = {name: await cluster.answer(name) for name in names}
    awake = await cluster.decoders(SHORT)

    async def status() -> ClusterStatus:
        return await cluster.status(LONG)

    async def stays() -> None:
        """Requests to the other model keep it busy meanwhile."""
        while True:
            assert await cluster.answer(SHORT) == before[SHORT]

    busy = asyncio.create_task(stays())
    await first_status(status, lambda one: not one.pools[1].workers, "the one sleeps", 60)
    busy.cancel()
    with pytest.raises(asyncio.CancelledError):
        await busy
    again = await cluster.ask("lora-short")
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again.json()["choices"][0]["token_ids"] == before["lora-short"]
    with cluster.admin() as admin:
        listed = {one.name: one for one in await asyncio.to_thread(admin.adapters)}
    assert [(listed[name].workers, listed[name].served) for name in sorted(listed)] == [
        (0, True),
        (1, True),
    ]
    # The adapter that was loaded before is there when the model wakes.
    assert {name: await cluster.answer(name) for name in names} == before
    (same,) = await cluster.decoders(SHORT)
    assert (same.pid, same.epoch) == (awake[0].pid, awake[0].epoch)
