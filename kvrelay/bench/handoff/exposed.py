"""How long a request waits for its hand-off, and how much sending slows down a real prefill worker
on one core.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, cast

from kv_transfer.blocks.plan import Layers
from kv_transfer.sender import Sender
from kv_transfer.transport_selection import host_id
from kvrelay.bench.handoff.peer import Peer, receiving
from kvrelay.bench.handoff.receiving import SENDER, Settings
from kvrelay.bench.run import Progress
from kvrelay.clock import MonotonicClock
from kvrelay.config.pools import PrefillConfig
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.engine.runner import ModelRunner
from kvrelay.errors import Internal
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.context import Identity, WorkerContext
from kvrelay.worker.session import RouterSession
from kvrelay.worker.worker import Worker
from kvrelay.worker_messages import HandedOff, HandoffTarget, Prefill, TokenBatch
from prefill_worker.prefill_stage import PrefillStage


@dataclass(frozen=True, slots=True)
class Exposed:
    """Medians, in seconds. `alone` is the duration of the prefill without a hand-off."""

    transport: str
    tokens: int
    num_bytes: int
    prefill: float
    alone: float
    # From the end of the prefill to the acknowledged commit.
    exposed: float


class Nowhere:
    """Replaces the sender when the KV is not sent anywhere."""

    error = None
    windows_from = 0

    def open(
        self, key: tuple[str, int], target: HandoffTarget, adapter: str = "", num_tokens: int = 0
    ) -> Nowhere:
        """See `Sender.open`."""
        return self

    def send(self, first: int, blocks: Sequence[int], layers: Layers | None = None) -> None:
        """Does nothing."""

    async def abort(self) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""


@asynccontextmanager
async def _working(
    runner: ModelRunner, sender: Sender | Nowhere, chunk_tokens: int
) -> AsyncIterator[Worker]:
    context = WorkerContext(
        Identity("bench", "prefill", 1, "127.0.0.1:0", host_id()),
        ClusterConfig().model_copy(update={"prefill": PrefillConfig(chunk_tokens=chunk_tokens)}),
        runner,
        KvCache(runner.num_blocks, runner.layout.block_size, prefix_cache=False),
        cast(Sender, sender),
        MonotonicClock(),
    )
    worker = Worker(context, PrefillStage)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(worker.run())
            # The engine runs warm-up steps first, and there is no event for their end.
            while worker.state != "ready":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            yield worker
            running.cancel()
    finally:
        await sender.close()


async def measure_exposed(
    runner: ModelRunner,
    prompts: tuple[int, ...],
    transports: tuple[str, ...],
    runs: int,
    chunk_tokens: int,
    core: int,
    progress: Progress,
) -> list[Exposed]:
    """Measures prompts of the given lengths. `core` is the core of the receiving process. The
    engine runs in a thread of this process.
    """
    num_blocks = runner.layout.blocks_for(max(prompts))
    settings = Settings(runner.layout, num_blocks, runner.model_id, digests=True, core=core)
    sender = Sender(
        runner.kv,
        worker_id=SENDER,
        host_id=host_id(),
        model_id=runner.model_id,
        layout_hash=runner.layout_hash,
        clock=MonotonicClock(),
    )
    rng = random.Random(0)
    done = progress("prompts", len(prompts) * runs * (len(transports) + 1))
    found = []
    async with (
        receiving(settings) as peer,
        _working(runner, sender, chunk_tokens) as worker,
        _working(runner, Nowhere(), chunk_tokens) as alone,
    ):
        for tokens in prompts:
            # A warm-up run. It connects the sender and captures the graphs of the steps.
            for transport in transports:
                await _prefill(worker, peer, rng, tokens, transport)
            without: list[float] = []
            rows: dict[str, list[_Row]] = {transport: [] for transport in transports}
            for _ in range(runs):
                without.append(
                    (await _prefill(alone, peer, rng, tokens, "shm", stays=True)).prefill
                )
                done()
                for transport in transports:
                    rows[transport].append(await _prefill(worker, peer, rng, tokens, transport))
                    done()
            for transport, of_transport in rows.items():
                found.append(
                    Exposed(
                        transport,
                        tokens,
                        of_transport[0].num_bytes,
                        median(row.prefill for row in of_transport),
                        median(without),
                        median(row.exposed for row in of_transport),
                    )
                )
    return found


class _Row(NamedTuple):
    prefill: float
    exposed: float
    num_bytes: int


async def _prefill(
    worker: Worker,
    peer: Peer,
    rng: random.Random,
    tokens: int,
    transport: str,
    *,
    stays: bool = False,
) -> _Row:
    """Runs one prompt and its hand-off. With `stays` there is no hand-off, because the answer ends
    with its first token.
    """
    (request_id, attempt), target = await peer.grant(
        worker.context.runner.layout.blocks_for(tokens), transport
    )
    prompt = tuple(rng.randrange(2, worker.context.runner.vocab_size) for _ in range(tokens))
    params = SamplingParams(temperature=0.0, max_tokens=1 if stays else 2, seed=0, ignore_eos=True)
    session = RouterSession("bench")
    worker.handle(
        Prefill(SequenceSpec(request_id, attempt, prompt, tokens, params), target), session
    )
    prefill = 0.0
    async for event in session.events():
        match event:
            case TokenBatch((first,)) if first.prefill is not None:
                prefill = first.prefill.compute_seconds
                if stays:
                    return _Row(prefill, 0.0, 0)
            case HandedOff(handoff=handoff):
                return _Row(prefill, handoff.exposed_seconds, handoff.bytes)
            case _:
                raise Internal(f"a hand-off of the benchmark failed: {event}")
    raise AssertionError("the session ended before the prefill")
