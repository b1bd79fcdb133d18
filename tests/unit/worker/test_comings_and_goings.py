"""Requests that are aborted, repeated or orphaned at any moment leave nothing behind on either
worker.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.worker_harness import Session, Workers, workers

from kvrelay.config.pools import SpeculationConfig
from kvrelay.config.schema import ClusterConfig
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker_messages import Abort, Command, Event, Prefill, Reserve, Reserved, RunLocal

CONFIG = ClusterConfig.model_validate(
    {
        "model": {"dtype": "float32"},
        # Few blocks, so that sequences wait and are preempted
        "kv": {"block_size": 8, "memory": "84KiB"},
        "prefill": {"chunk_tokens": 16},
        "decode": {"chunk_tokens": 16, "max_batch": 6},
    }
)
SPECULATION = SpeculationConfig(min_ngram=1, max_batch=6)
REQUESTS = 120
SHARED = tuple(range(2, 34))  # a prefix that half of the prompts begin with


class Router:
    """Relays requests like a router would, but forgets, repeats and gives up at random."""

    def __init__(self, running: Workers, draw: random.Random) -> None:
        self._running = running
        self._draw = draw
        self._sessions: dict[str, Session] = {}
        self._specs: dict[tuple[str, int], SequenceSpec] = {}
        self._readers: list[asyncio.Task[None]] = []

    async def connect(self) -> None:
        for worker_id in ("prefill-0", "decode-0"):
            self._sessions[worker_id] = await self._running.session(worker_id)
            self._readers.append(asyncio.create_task(self._read(self._sessions[worker_id])))

    async def disconnect(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for session in self._sessions.values():
            await session.close()
        self._readers = []

    async def submit(self, number: int) -> None:
        draw = self._draw
        tail = tuple(draw.randrange(2, 120) for _ in range(draw.randint(1, 60)))
        tokens = SHARED + tail if draw.random() < 0.5 else tail
        params = SamplingParams(
            max_tokens=draw.randint(1, 30), seed=number, ignore_eos=draw.random() < 0.7
        )
        one = SequenceSpec(f"r{number}", draw.randint(0, 3), tokens, len(tokens), params)
        self._specs[one.key] = one
        await self._decode(
            Reserve(one, draw.choice([0.05, 5.0]), "prefill-0")
            if draw.random() < 0.6
            else RunLocal(one)
        )

    async def give_up(self) -> None:
        """Somewhere, one or the other worker hears of it, or both."""
        if self._specs:
            key = self._draw.choice(list(self._specs))
            for worker_id in self._draw.sample(["prefill-0", "decode-0"], self._draw.randint(1, 2)):
                await self._sessions[worker_id].send(Abort(*key))

    async def _decode(self, command: Command) -> None:
        for _ in range(self._draw.choice([1, 1, 2])):
            await self._sessions["decode-0"].send(command)

    async def _read(self, session: Session) -> None:
        while True:
            event: Event = await session.event()
            if isinstance(event, Reserved) and self._draw.random() < 0.8:
                spec = self._specs[event.request_id, event.attempt]
                transport = self._draw.choice(["memory", "shm", "grpc"])
                await self._sessions["prefill-0"].send(
                    Prefill(spec, replace(event.target, transport=transport))
                )


@pytest.mark.parametrize(
    ("seed", "speculation"), [(0, None), (1, None), (2, SPECULATION), (3, SPECULATION)]
)
@pytest.mark.sweep(4)
async def test_whatever_happens_every_block_comes_back(
    tiny_model: Callable[..., Path], seed: int, speculation: SpeculationConfig | None
) -> None:
    draw = random.Random(seed)
    decode = CONFIG.decode.model_copy(update={"speculation": speculation})
    config = CONFIG.model_copy(update={"decode": decode})
    async with workers(tiny_model("llama"), config, "prefill-0", "decode-0") as running:
        router = Router(running, draw)
        await router.connect()
        for number in range(REQUESTS):
            await router.submit(number)
            for _ in range(draw.choice([0, 0, 1, 2])):
                await router.give_up()
            if draw.random() < 0.3:
                await asyncio.sleep(draw.random() * 0.02)
            if draw.random() < 0.02:
                await router.disconnect()
                await router.connect()
        await asyncio.sleep(draw.random() * 0.2)
        await router.disconnect()
        for info in await running.settled():
            assert info.load.integrity_ok, info.load.integrity_error
