"""Measures what KV tiers do for conversations whose KV exceeds the memory for it.

    python benchmarks/kv_tiers.py --conversations 24 --turns 20
    python benchmarks/kv_tiers.py --trace mooncake_conversation.jsonl --requests 1500

The load is synthetic conversations that take turns, or the first requests of a trace in Mooncake's
format, whose equal blocks are equal tokens. It runs against several clusters, each of one decode
worker that prefills too:

- unlimited: memory for the KV of all requests;
- none: a quarter of it, without tiers;
- disk, remote, host: a quarter of it, with a tier of that kind. `remote` starts a store.

The report has the hit rate (cached tokens per prompt token), TTFT, ITL, and the measured bandwidth
of each tier beside that of the disk, of a loopback connection and of the memory itself, measured
with pieces of the same size. --repeat runs the systems in alternation. Ratios within one run mean
something on any machine; seconds do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from kv_tier_load import Chat, Figures, Load, TraceSlice, ask
from machine_rates import disk_rates, loopback_rate, memory_rate

from kvrelay.client import AsyncClient
from kvrelay.client.admin import AdminClient
from kvrelay.config.config_file import load_config
from kvrelay.config.schema import ClusterConfig
from kvrelay.launch.checks.memory_plan import plan_memory
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.loadtest.traces.replay import block_size
from kvrelay.process.machine import processor_name
from kvrelay.wire.cluster import ClusterStatus

BASES = ("unlimited", "none")
TIERS = ("disk", "remote", "host")
# So that a quarter of their KV holds the longest.
LEAST_CONVERSATIONS = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where the tiers of one run are."""

    folder: Path
    store: str = ""


async def measure(system: str, config: ClusterConfig, load: Load) -> Figures:
    """Runs the load against a new cluster."""
    figures = Figures(system)
    async with LocalCluster(config, quiet=True) as cluster:
        endpoints = cluster.endpoints
        async with AsyncClient(endpoints.grpc) as client:
            (model,) = await client.models()
            # Compiles and measures what the first requests need; not recorded.
            await ask(client, list(range(10, 82)), 8, Figures(system))
            await load.run(client, model.vocab_size, figures)
        status = await asyncio.to_thread(_status, endpoints.admin)
        figures.tiers = tuple(
            tier for pool in status.pools for one in pool.workers for tier in one.load.tiers
        )
    return figures


def _status(address: str) -> ClusterStatus:
    with AdminClient(address) as admin:
        return admin.status()


@contextmanager
def store(num_bytes: int) -> Iterator[str]:
    """A store in a process of its own: its address."""
    command = (sys.executable, "-m", "kvrelay", "kv-store", "--listen", "127.0.0.1:0")
    with subprocess.Popen(
        [*command, "--size", str(num_bytes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip().rpartition(" ")[2]
        finally:
            process.terminate()


def configuration(
    system: str, place: Place, load: Load, options: argparse.Namespace
) -> ClusterConfig:
    """The cluster of one system."""
    overrides: dict[str, object] = {
        "model.path": options.model,
        "model.max_model_len": load.longest + options.new,
        "kv.dtype": options.dtype,
        "prefill.replicas": 0,
        "decode.replicas": 1,
        "listen": dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0"),
    }
    if options.trace is not None:
        # So that what is equal in the trace is equal in blocks.
        overrides["kv.block_size"] = block_size(options.length_scale)
    block_bytes, blocks = _blocks(load_config(None, overrides), load)
    memory = blocks * block_bytes
    overrides["kv.memory"] = int(1.2 * memory) if system == "unlimited" else memory // 4
    size = _tier_bytes(block_bytes, blocks)
    tiers: dict[str, dict[str, object]] = {
        "disk": {"path": str(place.folder / "kv"), "size": size},
        "remote": {"addresses": [place.store]},
        "host": {"size": size},
    }
    if system in tiers:
        overrides["kv.tiers"] = [{"kind": system, **tiers[system]}]
    return load_config(None, overrides)


def _blocks(config: ClusterConfig, load: Load) -> tuple[int, int]:
    """Bytes of a block of the decode pool, and the number of blocks of the load."""
    decode = next(one for one in plan_memory(config) if one.pool == "decode")
    return decode.block_bytes, load.blocks(decode.block_size)


def _tier_bytes(block_bytes: int, blocks: int) -> int:
    """Bytes of a tier that keeps all of the load."""
    return 2 * blocks * (block_bytes + 4096)


def load_of(options: argparse.Namespace) -> Load:
    """The load that the options name."""
    if options.trace is None:
        return Chat(
            options.conversations,
            options.turns,
            options.first,
            options.new,
            options.answer,
            options.concurrency,
        )
    return TraceSlice(
        options.trace, options.length_scale, options.requests, options.longest, options.concurrency
    )


async def run(options: argparse.Namespace) -> int:
    """Runs all systems and prints the report. Returns the exit status."""
    systems = (*BASES, *options.tiers)
    runs: dict[str, list[Figures]] = {system: [] for system in systems}
    with tempfile.TemporaryDirectory(prefix="kvrelay-tiers-", dir=options.folder) as name:
        place = Place(Path(name))
        load = load_of(options)
        block_bytes, blocks = _blocks(configuration("none", place, load, options), load)
        for repeat in range(options.repeat):
            for system in systems:
                folder = Path(name) / str(repeat)
                folder.mkdir(exist_ok=True)
                with store(_tier_bytes(block_bytes, blocks)) as address:
                    config = configuration(system, Place(folder, address), load, options)
                    figures = await measure(system, config, load_of(options))
                runs[system].append(figures)
                print(system, json.dumps(figures.summary()), file=sys.stderr)
        probe = Path(name) / "probe"
        probe.mkdir()
        own = {f"disk_{name}": rate for name, rate in disk_rates(probe, block_bytes).items()}
    own |= {"memory_copy": memory_rate(block_bytes), "loopback": loopback_rate(block_bytes)}
    same = all(
        sorted(one.answers) == sorted(runs["unlimited"][0].answers)
        for figures in runs.values()
        for one in figures
    )
    report = {
        "machine": f"{processor_name()}, {os.cpu_count()} cores",
        "options": {name: str(value) for name, value in vars(options).items()},
        "blocks": blocks,
        "block_bytes": block_bytes,
        "same_tokens": same,
        "systems": {system: _summary(system, runs) for system in systems},
        "own_bytes_per_second": {name: round(rate) for name, rate in own.items()},
        "runs": {name: [one.summary() for one in figures] for name, figures in runs.items()},
    }
    print(json.dumps(report, indent=2))
    return 0 if same else 1


def _summary(system: str, runs: dict[str, list[Figures]]) -> dict[str, float]:
    """The medians of one system, and its ratios to the systems without tiers."""

    def ratio(name: str, other: str) -> float:
        pairs = zip(runs[system], runs[other], strict=True)
        return round(statistics.median(_number(a, name) / _number(b, name) for a, b in pairs), 3)

    def median(name: str) -> float:
        return statistics.median(_number(one, name) for one in runs[system])

    def rate(name: str) -> float:
        rates = [getattr(tier, name) for one in runs[system] for tier in one.tiers]
        return round(statistics.median(rates or [0.0]))

    return {
        "hit_rate": median("hit_rate"),
        "ttft_p50_ms": median("ttft_p50_ms"),
        "itl_p99_ms": median("itl_p99_ms"),
        "ttft_p50_to_none": ratio("ttft_p50_ms", "none"),
        "itl_p50_to_none": ratio("itl_p50_ms", "none"),
        "itl_p99_to_none": ratio("itl_p99_ms", "none"),
        "read_bytes_per_second": rate("read_rate"),
        "write_bytes_per_second": rate("write_rate"),
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
    parser.add_argument("--tiers", nargs="*", default=TIERS, choices=TIERS, help="Tiers to run.")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--first", type=int, default=200, help="Tokens before the first turn.")
    parser.add_argument("--new", type=int, default=48, help="New prompt tokens of a turn.")
    parser.add_argument("--answer", type=int, default=24, help="Tokens of an answer.")
    parser.add_argument("--trace", type=Path, help="Trace in Mooncake's format, for the load.")
    parser.add_argument("--requests", type=int, default=1500, help="Requests of the trace.")
    parser.add_argument(
        "--length-scale", type=Fraction, default=Fraction(1, 32), help="Of the trace's lengths."
    )
    parser.add_argument("--longest", type=int, default=3072, help="Tokens of a trace's request.")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--folder", default=None, help="Folder on the disk to measure.")
    options = parser.parse_args()
    if options.conversations < LEAST_CONVERSATIONS:
        parser.error(f"--conversations must be {LEAST_CONVERSATIONS} or more")
    sys.exit(asyncio.run(run(options)))


if __name__ == "__main__":
    main()
