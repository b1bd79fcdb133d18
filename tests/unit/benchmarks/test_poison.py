"""The poison benchmark in short, on real workers and a router in this process; and that it would
tell.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from poison import STREAM_TOKENS, Found, beside, endpoints, poisoned_model, table
from rich.console import Console
from support.router_harness import MemoryRegistry, router_before
from support.worker_harness import workers

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine import runner
from kvrelay.engine.sampling.sampler import sample

POISONED, STREAMS = 60, 6


@asynccontextmanager
async def relay(model: Path, *names: str) -> AsyncIterator[tuple[str, str]]:
    """gRPC and HTTP of a router in this process, before real workers; every block is back at the
    end.
    """
    config = ClusterConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32", "max_model_len": 512},
            "kv": {"memory": "32MiB"},
            "listen": dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0"),
            "prefill": {"replicas": sum(name.startswith("prefill") for name in names)},
            "decode": {
                "replicas": sum(name.startswith("decode") for name in names),
                "max_batch": 32,
            },
        }
    )
    async with workers(model, config, *names) as running:
        registry = MemoryRegistry(
            {info.worker_id: info for info in await running.registry.workers()}
        )
        async with router_before(config, registry) as words:
            yield words["grpc"], words["http"]
            for info in await running.settled():
                assert info.load.integrity_ok, info.load.integrity_error


@pytest.mark.long
async def test_streams_do_not_notice_poisoned_requests(tmp_path: Path) -> None:
    told: list[str] = []
    async with (
        relay(poisoned_model(tmp_path), "prefill-0", "decode-0", "decode-1") as (target, url),
        endpoints(target, url) as both,
    ):
        found = await beside(both, POISONED, STREAMS, at_once=8, seed=3, tell=told.append)
    assert found.wrong == []
    assert sum(found.poison.values()) == POISONED
    assert {kind for kind, _, _ in found.poison} == {
        "NaN from a prompt token",
        "NaN from a decoded token",
        "rejected values",
        "allowed extremes",
    }
    assert set(found.streams) == {"grpc", "http"}
    assert found.stream_tokens >= STREAMS * STREAM_TOKENS
    console = Console(width=110)
    with console.capture() as shown:
        console.print(table(found))
    assert "complete and equal" in shown.get()


@pytest.mark.long
async def test_a_cluster_whose_streams_do_notice_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The safeguard is taken out: one row's error ends the step for all."""

    def together(*arguments: object) -> list[object]:
        results = sample(*arguments)  # type: ignore[arg-type]
        errors = [one for one in results if isinstance(one, Exception)]
        return [errors[0] if errors else one for one in results]

    monkeypatch.setattr(runner, "sample", together)
    async with (
        relay(poisoned_model(tmp_path), "decode-0", "decode-1") as (target, url),
        endpoints(target, url) as both,
    ):
        found: Found = await beside(both, 40, 4, at_once=8, seed=3, tell=lambda _: None)
    assert any(one.startswith("stream") for one in found.wrong)
