"""Measures what a disk tier does for conversations whose KV exceeds the memory for it.

    python benchmarks/kv_tiers.py --conversations 24 --turns 20

Conversations take turns: each request continues one of them with a few new tokens, in an order that
visits all others first. The same load runs against three clusters, each of one decode worker that
prefills too:

- unlimited: memory for the KV of all conversations;
- none: a quarter of it, without tiers;
- disk: a quarter of it, with a disk tier.

The report has the hit rate (cached tokens per prompt token), TTFT, ITL, and the tier's measured
bandwidth beside that of the disk itself, measured with files of the same size. --repeat runs the
three in alternation. Ratios within one run mean something on any machine; seconds do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from kvrelay.client import AsyncClient
from kvrelay.client.admin import AdminClient
from kvrelay.config.config_file import load_config
from kvrelay.config.schema import ClusterConfig
from kvrelay.launch.checks.memory_plan import plan_memory
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.percentiles import percentile
from kvrelay.types.workers import TierLoad
from kvrelay.wire.cluster import ClusterStatus

SYSTEMS = ("unlimited", "none", "disk")
FIRST_TOKEN = 10
# So that a quarter of their KV holds the longest.
LEAST_CONVERSATIONS = 8
# Files that measure the disk itself.
DISK_FILES = 256


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


class Conversation:
    """The tokens of one conversation so far."""

    def __init__(self, number: int, first: int, vocab: int) -> None:
        self._random = Random(number)
        self._vocab = vocab
        self.tokens = self._new(first)

    def _new(self, count: int) -> list[int]:
        return [self._random.randrange(FIRST_TOKEN, self._vocab) for _ in range(count)]

    async def turn(self, client: AsyncClient, new: int, answer: int, figures: Figures) -> None:
        """Sends one turn, and records it."""
        self.tokens += self._new(new)
        began, last = time.perf_counter(), 0.0
        async with client.generate(
            token_ids=self.tokens, max_tokens=answer, ignore_eos=True, temperature=0.0
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
        self.tokens += completion.token_ids


async def measure(system: str, config: ClusterConfig, options: argparse.Namespace) -> Figures:
    """Runs the load against a new cluster."""
    figures = Figures(system)
    async with LocalCluster(config, quiet=True) as cluster:
        endpoints = cluster.endpoints
        async with AsyncClient(endpoints.grpc) as client:
            (model,) = await client.models()
            talks = [
                Conversation(number, options.first, model.vocab_size)
                for number in range(options.conversations)
            ]
            # Compiles and measures what the first requests need; not recorded.
            await Conversation(-1, 64, model.vocab_size).turn(client, 8, 8, Figures(system))
            slots = asyncio.Semaphore(options.concurrency)

            async def one(talk: Conversation) -> None:
                async with slots:
                    await talk.turn(client, options.new, options.answer, figures)

            for _ in range(options.turns):
                await asyncio.gather(*map(one, talks))
        status = await asyncio.to_thread(_status, endpoints.admin)
        figures.tiers = tuple(
            tier for pool in status.pools for one in pool.workers for tier in one.load.tiers
        )
    return figures


def _status(address: str) -> ClusterStatus:
    with AdminClient(address) as admin:
        return admin.status()


def disk_rates(folder: Path, size: int) -> dict[str, float]:
    """Bytes per second of the disk for files of `size` bytes: written as a tier does, written with
    a flush to the disk, and read from the kernel's cache.
    """
    data = os.urandom(size)
    rates = {}
    for name, flush in (("write", False), ("write_flushed", True), ("read_cached", None)):
        began = time.perf_counter()
        for number in range(DISK_FILES):
            path = folder / str(number)
            if flush is None:
                path.read_bytes()
                continue
            with path.open("wb") as file:
                file.write(data)
                if flush:
                    file.flush()
                    os.fsync(file.fileno())
        rates[name] = DISK_FILES * size / (time.perf_counter() - began)
    return rates


def configuration(system: str, folder: Path, options: argparse.Namespace) -> ClusterConfig:
    """The cluster of one system."""
    length = options.first + options.turns * (options.new + options.answer)
    overrides: dict[str, object] = {
        "model.path": options.model,
        "model.max_model_len": length + options.new,
        "kv.dtype": options.dtype,
        "prefill.replicas": 0,
        "decode.replicas": 1,
        "listen": dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0"),
    }
    block_bytes, block_size = _block(load_config(None, overrides))
    blocks = options.conversations * -(-length // block_size)
    memory = blocks * block_bytes
    overrides["kv.memory"] = int(1.2 * memory) if system == "unlimited" else memory // 4
    if system == "disk":
        overrides["kv.tiers"] = [
            {"kind": "disk", "path": str(folder / "kv"), "size": 2 * memory + blocks * 4096}
        ]
    return load_config(None, overrides)


def _block(config: ClusterConfig) -> tuple[int, int]:
    """Bytes and tokens of a block of the decode pool."""
    decode = next(one for one in plan_memory(config) if one.pool == "decode")
    return decode.block_bytes, decode.block_size


async def run(options: argparse.Namespace) -> int:
    """Runs all systems and prints the report. Returns the exit status."""
    runs: dict[str, list[Figures]] = {system: [] for system in SYSTEMS}
    with tempfile.TemporaryDirectory(prefix="kvrelay-tiers-", dir=options.folder) as name:
        for repeat in range(options.repeat):
            for system in SYSTEMS:
                folder = Path(name) / str(repeat)
                folder.mkdir(exist_ok=True)
                figures = await measure(system, configuration(system, folder, options), options)
                runs[system].append(figures)
                print(system, json.dumps(figures.summary()), file=sys.stderr)
        block_bytes, _ = _block(configuration("none", Path(name), options))
        probe = Path(name) / "probe"
        probe.mkdir()
        own = disk_rates(probe, block_bytes)
    same = all(
        sorted(one.answers) == sorted(runs["unlimited"][0].answers)
        for figures in runs.values()
        for one in figures
    )
    print(json.dumps(_report(runs, own, same, options), indent=2))
    return 0 if same else 1


def _report(
    runs: dict[str, list[Figures]], own: dict[str, float], same: bool, options: argparse.Namespace
) -> dict[str, object]:
    def ratio(name: str, system: str, other: str) -> float:
        pairs = zip(runs[system], runs[other], strict=True)
        return statistics.median(_number(a, name) / _number(b, name) for a, b in pairs)

    def rates(name: str) -> Sequence[float]:
        return [getattr(tier, name) for one in runs["disk"] for tier in one.tiers]

    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "options": vars(options),
        "same_tokens": same,
        "hit_rate": {
            name: statistics.median(_number(one, "hit_rate") for one in figures)
            for name, figures in runs.items()
        },
        "ttft_p50_disk_to_none": ratio("ttft_p50_ms", "disk", "none"),
        "ttft_p50_disk_to_unlimited": ratio("ttft_p50_ms", "disk", "unlimited"),
        "itl_p99_disk_to_none": ratio("itl_p99_ms", "disk", "none"),
        "bytes_per_second": {
            "tier_read": statistics.median(rates("read_rate") or [0.0]),
            "tier_write": statistics.median(rates("write_rate") or [0.0]),
            **{f"disk_{name}": rate for name, rate in own.items()},
        },
        "runs": {name: [one.summary() for one in figures] for name, figures in runs.items()},
    }


def _number(figures: Figures, name: str) -> float:
    value = figures.summary()[name]
    assert isinstance(value, float), name
    return value


def main() -> None:
    """Parses the options and runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="Model folder or hub id.")
    parser.add_argument("--dtype", default="auto", choices=("auto", "int8"), help="kv.dtype.")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--first", type=int, default=200, help="Tokens before the first turn.")
    parser.add_argument("--new", type=int, default=48, help="New prompt tokens of a turn.")
    parser.add_argument("--answer", type=int, default=24, help="Tokens of an answer.")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--folder", default=None, help="Folder on the disk to measure.")
    options = parser.parse_args()
    if options.conversations < LEAST_CONVERSATIONS:
        parser.error(f"--conversations must be {LEAST_CONVERSATIONS} or more")
    sys.exit(asyncio.run(run(options)))


if __name__ == "__main__":
    main()
