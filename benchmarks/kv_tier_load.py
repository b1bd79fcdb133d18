"""The loads of `kv_tiers.py`: conversations that take turns, and a slice of a trace."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Protocol

from kvrelay.client import AsyncClient
from kvrelay.loadtest.lengths import Uniform
from kvrelay.loadtest.traces.replay import Replay
from kvrelay.percentiles import percentile
from kvrelay.types.workers import TierLoad

FIRST_TOKEN = 10


@dataclass(slots=True)
class Figures:
    """What one cluster did. Times in seconds."""

    system: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)
    # Requests by where their prefix was fetched from.
    fetched: dict[str, int] = field(default_factory=dict)
    tiers: tuple[TierLoad, ...] = ()

    def summary(self) -> dict[str, object]:
        """The figures for the report."""
        return {
            "hit_rate": round(self.cached_tokens / max(1, self.prompt_tokens), 4),
            "ttft_p50_ms": round(1e3 * statistics.median(self.ttft), 2),
            "ttft_p99_ms": round(1e3 * percentile(sorted(self.ttft), 99), 2),
            "itl_p50_ms": round(1e3 * statistics.median(self.itl), 2),
            "itl_p99_ms": round(1e3 * percentile(sorted(self.itl), 99), 2),
            "fetched": self.fetched,
            "tiers": [asdict(tier) for tier in self.tiers],
        }


async def ask(client: AsyncClient, tokens: list[int], answer: int, figures: Figures) -> list[int]:
    """Sends one request, records it, and returns the tokens of its answer."""
    began, last = time.perf_counter(), 0.0
    async with client.generate(
        token_ids=tokens, max_tokens=answer, ignore_eos=True, temperature=0.0
    ) as stream:
        async for event in stream:
            now = time.perf_counter()
            if not event.token_ids:
                continue
            if last:
                figures.itl += [(now - last) / len(event.token_ids)] * len(event.token_ids)
            else:
                figures.ttft.append(now - began)
            last = now
        completion = await stream.result()
    figures.prompt_tokens += completion.usage.prompt_tokens
    figures.cached_tokens += completion.usage.cached_tokens
    figures.answers.append(tuple(completion.token_ids))
    if completion.ledger is not None and (fetch := completion.ledger.fetch) is not None:
        figures.fetched[fetch.source] = figures.fetched.get(fetch.source, 0) + 1
    return list(completion.token_ids)


class Load(Protocol):
    """Requests, in an order that is the same for all systems."""

    # Tokens of the longest request with its answer.
    longest: int

    def blocks(self, block_size: int) -> int:
        """Distinct KV blocks of all requests."""
        ...

    async def run(self, client: AsyncClient, vocab: int, figures: Figures) -> None:
        """Sends all requests."""
        ...


class Chat:
    """Conversations that take turns: each request continues one of them with a few new tokens, in
    an order that visits all others first.
    """

    def __init__(
        self, conversations: int, turns: int, first: int, new: int, answer: int, concurrency: int
    ) -> None:
        """first: tokens before the first turn. new, answer: tokens of a turn."""
        self.longest = first + turns * (new + answer)
        self._conversations, self._turns = conversations, turns
        self._first, self._new, self._answer = first, new, answer
        self._slots = asyncio.Semaphore(concurrency)

    def blocks(self, block_size: int) -> int:
        """See `Load.blocks`."""
        return self._conversations * -(-self.longest // block_size)

    async def run(self, client: AsyncClient, vocab: int, figures: Figures) -> None:
        """See `Load.run`."""
        randoms = [Random(number) for number in range(self._conversations)]
        talks = [_drawn(random, self._first, vocab) for random in randoms]

        async def turn(number: int) -> None:
            async with self._slots:
                tokens = talks[number]
                tokens += _drawn(randoms[number], self._new, vocab)
                tokens += await ask(client, tokens, self._answer, figures)

        for _ in range(self._turns):
            await asyncio.gather(*map(turn, range(self._conversations)))


class TraceSlice:
    """The first requests of a trace, in its order, without its times. Lengths are scaled, and
    requests that are longer than the context are cut.
    """

    def __init__(
        self, path: Path, scale: Fraction, requests: int, longest: int, concurrency: int
    ) -> None:
        self.longest = longest
        self._replay = Replay(
            path,
            "mooncake",
            0.0,
            Fraction(1),
            scale,
            requests,
            None,
            Uniform(1, 1),
            Uniform(1, 1),
            0,
        )
        self._slots = asyncio.Semaphore(concurrency)

    def _requests(self, vocab: int) -> Iterable[tuple[list[int], int]]:
        for one in self._replay.plan(vocab - FIRST_TOKEN, self.longest):
            assert one.token_ids is not None
            yield [FIRST_TOKEN + token for token in one.token_ids], one.output_tokens

    def blocks(self, block_size: int) -> int:
        """See `Load.blocks`. Answers count as their own."""
        found: set[int] = set()
        answers = 0
        for tokens, answer in self._requests(2**16):
            at, whole = 0, len(tokens) // block_size
            for number in range(whole):
                at = hash((at, *tokens[number * block_size : (number + 1) * block_size]))
                found.add(at)
            rest = len(tokens) - whole * block_size + answer
            answers += -(-rest // block_size)
        return len(found) + answers

    async def run(self, client: AsyncClient, vocab: int, figures: Figures) -> None:
        """See `Load.run`."""
        answers: dict[int, tuple[int, ...]] = {}

        async def one(number: int, tokens: list[int], answer: int) -> None:
            async with self._slots:
                answers[number] = tuple(await ask(client, tokens, answer, figures))

        async with asyncio.TaskGroup() as tasks:
            for number, (tokens, answer) in enumerate(self._requests(vocab)):
                tasks.create_task(one(number, tokens, answer))
        figures.answers = [answers[number] for number in sorted(answers)]


def _drawn(random: Random, count: int, vocab: int) -> list[int]:
    return [random.randrange(FIRST_TOKEN, vocab) for _ in range(count)]
