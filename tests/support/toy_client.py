"""Prompts to one worker of the toy, whose answers are known."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import ClassVar, Self

from simulation.toy_engine import POISON, answer
from support.worker_harness import Session, Workers, load_of

from kvrelay.types.requests import PrefillTimings, SamplingParams, SequenceSpec
from kvrelay.types.workers import TierLoad
from kvrelay.worker_messages import RunLocal

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, seed=5, ignore_eos=True)


def prompt(number: int, length: int = 42) -> tuple[int, ...]:
    """The same tokens for the same number."""
    rng = random.Random(number)
    return tuple(rng.randrange(1, POISON) for _ in range(length))


async def books_are_right(running: Workers) -> None:
    for info in await running.settled():
        assert info.load.integrity_ok, info.load.integrity_error


class ToyClient:
    """Sends prompts to one worker and checks each answer. One reader serves all requests."""

    # The tier that tests look at, and seconds that they wait for it.
    kind: ClassVar[str] = "disk"
    seconds: ClassVar[float] = 30

    def __init__(self, session: Session) -> None:
        self._session = session
        self._count = 0

    @classmethod
    async def of(cls, running: Workers, name: str = "decode-0") -> Self:
        return cls(await running.session(name))

    async def ask(self, tokens: tuple[int, ...], tenant: str = "") -> PrefillTimings:
        self._count += 1
        one = SequenceSpec(
            f"r{self._count}", 0, tokens, len(tokens), PARAMS, salt=tenant, tenant=tenant
        )
        await self._session.send(RunLocal(one))
        first = await self._session.tokens()
        got = list(first.token_ids)
        if first.finish_reason is None:
            got += await self._session.answer()
        assert tuple(got) == answer(tokens, PARAMS), f"wrong tokens for {tokens}"
        assert first.prefill is not None
        return first.prefill

    async def tier(self, kind: str = "") -> TierLoad:
        load = await load_of(self._session.info)
        return next(one for one in load.tiers if one.kind == (kind or self.kind))

    async def until(self, true: Callable[[TierLoad], bool], kind: str = "") -> TierLoad:
        async with asyncio.timeout(self.seconds):
            while not true(found := await self.tier(kind)):
                await asyncio.sleep(0.02)
        return found
