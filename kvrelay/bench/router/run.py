"""The implementation of `kvrelay bench router`."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import count
from random import Random
from typing import Any, Literal

from kvrelay.bench.environment import model_folder
from kvrelay.bench.router.clients import Client, GrpcClient, HttpClient, PeerClient, Received
from kvrelay.bench.router.mock_cluster import MockPools, mock_cluster
from kvrelay.bench.router.peer_router import Peer, peer_cluster
from kvrelay.bench.router.router_process import RouterProcess
from kvrelay.bench.run import Progress
from kvrelay.percentiles import percentile
from kvrelay.process.machine import processor_name
from kvrelay.tokenizer.tokenizer import Tokenizer

Endpoint = Literal["grpc", "http"]
# Sequences per decode worker. The worker has twice as many batch slots.
_BATCH = 32
_PROMPT_TOKENS = 256
# Tokens of a short prompt. The prompt is still long enough for the prefill pool.
_SHORT = 80
_OUTPUT_TOKENS = 512
# Token ids of the bundled model, without special tokens.
_VOCABULARY = range(10, 300)
# A word with more letters than this occurs nowhere else in an event.
_LETTERS = 4
_WARM_UP_S = 2.0
# Extra warm-up per stream, because all streams begin at once.
_ADMISSION_S = 0.006


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `kvrelay bench router`."""

    # Core of the router, core of workers and clients.
    cores: tuple[int, int]
    # Duration of each case.
    seconds: float
    # Number of sequential requests for the measurement of memory growth.
    requests: int
    quick: bool
    # Processes of the router, all on its core.
    processes: int = 1
    # Routers of other projects, which get the HTTP cases too.
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """One measured load."""

    endpoint: Endpoint
    streams: int
    # Rate at which the workers emit tokens.
    tokens_per_second: int
    # Router of another project that is measured, instead of kvrelay's.
    peer: Peer | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one case."""

    case: Case
    tokens_per_second: float
    tokens_per_message: float
    # Share of one core that the router used.
    router_core: float
    # Seconds that the router adds to a token.
    latency_p50: float
    latency_p99: float

    @property
    def tokens_per_core(self) -> float:
        """Tokens per second of the router's CPU time."""
        return self.tokens_per_second / self.router_core


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of the router's resident memory."""

    requests: int
    # Bytes, after each tenth of the requests.
    resident: tuple[int, ...]
    requests_per_second: float

    @property
    def half(self) -> int:
        """Bytes after half of the requests. By then, the router's index of prefixes has reached its
        bound.
        """
        return self.resident[4]

    @property
    def whole(self) -> int:
        """Bytes after all requests."""
        return self.resident[-1]


@dataclass(frozen=True, slots=True)
class RouterReport:
    """Results of `kvrelay bench router`."""

    machine: str
    cores: tuple[int, int]
    processes: int
    cases: tuple[Measured, ...]
    growth: Growth

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as plain data for JSON, with the derived figures."""
        cases = [{**asdict(one), "tokens_per_core": one.tokens_per_core} for one in self.cases]
        return {**asdict(self), "cases": cases}


_CASES = (
    *(Case("grpc", 256, rate) for rate in (5_000, 10_000, 20_000)),
    Case("grpc", 1024, 10_000),
    *(Case("http", 256, rate) for rate in (2_500, 5_000, 10_000, 20_000)),
    Case("http", 1024, 5_000),
)
_QUICK_CASES = (Case("grpc", 32, 1_000), Case("http", 32, 500))


async def run(options: Options, progress: Progress) -> RouterReport:
    """Runs the benchmark. Raises Unavailable if the router or its registry does not start, or if an
    answer is incomplete.
    """
    os.sched_setaffinity(0, {options.cores[1]})
    cases = [
        one
        for case in (_QUICK_CASES if options.quick else _CASES)
        for one in (case, *_peer_cases(case, options.peers))
    ]
    done = progress("streams", len(cases))
    measured = []
    for case in cases:
        measured.append(await _measure(case, options))
        done()
    return RouterReport(
        processor_name(),
        options.cores,
        options.processes,
        tuple(measured),
        await _grow(options, progress),
    )


def _peer_cases(case: Case, peers: tuple[Peer, ...]) -> Iterator[Case]:
    """Yields the case for each peer: peers have no endpoint for clients that speak gRPC."""
    if case.endpoint == "http":
        for peer in peers:
            yield replace(case, peer=peer)


async def _measure(case: Case, options: Options) -> Measured:
    """Measures a constant number of streams: when a request ends, its stream starts the next
    request.
    """
    said: defaultdict[str, list[float]] = defaultdict(list)
    received = Received()
    pools = _pools(case.streams // _BATCH, case.streams / case.tokens_per_second)
    async with (
        mock_cluster(pools, options.cores[0], said=said, processes=options.processes)
        if case.peer is None
        else peer_cluster(case.peer, pools, options.cores[0], _a_word()[1], said)
    ) as router:
        streams = [
            asyncio.create_task(_stream(number, _client(case, router, said), received))
            for number in range(case.streams)
        ]
        try:
            await _while_all_live(streams, _WARM_UP_S + _ADMISSION_S * case.streams)
            received.latencies.clear()
            tokens, messages, used, started = (
                received.tokens,
                received.messages,
                router.cpu_seconds(),
                time.perf_counter(),
            )
            await _while_all_live(streams, options.seconds)
            seconds = time.perf_counter() - started
            tokens, messages, used = (
                received.tokens - tokens,
                received.messages - messages,
                router.cpu_seconds() - used,
            )
        finally:
            await _end(streams)
    latencies = sorted(received.latencies)
    return Measured(
        case,
        tokens_per_second=tokens / seconds,
        tokens_per_message=tokens / messages,
        router_core=used / seconds,
        latency_p50=percentile(latencies, 50),
        latency_p99=percentile(latencies, 99),
    )


async def _grow(options: Options, progress: Progress) -> Growth:
    """Measures memory over short requests, one after the other on each of several streams."""
    said: defaultdict[str, list[float]] = defaultdict(list)
    number = options.requests
    done = progress("requests", 10)
    started, tenths = time.perf_counter(), []
    async with mock_cluster(
        _pools(2, 0.002), options.cores[0], said=said, processes=options.processes
    ) as router:
        client = GrpcClient(router.grpc, said)
        received, ids, random = Received(), count(), Random(0)

        async def several(until: int) -> None:
            while (one := next(ids)) < until:
                await client.run(
                    f"short-{one}", tuple(random.choices(_VOCABULARY, k=_SHORT)), 2, received
                )
                received.latencies.clear()

        for tenth in range(1, 11):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(_BATCH):
                    tasks.create_task(several(number * tenth // 10))
            ids = count(number * tenth // 10)
            tenths.append(router.resident_bytes())
            done()
        await client.close()
    return Growth(number, tuple(tenths), received.requests / (time.perf_counter() - started))


def _pools(decode: int, step_s: float) -> MockPools:
    return MockPools(prefill=1, decode=decode, slots=2 * _BATCH, step_s=step_s, token=_a_word()[0])


def _client(case: Case, router: RouterProcess, said: defaultdict[str, list[float]]) -> Client:
    if case.endpoint == "grpc":
        return GrpcClient(router.grpc, said)
    kind = HttpClient if case.peer is None else PeerClient
    return kind(router.http, _a_word()[1], said)


@cache
def _a_word() -> tuple[int, bytes]:
    """Returns a token that is a word, and the text of the token."""
    tokenizer = Tokenizer.load(model_folder("demo"))
    for token in range(tokenizer.vocab_size):
        text = tokenizer.decode([token])
        if len(text) > _LETTERS and text.isascii() and text.strip().isalpha():
            return token, text.encode()
    raise AssertionError("the vocabulary of the bundled model contains no words")


async def _stream(number: int, client: Client, received: Received) -> None:
    random = Random(number)
    try:
        for turn in count():
            prompt = tuple(random.choices(_VOCABULARY, k=_PROMPT_TOKENS))
            await client.run(f"bench-{number}-{turn}", prompt, _OUTPUT_TOKENS, received)
    finally:
        await client.close()


async def _while_all_live(tasks: list[asyncio.Task[None]], seconds: float) -> None:
    """Waits for `seconds`. Raises the exception of a task that fails."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for one in done:
        one.result()


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for one in tasks:
        one.cancel()
    await asyncio.wait(tasks)
