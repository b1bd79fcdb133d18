"""Real processes: a router, a Redis, and fake workers that are frozen and killed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.fake_worker import answer
from support.router_harness import inference_stub
from support.router_processes import RouterCluster, cluster_file

from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.wire.inference import (
    GenerateRequest,
    GenerateResponse,
    SamplingOptions,
    request_to_proto,
    response_from_proto,
)

PROMPT = (11, 12, 13)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[RouterCluster]:
    """A router over one decode worker."""
    async with EmbeddedRedis() as redis:
        made = RouterCluster(redis.url)
        try:
            await made.add_worker("decode-0")
            await made.add_router(cluster_file(tmp_path, redis.url))
            yield made
        finally:
            await made.close()


@pytest.mark.long
async def test_frozen_worker_is_left_and_when_it_thaws_nothing_comes_twice(
    cluster: RouterCluster,
) -> None:
    request = GenerateRequest(token_ids=PROMPT, sampling=SamplingOptions(max_tokens=150, seed=7))
    responses: list[GenerateResponse] = []
    async with inference_stub(cluster.grpc) as stub:
        async for message in stub.Generate(request_to_proto(request), timeout=60):
            responses.append(response_from_proto(message))
            if len(responses) == 5:
                cluster.processes["decode-0"].send_signal(signal.SIGSTOP)
                await cluster.add_worker("decode-1")
            if len(responses) == 50:
                cluster.processes["decode-0"].send_signal(signal.SIGCONT)
    tokens: list[int] = []
    for one in responses:
        assert one.index == len(tokens)
        tokens += one.token_ids
    assert tokens == answer(PROMPT, 7, 150)
    ledger = responses[-1].ledger
    assert ledger is not None
    assert [(one.decode_worker, one.outcome) for one in ledger.attempts] == [
        ("decode-0", "decode-0 was lost"),
        ("decode-1", "finished"),
    ]


async def test_killed_worker_is_left_at_once_and_sigterm_ends_the_router_with_code_zero(
    cluster: RouterCluster,
) -> None:
    await cluster.add_worker("decode-1")
    router = cluster.processes["router"]
    request = GenerateRequest(token_ids=PROMPT, sampling=SamplingOptions(max_tokens=100, seed=7))
    tokens: list[int] = []
    async with inference_stub(cluster.grpc) as stub:
        async for message in stub.Generate(request_to_proto(request), timeout=60):
            tokens += message.token_ids
            if len(tokens) == 5:
                cluster.processes["decode-0"].kill()
            if len(tokens) == 50:
                router.send_signal(signal.SIGTERM)
    assert tokens == answer(PROMPT, 7, 100)
    assert await asyncio.wait_for(router.wait(), 60) == 0


FILES = 256
FEW_FILES = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))
from kvrelay.cli.main import main
main()
"""


def is_open(connection: socket.socket) -> bool:
    """Whether the router has not ended the connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


@pytest.mark.long
@pytest.mark.parametrize("listener", ["grpc", "http"])
async def test_idle_connections_leave_files_to_the_router(tmp_path: Path, listener: str) -> None:
    connections = contextlib.ExitStack()
    async with EmbeddedRedis() as redis:
        cluster = RouterCluster(redis.url, program=("-c", FEW_FILES))
        try:
            await cluster.add_worker("decode-0")
            await cluster.add_router(cluster_file(tmp_path, redis.url))
            host, port = getattr(cluster, listener).removeprefix("http://").split(":")
            held = [
                connections.enter_context(socket.create_connection((host, int(port))))
                for _ in range(300)
            ]
            router = cluster.processes["router"]
            # Longer than some heartbeats.
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(router.wait(), 3)
            assert listener == "grpc" or sum(map(is_open, held)) <= FILES // 2
            connections.close()
            request = GenerateRequest(token_ids=PROMPT, sampling=SamplingOptions(max_tokens=5))
            async with inference_stub(cluster.grpc) as stub:
                call = stub.Generate(request_to_proto(request), timeout=60, wait_for_ready=True)
                assert sum([len(one.token_ids) async for one in call]) == 5
        finally:
            connections.close()
            await cluster.close()


STUCK = """
import asyncio, threading
from router.frontend.tokenization import Text

close = Text.close

async def close_with_threads_that_never_end(self):
    for _ in range(2):
        asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
        self._threads._threads.submit(threading.Event().wait)
    await close(self)

Text.close = close_with_threads_that_never_end
from kvrelay.cli.main import main
main()
"""


HANGING = (
    "import router.main\nrouter.main.DRAIN_GRACE_S, router.main.END_S = 1.0, 1.0\n"
    + STUCK.replace("await close(self)", "await asyncio.Event().wait()")
)


async def exit_code_after_sigterm(program: str, folder: Path) -> int:
    """Of a router that this program starts, beside one worker."""
    async with EmbeddedRedis() as redis:
        cluster = RouterCluster(redis.url)
        path = folder / "program.py"
        path.write_text(program)
        cluster.program = (str(path),)
        try:
            await cluster.add_worker("decode-0")
            await cluster.add_router(cluster_file(folder, redis.url))
            router = cluster.processes["router"]
            router.send_signal(signal.SIGTERM)
            return await asyncio.wait_for(router.wait(), 60)
        finally:
            await cluster.close()


@pytest.mark.long
async def test_threads_that_never_end_do_not_keep_the_process(tmp_path: Path) -> None:
    """As one that tokenizes or parses what a client sent: Python waits for its threads, without a
    bound.
    """
    assert await exit_code_after_sigterm(STUCK, tmp_path) == 0


@pytest.mark.long
async def test_a_router_whose_end_hangs_is_ended(tmp_path: Path) -> None:
    assert await exit_code_after_sigterm(HANGING, tmp_path) == 1
