"""A router of another project as a peer, with workers without an engine."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvrelay.bench.router.clients import PeerClient, Received
from kvrelay.bench.router.http_workers import HttpWorker
from kvrelay.bench.router.mock_cluster import MockPools
from kvrelay.bench.router.router_process import RouterProcess, start_on_core
from kvrelay.errors import InvalidArgument, Unavailable
from kvrelay.process.child import stop

# Module that starts the router, by the name of its package on PyPI.
_MODULES = {
    "sglang-router": "sglang_router.launch_router",
    "vllm-router": "vllm_router.launch_router",
}
_HAS = "import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)"
_READY_S = 60.0
_POLL_S = 0.1
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A router that is measured beside kvrelay's. `python`: of an environment that has it."""

    name: str
    python: str

    @classmethod
    def parse(cls, text: str) -> Peer:
        """Reads NAME=PYTHON. Raises InvalidArgument for an unknown name, and for a Python that is
        not there or does not have the router.
        """
        name, _, path = text.partition("=")
        if name not in _MODULES:
            raise InvalidArgument(
                f"--peer {text!r:.80} is unknown; allowed are {' and '.join(_MODULES)}, each as "
                "NAME=PYTHON with the Python of an environment that has it",
                field="peer",
            )
        python = shutil.which(path) if path else None
        if python is None:
            raise InvalidArgument(
                f"--peer {name}: there is no program {path!r:.200}; give the Python of an "
                f"environment that has {name}, such as {name}=peer/bin/python",
                field="peer",
            )
        package = _MODULES[name].partition(".")[0]
        if subprocess.run(
            [python, "-c", _HAS, package], capture_output=True, check=False
        ).returncode:
            raise InvalidArgument(
                f"--peer {name}: {path} has no package {name}; run {path} -m pip install {name}",
                field="peer",
            )
        return cls(name, os.path.abspath(python))


@asynccontextmanager
async def peer_cluster(
    peer: Peer, pools: MockPools, core: int, word: bytes, said: defaultdict[str, list[float]]
) -> AsyncIterator[RouterProcess]:
    """Starts the peer on `core`, and `pools.decode` workers in this process that serve whole
    requests. Yields the peer once it has passed an answer on. Raises Unavailable if it ends or the
    wait times out.
    """
    async with AsyncExitStack() as ends:
        workers = [HttpWorker(word, said) for _ in range(pools.decode)]
        for worker in workers:
            await worker.start()
            ends.callback(worker.stop)
        for pace in pools.paces([worker.step for worker in workers]):
            ends.callback(asyncio.create_task(pace).cancel)
        address = f"127.0.0.1:{_free_port()}"
        process = await _start(peer, address, [worker.url for worker in workers], core)
        ends.push_async_callback(stop, process, _STOP_S)
        await _answers(peer, process, PeerClient(address, word, said))
        yield RouterProcess(process, http=address)


async def _start(
    peer: Peer, address: str, workers: list[str], core: int
) -> asyncio.subprocess.Process:
    host, _, port = address.rpartition(":")
    return await start_on_core(
        core,
        *(peer.python, "-m", _MODULES[peer.name], "--host", host, "--port", port),
        *("--prometheus-port", str(_free_port()), "--log-level", "error"),
        *("--worker-urls", *workers),
        # Nothing but the report goes to stdout.
        stdout=asyncio.subprocess.DEVNULL,
    )


async def _answers(peer: Peer, process: asyncio.subprocess.Process, client: PeerClient) -> None:
    """Waits until the peer passes an answer of one token on."""
    try:
        async with asyncio.timeout(_READY_S):
            while process.returncode is None:
                try:
                    await client.run("ready", (1,), 1, Received())
                    return
                except (OSError, Unavailable):
                    await client.close()
                    await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise Unavailable(f"{peer.name} was not ready within {_READY_S:g} s") from None
    finally:
        await client.close()
    raise Unavailable(
        f"{peer.name} ended with {process.returncode} before it was ready; run {peer.python} -m "
        f"{_MODULES[peer.name]} to see why"
    )


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
