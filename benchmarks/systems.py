"""The systems to measure. Each system runs only during its measurement. All use the same two
cores.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_pair import VllmPairSender
from vllm_server import vllm_server

from kvrelay.config.config_file import load_config
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.loadtest.runner import Sender
from kvrelay.loadtest.senders.http_sender import HttpSender

# Timeout of a request.
_TIMEOUT_S = 300.0
# Greedy, because vLLM 0.32 on a CPU crashes on a request with a seed and a prompt of more than one
# chunk.
_OPTIONS = {"temperature": 0}
# Blocks are of 32 tokens, as vLLM's on a CPU, and the memory is that of `vllm serve` here.
_VLLM_ENGINE = {
    "prefill.engine": "vllm",
    "decode.engine": "vllm",
    "kv.block_size": 32,
    "kv.memory": "2GiB",
    "model.dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Setup:
    """The common settings of all systems."""

    model: str
    # Configuration of kvrelay.
    config: Path | None
    vllm_python: Path | None
    logs: Path
    cores: tuple[int, int]


def kvrelay(setup: Setup) -> AbstractAsyncContextManager[Sender]:
    """Runs one prefill and one decode worker, as `kvrelay serve` does."""
    return _kvrelay(setup, prefill=1, decode=1)


def colocated(setup: Setup) -> AbstractAsyncContextManager[Sender]:
    """Runs two decode workers, which prefill their prompts themselves."""
    return _kvrelay(setup, prefill=0, decode=2)


def kvrelay_vllm(setup: Setup) -> AbstractAsyncContextManager[Sender]:
    """Runs one prefill and one decode worker with vLLM as their engine. This Python has vLLM."""
    return _kvrelay(setup, prefill=1, decode=1, **_VLLM_ENGINE)


def kvrelay_vllm_nixl(setup: Setup) -> AbstractAsyncContextManager[Sender]:
    """Like `kvrelay_vllm`, with KV over vLLM's own NixlConnector. This Python also has nixl."""
    by_nixl = {"transfer.transport": "vllm-nixl"}
    return _kvrelay(setup, prefill=1, decode=1, **_VLLM_ENGINE, **by_nixl)


@asynccontextmanager
async def _kvrelay(
    setup: Setup, prefill: int, decode: int, **settings: object
) -> AsyncIterator[Sender]:
    wanted: dict[str, object] = {
        **{f"listen.{endpoint}": "127.0.0.1:0" for endpoint in ("grpc", "http", "admin")},
        "model.path": setup.model,
        "prefill.replicas": prefill,
        "decode.replicas": decode,
        # Each rate sends the same prompts.
        "kv.prefix_cache": False,
        **settings,
    }
    async with (
        LocalCluster(load_config(setup.config, wanted), quiet=True) as cluster,
        HttpSender(cluster.endpoints.http, _TIMEOUT_S, **_OPTIONS) as sender,
    ):
        await sender.models()
        yield sender


@asynccontextmanager
async def vllm(setup: Setup) -> AsyncIterator[Sender]:
    """Runs one vLLM engine on both cores, with prefill and decode in one batch."""
    assert setup.vllm_python is not None
    log = setup.logs / "vllm.log"
    async with (
        vllm_server(setup.vllm_python, setup.model, sorted({*setup.cores}), log) as url,
        HttpSender(url, _TIMEOUT_S, **_OPTIONS) as sender,
    ):
        await sender.models()
        yield sender


@asynccontextmanager
async def vllm_pair(setup: Setup) -> AsyncIterator[Sender]:
    """Runs a prefill and a decode server of vLLM on one core each. KV is sent over NIXL."""
    assert setup.vllm_python is not None
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    urls = []
    async with AsyncExitStack() as stack:
        for core, port in zip(setup.cores, ("5600", "5700"), strict=True):
            server = vllm_server(
                setup.vllm_python,
                setup.model,
                (core,),
                setup.logs / f"vllm-pair-{port}.log",
                *("--kv-transfer-config", json.dumps(transfer)),
                VLLM_NIXL_SIDE_CHANNEL_PORT=port,
            )
            urls.append(await stack.enter_async_context(server))
        sender = await stack.enter_async_context(VllmPairSender(*urls, _TIMEOUT_S, **_OPTIONS))
        await sender.models()
        yield sender


SYSTEMS: dict[str, Callable[[Setup], AbstractAsyncContextManager[Sender]]] = {
    "kvrelay": kvrelay,
    "colocated": colocated,
    "kvrelay-vllm": kvrelay_vllm,
    "kvrelay-vllm-nixl": kvrelay_vllm_nixl,
    "vllm": vllm,
    "vllm-pair": vllm_pair,
}
