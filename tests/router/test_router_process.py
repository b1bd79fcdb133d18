"""Real processes: a router, a Redis, and fake workers that are frozen and killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import fake_worker
import pytest
from fake_worker import answer
from kvrelay.embedded_redis import EmbeddedRedis
from kvrelay.wire.inference import (
    GenerateRequest,
    GenerateResponse,
    SamplingOptions,
    request_to_proto,
    response_from_proto,
)
from router_harness import inference_stub

PROMPT = (11, 12, 13)
Process = asyncio.subprocess.Process


@dataclass
class Processes:
    router: Process
    workers: dict[str, Process]
    grpc: str


async def start(*words: str, **streams: int) -> Process:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return await asyncio.create_subprocess_exec(sys.executable, *words, env=env, **streams)


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    """A router over two decode workers."""
    async with EmbeddedRedis() as redis:
        config = {
            "redis": {"url": redis.url},
            "prefill": {"replicas": 0},
            "decode": {"replicas": 2},
            "listen": {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "admin": "127.0.0.1:0"},
        }
        file = tmp_path / "cluster.yaml"
        file.write_text(json.dumps(config))
        started: list[Process] = []
        try:
            workers = {}
            for name in ("decode-0", "decode-1"):
                workers[name] = await start(fake_worker.__file__, name, "decode", redis.url)
                started.append(workers[name])
            router = await start("-m", "kvrelay.cli.main", "router", "-c", str(file), stdout=asyncio.subprocess.PIPE)
            started.append(router)
            assert router.stdout is not None
            line = (await asyncio.wait_for(router.stdout.readline(), 30)).decode()
            words = dict(word.split("=", 1) for word in line.split()[2:])
            assert line.startswith("kvrelay ready grpc=")
            yield Processes(router, workers, words["grpc"])
        finally:
            for one in started:
                if one.returncode is None:
                    one.kill()
                await one.wait()


async def test_frozen_worker_is_left_and_when_it_thaws_nothing_comes_twice(processes: Processes) -> None:
    request = GenerateRequest(token_ids=PROMPT, sampling=SamplingOptions(max_tokens=300, seed=7))
    async with inference_stub(processes.grpc) as stub:
        call = stub.Generate(request_to_proto(request))
        responses: list[GenerateResponse] = []
        frozen = ""
        async for message in call:
            responses.append(response_from_proto(message))
            if len(responses) == 5:
                frozen = await serving(processes)
                processes.workers[frozen].send_signal(signal.SIGSTOP)
            if len(responses) == 50:
                processes.workers[frozen].send_signal(signal.SIGCONT)
    tokens = [one for response in responses for one in response.token_ids]
    assert tokens == answer(PROMPT, 7, 300)
    ledger = responses[-1].ledger
    assert ledger is not None
    assert [one.outcome for one in ledger.attempts] == [f"{frozen} was lost", "finished"]


async def serving(processes: Processes) -> str:
    """The worker that has the request: first come, first assigned, so it is the first one found."""
    raise NotImplementedError(processes)


async def test_sigterm_ends_it_with_exit_code_zero(processes: Processes) -> None:
    processes.router.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(processes.router.wait(), 20) == 0
