"""Stores of KV blocks in this process and in others, and what workers put there."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import xxhash

from kv_transfer.blocks.single_blocks import BlockCopy
from kv_transfer.channels import Channels
from kvrelay.clock import MonotonicClock
from kvrelay.config.security import SecurityConfig
from kvrelay.kv_store.block_store import BlockStore
from kvrelay.kv_store.process import serve
from kvrelay.process.stop_request import StopRequest
from kvrelay.security.credentials import Credentials
from kvrelay.types.kv_block import BlockKey
from kvrelay.worker.tiers.block_file import BlockHeader
from kvrelay.worker.tiers.remote_tier import RemoteTier
from kvrelay.worker.tiers.tier import StoredBlock

LAYOUT = "0123456789abcdef"
TENANT = "00000000000000aa"
BLOCK_BYTES = 4096


@asynccontextmanager
async def store(
    size_bytes: int = 2**24,
    security: SecurityConfig | None = None,
    listen: str = "127.0.0.1:0",
    **options: Any,
) -> AsyncIterator[tuple[str, BlockStore]]:
    """A store in this process: its address and its blocks."""
    blocks, stop = BlockStore(size_bytes, **options), StopRequest()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(listen, security or SecurityConfig(), blocks, ready.set_result, stop)
    )
    await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    try:
        yield (await ready).rpartition(" ")[2], blocks
    finally:
        stop()
        await serving
        assert not blocks.check_integrity()


class StoreProcess:
    """A store in a process of its own, which a test may kill."""

    def __init__(self, *options: str, port: int = 0) -> None:
        command = (sys.executable, "-m", "kvrelay", "kv-store", "--listen", f"127.0.0.1:{port}")
        self._process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip().rpartition(" ")[2]
        assert self.address, self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def close(self) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


def channels(block_bytes: int = BLOCK_BYTES, credentials: Credentials | None = None) -> Channels:
    return Channels(cast(Any, SimpleNamespace(block_bytes=block_bytes)), credentials)


def stored(number: int, tenant: str = "t", block_bytes: int = BLOCK_BYTES) -> StoredBlock:
    """A block with its own identity and bytes."""
    data = np.frombuffer(random.Random(number).randbytes(block_bytes), np.uint8)
    digest = xxhash.xxh3_64_intdigest(data.data)
    return StoredBlock(key(number, tenant), BlockCopy(data, digest))


def key(number: int, tenant: str = "t") -> BlockKey:
    return BlockKey(b"", random.Random(~number).randbytes(32), tenant)


def payload(
    block: StoredBlock, layout: str = LAYOUT, identity: bytes | None = None
) -> tuple[bytes, bytes]:
    """The header and the bytes of a block."""
    data = block.copy.data.tobytes()
    header = BlockHeader(layout, identity or block.key.identity, len(data), block.copy.digest)
    return header.pack(), data


@asynccontextmanager
async def remote(*addresses: str, layout: str = LAYOUT, **options: Any) -> AsyncIterator[Remote]:
    """The tier of a worker, running."""
    connections = channels(**options)
    tier = RemoteTier(
        addresses, layout, options.get("block_bytes", BLOCK_BYTES), connections, MonotonicClock()
    )
    running = asyncio.create_task(tier.run())
    try:
        yield Remote(tier)
    finally:
        running.cancel()
        await asyncio.wait({running})
        await connections.close()


class Remote:
    """A remote tier, and waiting for it."""

    def __init__(self, tier: RemoteTier) -> None:
        self.tier = tier

    async def opened(self, skipped: int = 0) -> Remote:
        await until(lambda: self.tier.counts.skipped == skipped)
        return self

    async def put(self, *blocks: StoredBlock) -> None:
        for block in blocks:
            self.tier.offer(block)
        await until(lambda: self.tier.is_drained)

    async def read(self, *numbers: int) -> list[bytes]:
        found = await self.tier.read([key(number) for number in numbers])
        for number, block in zip(numbers, found, strict=False):
            assert xxhash.xxh3_64_intdigest(block.copy.data.tobytes()) == block.copy.digest, number
        return [block.copy.data.tobytes() for block in found]


async def until(holds: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.01)


def contents(number: int) -> bytes:
    return stored(number).copy.data.tobytes()


def alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
