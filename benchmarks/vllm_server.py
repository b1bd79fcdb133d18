"""Starts `vllm serve` on given cores."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kvrelay.bench.engine_process import vllm_preload
from kvrelay.errors import DeadlineExceeded, KvRelayError, Unavailable
from kvrelay.loadtest.senders.http_sender import HttpSender
from kvrelay.process.child import bound_to_parent

# Long, because vLLM compiles the model first.
_READY_WITHIN_S = 900.0
_POLL_S = 0.5
_END_WITHIN_S = 30.0


@asynccontextmanager
async def vllm_server(
    python: Path, model: str, cores: Sequence[int], log: Path, *arguments: str, **environment: str
) -> AsyncIterator[str]:
    """Starts a server with one thread on each core and its output in `log`. Yields its URL once it
    is ready.

    Raises Unavailable if the server ends, and DeadlineExceeded if it does not become ready.
    """
    port = _free_port()
    listed = ",".join(map(str, cores))
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": listed,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "LD_PRELOAD": vllm_preload(str(python)),
    }
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *bound_to_parent(
                "/usr/bin/env",
                *(f"{name}={value}" for name, value in (settings | environment).items()),
                *(
                    "taskset",
                    "--cpu-list",
                    listed,
                    str(python),
                    "-m",
                    "vllm.entrypoints.cli.main",
                    "serve",
                    model,
                ),
                *(
                    "--host",
                    "127.0.0.1",
                    "--port",
                    str(port),
                    "--dtype",
                    "bfloat16",
                    "--no-enable-prefix-caching",
                ),
                *arguments,
            ),
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        await _ready(url, process, log)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _END_WITHIN_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _ready(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    until = time.monotonic() + _READY_WITHIN_S
    async with HttpSender(url, timeout=10) as sender:
        while process.returncode is None:
            try:
                await sender.models()
                return
            except KvRelayError as error:
                if time.monotonic() > until:
                    raise DeadlineExceeded(
                        f"vllm serve was not ready within {_READY_WITHIN_S:g} s; its log is {log}"
                    ) from error
            await asyncio.sleep(_POLL_S)
    raise Unavailable(f"vllm serve ended with exit code {process.returncode}; its log is {log}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
