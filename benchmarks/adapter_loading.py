"""Loads and unloads LoRA adapters under steady requests, and checks each answer.

    python benchmarks/adapter_loading.py --adapters 50

Three tenants send requests all the time, each over a connection of its own: to the base model, and
to the adapters that are loaded. Meanwhile an operator loads adapters with random factors, one after
the other, and unloads each fifth one while an answer of it runs. The exit code is 1 if a request
fails, or if its tokens differ from those of an engine that has only the adapter of the request.

The ITL of an answer is the time from its first to its last part, by its tokens but one. The figures
compare answers before the first adapter, while adapters are loaded, and afterwards with the same
mix of adapters, on a machine that also runs this client.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

# Makes the test packages importable.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import typer
from support.adapters import save_adapters
from support.tokens import Tokens

from kvrelay.client import AsyncClient, RetryPolicy
from kvrelay.client.admin import AdminClient
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import SampleRequest
from kvrelay.engine.sequence_segment import Segment
from kvrelay.errors import KvRelayError, NotFound
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.models import resolve_model
from kvrelay.models.adapters.adapter_files import read_adapter
from kvrelay.percentiles import percentile
from kvrelay.types.requests import SamplingParams
from kvrelay.wire.cluster import ClusterStatus

TENANTS = ("red", "green", "blue")
# One prompt for the local path, and one that a prefill worker computes. Both models that the tests
# use have these token ids.
PROMPTS = (tuple(range(5, 25)), tuple(2 + (7 * i) % 90 for i in range(110)))
TOKENS = 24
# Of an answer that runs while its adapter is unloaded.
LONG_TOKENS = 64
BLOCK_SIZE = 16
# Each adapter of this number is unloaded again.
UNLOADED = 5

Answer = tuple[int, ...]


class Alone:
    """An engine that has one adapter at a time, and computes one sequence at a time."""

    def __init__(self, model: str) -> None:
        self._runner = ModelRunner.load(
            model,
            dtype="float32",
            kv_bytes=2**26,
            block_size=BLOCK_SIZE,
            threads=1,
            adapter_slots=1,
        )
        self._runner.adapters.find_sites()

    def answers(self, adapter: Path | None) -> list[Answer]:
        """Returns the greedy answers to PROMPTS, each of LONG_TOKENS tokens."""
        name = ""
        table = self._runner.adapters
        if adapter is not None:
            loaded = table.prepare(read_adapter(str(adapter), 512), adapter.name)
            table.install(loaded)
            name = loaded.adapter_id
        found = [self._answer(prompt, name) for prompt in PROMPTS]
        table.remove(name)
        return found

    def close(self) -> None:
        """Ends the engine."""
        self._runner.close()

    def _answer(self, prompt: Answer, adapter: str) -> Answer:
        params = SamplingParams(temperature=0.0, ignore_eos=True, seed=0)
        tokens, computed = list(prompt), 0
        sample = SampleRequest(params, tokens, len(prompt), self._runner.eos_token_ids, None)
        blocks = range(-(-(len(prompt) + LONG_TOKENS) // BLOCK_SIZE))
        while len(tokens) < len(prompt) + LONG_TOKENS:
            segment = Segment(tokens[computed:], computed, blocks, sample, adapter=adapter)
            ((sampled,),) = self._runner.run([segment])
            computed = len(tokens)
            tokens.append(sampled.token_id)
        return tuple(tokens[len(prompt) :])


@dataclass
class Load:
    """Steady requests, and what became of them."""

    clients: Mapping[str, AsyncClient]
    expected: Mapping[str, list[Answer]]
    draw: random.Random
    # Models that requests may name; "" is the base model.
    models: list[str] = field(default_factory=lambda: [""])
    # Models that the next requests name.
    soon: deque[str] = field(default_factory=deque)
    phase: str = "before"
    # ITL and longest pause of the answers, in seconds, by phase.
    itl: dict[str, list[float]] = field(default_factory=dict)
    pauses: dict[str, list[float]] = field(default_factory=dict)
    # Answers by phase, and by model.
    answers: Counter[str] = field(default_factory=Counter)
    by_model: Counter[str] = field(default_factory=Counter)
    # Requests by model that have no token yet.
    waiting: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def running(self, streams: int) -> AsyncIterator[None]:
        """Each tenant has that many requests at a time."""
        tasks = [
            asyncio.create_task(self._send(client))
            for client in self.clients.values()
            for _ in range(streams)
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for found in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(found, asyncio.CancelledError):
                    self.failures[f"the sender ended: {found!r}"] += 1

    async def enough(self, answers: int) -> None:
        """Waits until the phase has that many answers more."""
        wanted = self.answers[self.phase] + answers
        async with self.changed:
            await self.changed.wait_for(lambda: self.answers[self.phase] >= wanted)

    async def begun(self, model: str) -> None:
        """Waits until all requests to the model have their first token."""
        async with self.changed:
            await self.changed.wait_for(lambda: not self.waiting[model])

    async def ask(
        self, client: AsyncClient, model: str, count: int, begun: asyncio.Event | None = None
    ) -> None:
        """Sends one request and compares its answer. `begun` is set with its first token."""
        place = self.draw.randrange(len(PROMPTS))
        options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": count}
        stream = client.generate(token_ids=PROMPTS[place], model=model, **options)
        phase, tokens = self.phase, list[int]()
        times: list[float] = []
        self.waiting[model] += 1
        try:
            async for part in stream:
                times.append(time.perf_counter())
                if not tokens:
                    await self._first(model, begun)
                tokens += part.token_ids
        except KvRelayError as error:
            self.failures[f"{model or 'base'}: {error.code.name}: {error}"] += 1
        finally:
            if not tokens:
                await self._first(model, begun)
        if tuple(tokens) != self.expected[model][place][:count]:
            self.failures[f"{model or 'base'}: other tokens than alone"] += 1
        if len(tokens) > 1:
            self.itl.setdefault(phase, []).append((times[-1] - times[0]) / (len(tokens) - 1))
            pauses = (later - sooner for sooner, later in pairwise(times))
            self.pauses.setdefault(phase, []).append(max(pauses, default=0.0))
        async with self.changed:
            self.answers[self.phase] += 1
            self.by_model[model] += 1
            self.changed.notify_all()

    async def _first(self, model: str, begun: asyncio.Event | None) -> None:
        self.waiting[model] -= 1
        if begun is not None:
            begun.set()
        async with self.changed:
            self.changed.notify_all()

    async def _send(self, client: AsyncClient) -> None:
        while True:
            model = self.soon.popleft() if self.soon else self.draw.choice(self.models)
            await self.ask(client, model, TOKENS)


@dataclass
class Operator:
    """Loads and unloads adapters, and watches the workers."""

    admin: AdminClient
    load: Load
    unloaded: list[str] = field(default_factory=list)
    # Largest resident size by worker, in bytes.
    peak: dict[str, int] = field(default_factory=dict)
    # Longest load, in seconds.
    longest_s: float = 0.0

    async def status(self) -> ClusterStatus:
        """Returns the status, and notes the sizes of the workers."""
        status = await asyncio.to_thread(self.admin.status)
        for name, size in sizes(status).items():
            self.peak[name] = max(self.peak.get(name, 0), size)
        return status

    async def add(self, name: str, folder: Path) -> None:
        """Loads an adapter; the next request names it."""
        began = time.perf_counter()
        await asyncio.to_thread(self.admin.load_adapter, name, str(folder))
        self.longest_s = max(self.longest_s, time.perf_counter() - began)
        self.load.models.append(name)
        self.load.soon.append(name)
        await self.status()

    async def drop(self, name: str) -> None:
        """Unloads an adapter while an answer of it runs. No request names it from now on."""
        load = self.load
        load.models.remove(name)
        client = next(iter(load.clients.values()))
        begun = asyncio.Event()
        running = asyncio.create_task(load.ask(client, name, LONG_TOKENS, begun))
        await begun.wait()
        await load.begun(name)
        await asyncio.to_thread(self.admin.unload_adapter, name)
        self.unloaded.append(name)
        try:
            await client.generate(token_ids=PROMPTS[0], model=name, max_tokens=1).result()
        except NotFound:
            pass
        else:
            load.failures["an adapter that is unloaded still answers"] += 1
        await running

    async def drop_all(self) -> None:
        """Unloads what is loaded; the workers have no adapters then."""
        for name in [one for one in self.load.models if one]:
            await self.drop(name)

    async def settled(self) -> None:
        """Waits until the workers hold nothing. Raises TimeoutError."""
        async with asyncio.timeout(60):
            # No event tells of every change of a heartbeat.
            while any(  # noqa: ASYNC110
                not one.load.empty or one.load.blocks_held
                for pool in (await self.status()).pools
                for one in pool.workers
            ):
                await asyncio.sleep(0.1)


def sizes(status: ClusterStatus) -> dict[str, int]:
    """Returns the resident bytes of each worker."""
    return {one.worker_id: one.load.rss_bytes for pool in status.pools for one in pool.workers}


@dataclass(frozen=True)
class Report:
    """What one run found."""

    load: Load
    operator: Operator
    # Bytes of the files of all adapters.
    adapter_bytes: int
    # Resident bytes by worker: before the first adapter, and the peak of each round.
    before: Mapping[str, int]
    peaks: tuple[Mapping[str, int], ...]

    def growth(self) -> dict[str, list[int]]:
        """Returns by how many bytes each worker was larger than before, at most, in each round."""
        return {
            name: [peak[name] - size for peak in self.peaks] for name, size in self.before.items()
        }

    def figures(self) -> dict[str, Any]:
        """Returns the figures to print."""
        rows: dict[str, Any] = {}
        for name, times in (("itl", self.load.itl), ("longest_pause", self.load.pauses)):
            ordered = {phase: sorted(found) for phase, found in times.items()}
            for percent in (50, 95, 99):
                at = {phase: percentile(found, percent) for phase, found in ordered.items()}
                row = {phase: round(1e3 * value, 2) for phase, value in at.items()}
                ratios = {
                    f"loading/{other}": round(at["loading"] / at[other], 2)
                    for other in ("before", "after")
                }
                rows[f"{name}_p{percent}_ms"] = row | ratios
        return {
            "answers": dict(self.load.answers),
            "failed": sum(self.load.failures.values()),
            "failures": dict(self.load.failures.most_common(5)),
            "adapters_asked": sum(bool(name) for name in self.load.by_model),
            "unloaded": len(self.operator.unloaded),
            "longest_load_s": round(self.operator.longest_s, 2),
            **rows,
            "adapters_MiB": round(self.adapter_bytes / 2**20, 1),
            "growth_MiB": {
                name: [round(one / 2**20, 1) for one in grown]
                for name, grown in self.growth().items()
            },
        }


async def run(
    folder: Path,
    *,
    model: str = "demo",
    adapters: int = 50,
    rank: int = 8,
    streams: int = 2,
    answers: int = 60,
    rounds: int = 1,
    seed: int = 0,
) -> Report:
    """Runs a cluster, and loads the adapters `rounds` times. At the end, none is loaded.

    - folder: for the adapters and the tokens of the tenants.
    - streams: requests at a time, of each tenant.
    - answers: number of answers before the first adapter, and after the last.
    """
    where = resolve_model(model)
    folders = save_adapters(folder, Path(where), adapters, rank=rank)
    alone = Alone(where)
    expected = {"": alone.answers(None)} | {
        name: alone.answers(path) for name, path in folders.items()
    }
    alone.close()
    tokens = Tokens(folder / "tokens.json")
    secrets = {name: tokens.add(name) for name in TENANTS}
    operator_token = tokens.add("operator", roles=["admin"])
    config = ClusterConfig.model_validate(
        {
            "model": {"path": model, "dtype": "float32"},
            "adapters": {"max_loaded": adapters},
            "kv": {"memory": "32MiB", "block_size": BLOCK_SIZE},
            "prefill": {"replicas": 1, "chunk_tokens": 64},
            "decode": {"replicas": 1, "chunk_tokens": 64},
            "slo": None,
            "security": {"tokens_file": str(tokens.path)},
            "listen": dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0"),
        }
    )
    async with AsyncExitStack() as exits:
        cluster = await exits.enter_async_context(LocalCluster(config, quiet=True))
        clients = {
            name: await exits.enter_async_context(
                AsyncClient(cluster.endpoints.grpc, token=secret, retry=RetryPolicy(max_attempts=1))
            )
            for name, secret in secrets.items()
        }
        admin = exits.enter_context(AdminClient(cluster.endpoints.admin, token=operator_token))
        load = Load(clients, expected, random.Random(seed))
        operator = Operator(admin, load)
        peaks: list[Mapping[str, int]] = []
        async with load.running(streams):
            await load.enough(answers)
            before = sizes(await operator.status())
            for turn in range(rounds):
                operator.peak = {}
                await _load_all(operator, folders)
                if turn == rounds - 1:
                    load.phase = "after"
                    await load.enough(answers)
                load.phase = "unloading"
                await operator.drop_all()
                peaks.append(operator.peak)
        await operator.settled()
    size = sum(file.stat().st_size for path in folders.values() for file in path.iterdir())
    return Report(load, operator, size, before, tuple(peaks))


async def _load_all(operator: Operator, folders: Mapping[str, Path]) -> None:
    operator.load.phase = "loading"
    for number, (name, path) in enumerate(folders.items(), 1):
        await operator.add(name, path)
        if number % UNLOADED == 0:
            # One that has served for a while.
            await operator.drop(operator.load.models[-UNLOADED])


def main(
    model: Annotated[str, typer.Option(help="Model that is served.")] = "demo",
    adapters: Annotated[int, typer.Option(min=5, help="Adapters to load.")] = 50,
    rank: Annotated[int, typer.Option(min=1, max=64, help="Rank of each adapter.")] = 8,
    streams: Annotated[int, typer.Option(min=1, help="Requests at a time, of each tenant.")] = 2,
    answers: Annotated[int, typer.Option(min=1, help="Answers before and afterwards.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="How often all are loaded.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the requests.")] = 0,
) -> None:
    """Load adapters under load; print one line of JSON."""
    with tempfile.TemporaryDirectory() as name:
        report = asyncio.run(
            run(
                Path(name),
                model=model,
                adapters=adapters,
                rank=rank,
                streams=streams,
                answers=answers,
                rounds=rounds,
                seed=seed,
            )
        )
    print(json.dumps(report.figures()))
    raise typer.Exit(1 if report.load.failures else 0)


if __name__ == "__main__":
    typer.run(main)
