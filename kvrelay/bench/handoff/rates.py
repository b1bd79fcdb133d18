"""How fast a whole hand-off is, from opening it to the acknowledged commit."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from kv_transfer.choice import host_id
from kv_transfer.sender import Sender
from kvrelay.bench.handoff.peer import Peer, receiving
from kvrelay.bench.handoff.receiving import Settings
from kvrelay.bench.run import Progress
from kvrelay.clock import MonotonicClock
from kvrelay.engine.kv import KvPool
from kvrelay.types import KvLayout

TRANSPORTS = ("shm", "grpc", "gloo")
_MODEL = "bench"
_LIMIT_OF = {"shm": "memcpy", "grpc": "loopback", "gloo": "loopback", "nixl": "memcpy"}


@dataclass(frozen=True, slots=True)
class Rate:
    transport: str
    num_bytes: int
    digests: bool
    seconds: float  # median

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / self.seconds

    @property
    def limit(self) -> str:
        """The figure of WireLimits that bounds it."""
        return _LIMIT_OF[self.transport]


async def measure_rates(
    layout: KvLayout, sizes: tuple[int, ...], transports: tuple[str, ...], runs: int, core: int, progress: Progress
) -> list[Rate]:
    """Each size over each transport, with digests and without, in turns; `core` is the receiving process's."""
    num_blocks = max(sizes) // layout.block_bytes
    source = KvPool(layout, num_blocks)
    source.buffer.random_()
    done = progress("transports", len(transports) * len(sizes) * 2)
    rates = []
    for digests in (True, False):
        settings = Settings(layout, num_blocks, _MODEL, digests, core)
        sender = Sender(
            source,
            host_id=host_id(),
            model_id=_MODEL,
            layout_hash=layout.hash(_MODEL),
            clock=MonotonicClock(),
            digests=digests,
        )
        async with receiving(settings) as peer:
            for transport in transports:
                for size in sizes:
                    count = max(1, size // layout.block_bytes)
                    await _hand_over(sender, peer, transport, count)  # connects, and does not count
                    seconds = [await _hand_over(sender, peer, transport, count) for _ in range(runs)]
                    rates.append(Rate(transport, count * layout.block_bytes, digests, median(seconds)))
                    done()
        await sender.close()
    source.close()
    return rates


async def _hand_over(sender: Sender, peer: Peer, transport: str, count: int) -> float:
    key, target = await peer.grant(count, transport)
    started = time.perf_counter()
    push = sender.open(key, target)
    push.send(0, range(count))
    await push.commit(0, count * sender.arena.layout.block_size, 0.0)
    return time.perf_counter() - started
