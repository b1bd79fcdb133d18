"""A router of several processes at the same ports."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.fake_worker import answer
from support.router_processes import RouterCluster, cluster_file, running_by_process, start
from support.tokens import Tokens
from unit.router.test_adapter_names import adapter_in

from kvrelay.client import AsyncClient, AsyncStream, RetryPolicy
from kvrelay.client.admin import AdminClient
from kvrelay.errors import Unavailable
from kvrelay.process.child import family
from kvrelay.state.embedded_redis import EmbeddedRedis

PROCESSES = 3
PROMPT = (11, 12, 13)
SERIES = "kvrelay_request_success_total"
REQUESTS = 24
LENGTH = 150


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[RouterCluster]:
    tokens = Tokens(tmp_path / "tokens.yaml")
    made_tokens = {"acme": tokens.add("acme"), "other": tokens.add("other")}
    made_tokens["boss"] = tokens.add("boss", roles=["admin", "client"])
    async with EmbeddedRedis() as redis:
        made = RouterCluster(redis.url)
        made.tokens = made_tokens
        try:
            await made.add_worker("decode-0")
            file = cluster_file(
                tmp_path,
                redis.url,
                router={"processes": PROCESSES},
                security={"tokens_file": str(tokens.path)},
            )
            await made.add_router(file)
            yield made
        finally:
            await made.close()


def siblings(cluster: RouterCluster) -> dict[int, int]:
    """The ids of the processes that serve, by their numbers."""
    found = {}
    for pid in family(cluster.processes["router"].pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"--sibling" in words and b"router" in words:
                found[int(words[words.index(b"--sibling") + 1].rpartition(b":")[2])] = pid
    return found


async def ask(cluster: RouterCluster, tenant: str, **body: object) -> dict[str, object]:
    """One request over a connection of its own."""
    headers = {"authorization": f"Bearer {cluster.tokens[tenant]}"}
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60, headers=headers) as client:
        made = await client.post(
            "/v1/completions", json={"model": "demo", "prompt": PROMPT, "max_tokens": 5} | body
        )
        assert made.status_code == 200, made.text
        return made.json()  # type: ignore[no-any-return]


async def stream(
    cluster: RouterCluster,
    exits: AsyncExitStack,
    seed: int,
    length: int = LENGTH,
    retry: RetryPolicy | None = None,
) -> AsyncStream:
    """An answer that has begun, of a client of its own."""
    client = await exits.enter_async_context(
        AsyncClient(cluster.grpc, token=cluster.tokens["acme"], retry=retry)
    )
    begun = client.generate(token_ids=list(PROMPT), max_tokens=length, seed=seed, ignore_eos=True)
    await anext(begun)
    return begun


async def ask_health(cluster: RouterCluster) -> str:
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as client:
        return str((await client.get("/health")).json()["status"])


async def read(cluster: RouterCluster, tenant: str, path: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {cluster.tokens[tenant]}"}
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60, headers=headers) as client:
        got = await client.get(path)
        assert got.status_code == 200, got.text
        return got


async def eventually(holds: Callable[[], Awaitable[None]]) -> None:
    """Tries again for a while: a busy process may have its last answer shown. pytest.fail is not
    tried again.
    """
    deadline = asyncio.get_running_loop().time() + 60
    while True:
        try:
            return await holds()
        except AssertionError:
            if asyncio.get_running_loop().time() > deadline:
                raise
        await asyncio.sleep(0.2)


@pytest.mark.long
async def test_any_process_tells_of_all(cluster: RouterCluster) -> None:
    counts = {"acme": REQUESTS, "other": 6}
    whole = sum(counts.values())
    for tenant, number in counts.items():
        await asyncio.gather(*(ask(cluster, tenant) for _ in range(number)))

    async def operators_read_the_metrics_of_all() -> None:
        text = (await read(cluster, "boss", "/metrics")).text
        families = list(text_string_to_metric_families(text))
        assert max(Counter(one.name for one in families).values()) == 1
        done = [one for each in families for one in each.samples if one.name == SERIES]
        shares = Counter[str]()
        for one in done:
            shares[one.labels["router_process"]] += int(one.value)
        assert sum(shares.values()) == whole
        assert len(shares) == PROCESSES
        assert len([one for one in shares.values() if one]) > 1, "the kernel spreads connections"
        replicas = [
            one for each in families if each.name == "kvrelay_pool_replicas" for one in each.samples
        ]
        labels = [tuple(sorted(one.labels.items())) for one in replicas]
        assert len(labels) == len(set(labels)), "one series for a pool, whoever answers"
        assert all("router_process" not in one.labels for one in replicas)

    async def tenants_read_their_own_metrics() -> None:
        text = (await read(cluster, "acme", "/metrics")).text
        samples = [one for each in text_string_to_metric_families(text) for one in each.samples]
        if {one.labels["tenant"] for one in samples} - {"acme"}:
            pytest.fail("series of another tenant")
        ended = [one for one in samples if one.name == "kvrelay_tenant_requests_total"]
        assert sum(one.value for one in ended) == REQUESTS

    async def each_sees_the_requests_that_it_may_see() -> None:
        for tenant, seen in (*counts.items(), ("boss", whole)):
            rows = (await read(cluster, tenant, "/status.json")).json()["requests"]
            if tenant != "boss" and {one["tenant"] for one in rows} - {tenant}:
                pytest.fail("requests of another tenant")
            assert len({one["id"] for one in rows}) == len(rows) == seen
            assert [one["at"] for one in rows] == sorted((one["at"] for one in rows), reverse=True)

    async def figures_are_those_of_all() -> None:
        page = (await read(cluster, "boss", "/status.json")).json()
        assert page["totals"]["finished"] == whole
        assert page["router"]["processes"] == PROCESSES
        with AdminClient(cluster.admin, token=cluster.tokens["boss"]) as admin:
            status = await asyncio.to_thread(admin.status)
        assert status.router.finished == whole
        assert status.router.rss_bytes > PROCESSES * 50e6

    for _ in range(6):
        # Over connections to any of the processes.
        await eventually(operators_read_the_metrics_of_all)
        await eventually(tenants_read_their_own_metrics)
        await eventually(each_sees_the_requests_that_it_may_see)
        await eventually(figures_are_those_of_all)


@pytest.mark.long
async def test_limits_and_revocation_hold_for_all_processes(
    cluster: RouterCluster, tmp_path: Path
) -> None:
    limit = 8
    tokens = Tokens(tmp_path / "tokens.yaml")
    small, other = tokens.add("small", requests_per_minute=limit), tokens.add("other")
    cluster.tokens |= {"small": small, "other": other}

    async def status(tenant: str) -> int:
        headers = {"authorization": f"Bearer {cluster.tokens[tenant]}"}
        async with httpx.AsyncClient(base_url=cluster.http, timeout=60, headers=headers) as client:
            body = {"model": "demo", "prompt": PROMPT, "max_tokens": 1}
            return (await client.post("/v1/completions", json=body)).status_code

    async def everywhere(tenant: str, wanted: set[int]) -> None:
        """Waits until all processes agree, as connections to each of them see it."""
        async with asyncio.timeout(20):
            while set(await asyncio.gather(*(status(tenant) for _ in range(12)))) != wanted:
                await asyncio.sleep(0.05)

    # All have read the file.
    await everywhere("other", {200})
    await everywhere("acme", {401})
    said = Counter(await asyncio.gather(*(status("small") for _ in range(4 * limit))))
    assert said == {200: limit, 429: 3 * limit}


@pytest.mark.long
async def test_a_loaded_adapter_is_served_by_all_processes(
    cluster: RouterCluster, tmp_path: Path
) -> None:
    """Once `load` has returned, whichever process it asked. The base model serves meanwhile."""
    folder = str(adapter_in(tmp_path / "lora"))
    headers = {"authorization": f"Bearer {cluster.tokens['acme']}"}

    async def statuses(model: str) -> set[int]:
        async def status() -> int:
            async with httpx.AsyncClient(
                base_url=cluster.http, timeout=60, headers=headers
            ) as client:
                body = {"model": model, "prompt": PROMPT, "max_tokens": 1}
                return (await client.post("/v1/completions", json=body)).status_code

        return set(await asyncio.gather(*(status() for _ in range(16))))

    for number in range(4):
        # A connection of its own, to any of the processes.
        with AdminClient(cluster.admin, token=cluster.tokens["boss"]) as admin:
            await asyncio.to_thread(admin.load_adapter, f"sql-{number}", folder)
        assert await statuses(f"sql-{number}") == {200}
        with AdminClient(cluster.admin, token=cluster.tokens["boss"]) as admin:
            await asyncio.to_thread(admin.unload_adapter, f"sql-{number}")
        assert await statuses(f"sql-{number}") == {404}
        assert await statuses("demo") == {200}


async def test_streams_of_a_killed_process_go_on_at_another(cluster: RouterCluster) -> None:
    before = siblings(cluster)
    assert len(before) == PROCESSES
    async with AsyncExitStack() as exits:
        streams = [await stream(cluster, exits, number) for number in range(12)]
        running = await running_by_process(cluster.http, cluster.tokens["boss"])
        number = max(running, key=running.__getitem__)
        os.kill(before[number], signal.SIGKILL)
        answers = await asyncio.gather(*(one.result() for one in streams))
    for seed, one in enumerate(answers):
        assert list(one.token_ids) == answer(PROMPT, seed, LENGTH)
    # On a busy machine, some may have ended before.
    assert 0 < sum(one.calls > 1 for one in answers) <= running[number]
    assert max(running.values()) < len(answers), "each client has a connection of its own"
    async with asyncio.timeout(60):
        while len(now := siblings(cluster)) < PROCESSES or now[number] == before[number]:
            await asyncio.sleep(0.02)


@pytest.mark.long
async def test_the_first_signal_lets_streams_end(
    cluster: RouterCluster,
) -> None:
    router = cluster.processes["router"]
    async with AsyncExitStack() as exits:
        streams = [await stream(cluster, exits, number) for number in range(6)]
        router.send_signal(signal.SIGTERM)
        answers = await asyncio.gather(*(one.result() for one in streams))
    for seed, one in enumerate(answers):
        assert list(one.token_ids) == answer(PROMPT, seed, LENGTH)
    assert await asyncio.wait_for(router.wait(), 60) == 0
    assert siblings(cluster) == {}


@pytest.mark.long
async def test_the_second_signal_ends_all_at_once(cluster: RouterCluster) -> None:
    router = cluster.processes["router"]
    async with AsyncExitStack() as exits:
        once = RetryPolicy(max_attempts=1)
        streams = [await stream(cluster, exits, number, 2000, once) for number in range(6)]
        router.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            # Each process refuses new calls while it drains.
            while (await ask_health(cluster)) != "draining":
                await asyncio.sleep(0.02)
        router.send_signal(signal.SIGTERM)
        ends = await asyncio.gather(*(one.result() for one in streams), return_exceptions=True)
    assert {type(one) for one in ends} == {Unavailable}
    assert await asyncio.wait_for(router.wait(), 20) == 0
    assert siblings(cluster) == {}


@pytest.mark.parametrize("endpoint", ["grpc", "http", "admin"])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.sweep(3)
async def test_a_port_that_another_program_has(
    tmp_path: Path, endpoint: str, is_shared: bool
) -> None:
    """Even one that would share it."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        listen = dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0") | {endpoint: address}
        file = cluster_file(
            tmp_path, "redis://127.0.0.1:1/0", router={"processes": 2}, listen=listen
        )
        router = await start(
            "-m",
            "kvrelay.cli.main",
            "router",
            "-c",
            str(file),
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await asyncio.wait_for(router.communicate(), 120)
    assert router.returncode == 2
    (line,) = said.decode().splitlines()
    assert f"listen.{endpoint}: cannot listen on {address}" in line
