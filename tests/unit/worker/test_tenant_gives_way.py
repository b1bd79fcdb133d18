"""Streams of a tenant that fills a real worker's batch give way to another tenant's request, and go
on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.router_harness import DEMO, router_before
from support.tokens import Tokens, bearer
from support.worker_harness import Engine, Workers, workers

from kvrelay.client import AsyncClient
from kvrelay.client.answer import Completion
from kvrelay.clock import ManualClock
from kvrelay.config.schema import ClusterConfig

LONG = 250  # tokens of an answer
PROMPTS = tuple(
    "Once upon a time there was a brave little fox named " + name for name in ("Ruby", "Tom")
)


@dataclass
class Cluster:
    running: Workers
    grpc: str
    http: str
    tokens: dict[str, str]

    async def ask(
        self, tenant: str, prompt: str, max_tokens: int, begun: asyncio.Event | None = None
    ) -> Completion:
        """`begun` is set when a few tokens are there."""
        async with AsyncClient(self.grpc, token=self.tokens[tenant]) as client:
            stream = client.generate(
                prompt, max_tokens=max_tokens, seed=len(prompt), ignore_eos=True
            )
            async for token in stream:
                # A slow client gets several tokens at once.
                if begun is not None and token.index >= 3:
                    begun.set()
            return await stream.result()

    async def preemptions(self) -> float:
        async with httpx.AsyncClient(base_url=self.http) as http:
            text = (await http.get("/metrics", headers=bearer(self.tokens["ops"]))).text
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        (value,) = [
            one.value
            for one in samples
            if one.name == "kvrelay_num_preemptions_total" and one.labels["pool"] == "router"
        ]
        return value


@pytest.fixture
async def cluster(
    tmp_path: Path, engine: Engine, clock: ManualClock, request: pytest.FixtureRequest
) -> AsyncIterator[Cluster]:
    """`clock`: a step that the test holds does not look like one that hangs."""
    tokens = Tokens(tmp_path / "tokens.yaml")
    made = {name: tokens.add(name) for name in ("hog", "other")} | {
        "ops": tokens.add("ops", roles=["admin"])
    }
    names: tuple[str, ...] = request.param
    config = ClusterConfig.model_validate(
        {
            "model": {"path": DEMO, "dtype": "float32"},
            "kv": {"memory": "32MiB", "block_size": 16},
            "prefill": {"replicas": len(names) - 1},
            "decode": {"max_batch": len(PROMPTS)},
            "router": {"local_below_tokens": 4},
            "listen": dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0"),
            "security": {"tokens_file": str(tokens.path)},
        }
    )
    async with (
        workers(Path(DEMO), config, *names) as running,
        router_before(config, running.registry) as words,
    ):
        try:
            yield Cluster(
                running, words["grpc"], f"http://{words['http'].removeprefix('http://')}", made
            )
        finally:
            engine.free.set()


@pytest.mark.long
@pytest.mark.parametrize(
    "cluster",
    [("decode-0",), ("prefill-0", "decode-0")],
    ids=["local", "disaggregated"],
    indirect=True,
)
async def test_preempted_streams_have_the_tokens_of_undisturbed_ones(
    cluster: Cluster, engine: Engine
) -> None:
    undisturbed = [await cluster.ask("hog", prompt, LONG) for prompt in PROMPTS]

    begun = [asyncio.Event() for _ in PROMPTS]
    async with asyncio.TaskGroup() as tasks:
        hogs = [
            tasks.create_task(cluster.ask("hog", prompt, LONG, event))
            for prompt, event in zip(PROMPTS, begun, strict=True)
        ]
        async with asyncio.timeout(150):
            for event in begun:
                await event.wait()
        engine.free.clear()  # so that no stream ends by itself
        other = tasks.create_task(cluster.ask("other", "Hello", 1))
        async with asyncio.timeout(150):
            while not await cluster.preemptions():
                await asyncio.sleep(0.02)
        engine.free.set()

    assert len(other.result().token_ids) == 1
    for hog, before in zip(hogs, undisturbed, strict=True):
        assert hog.result().token_ids == before.token_ids
        assert hog.result().calls == 1
    attempts = [one.outcome for hog in hogs for one in hog.result().ledger.attempts]  # type: ignore[union-attr]
    assert attempts.count("finished") == len(hogs)
    assert any(one.startswith("preempted") for one in attempts)
    for info in await cluster.running.settled():
        assert info.load.integrity_ok, info.load.integrity_error
