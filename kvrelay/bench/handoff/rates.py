"""Hand-off rates: from the first blocks sent on an open push to the acknowledged commit."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median

from kv_transfer.sender import Sender
from kv_transfer.transport_selection import host_id
from kvrelay.bench.handoff.peer import Peer, receiving
from kvrelay.bench.handoff.receiving import SENDER, Settings
from kvrelay.bench.run import Progress
from kvrelay.clock import MonotonicClock
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.types.kv_layout import KvLayout

# Measured by default.
TRANSPORTS = ("shm", "grpc", "gloo")
_MODEL = "bench"
# Passes for each requested run, because a hand-off is short.
_PASSES = 3
# The limit of the machine that bounds each transport that is measured.
LIMIT_OF = {"shm": "memcpy", "grpc": "loopback", "gloo": "loopback", "nixl": "memcpy"}


@dataclass(frozen=True, slots=True)
class Rate:
    """The rate of one transport at one size."""

    transport: str
    num_bytes: int
    digests: bool
    # Median.
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Payload bytes per second."""
        return self.num_bytes / self.seconds

    @property
    def limit(self) -> str:
        """The field of WireLimits that bounds this transport."""
        return LIMIT_OF[self.transport]


async def measure_rates(
    layout: KvLayout,
    sizes: tuple[int, ...],
    transports: tuple[str, ...],
    runs: int,
    core: int,
    progress: Progress,
) -> list[Rate]:
    """Measures each size over each transport, alternating with and without digests. `core` is the
    core of the receiving processes.
    """
    num_blocks = max(sizes) // layout.block_bytes
    source = KvPool(layout, num_blocks)
    source.buffer.random_()
    done = progress("transports", len(transports) * len(sizes))
    rates = []
    async with (
        _end(source, num_blocks, True, core) as with_digests,
        _end(source, num_blocks, False, core) as without,
    ):
        ends = (with_digests, without)
        for transport in transports:
            for size in sizes:
                count = max(1, size // layout.block_bytes)
                seconds: tuple[list[float], ...] = ([], [])
                for _ in range(1 + _PASSES * runs):
                    for end, found in zip(ends, seconds, strict=True):
                        found.append(await end.hand_over(transport, count))
                # The first pass connects and does not count.
                rates += [
                    Rate(transport, count * layout.block_bytes, digests, median(found[1:]))
                    for digests, found in zip((True, False), seconds, strict=True)
                ]
                done()
    source.close()
    return rates


@dataclass(frozen=True, slots=True)
class _End:
    sender: Sender
    peer: Peer

    async def hand_over(self, transport: str, count: int) -> float:
        """Hands over `count` blocks; returns seconds."""
        key, target = await self.peer.grant(count, transport)
        push = self.sender.open(key, target)
        await push.opened()
        started = time.perf_counter()
        push.send(0, range(count))
        await push.commit(0, count * self.sender.arena.layout.block_size, 0.0)
        return time.perf_counter() - started


@asynccontextmanager
async def _end(source: KvPool, num_blocks: int, digests: bool, core: int) -> AsyncIterator[_End]:
    """Starts a sender and a process that receives from it."""
    layout = source.layout
    sender = Sender(
        source,
        worker_id=SENDER,
        host_id=host_id(),
        model_id=_MODEL,
        layout_hash=layout.hash(_MODEL),
        clock=MonotonicClock(),
        digests=digests,
    )
    async with receiving(Settings(layout, num_blocks, _MODEL, digests, core)) as peer:
        yield _End(sender, peer)
        await sender.close()
