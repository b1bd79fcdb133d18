"""Runs a rolling upgrade and a rollback under load, and checks all answers.

    python benchmarks/rolling_upgrade.py            from the previous build to this build, and back
    python benchmarks/rolling_upgrade.py --model    to other weights of the model, and back
    python benchmarks/rolling_upgrade.py --from REVISION   from another build

Clients repeat the same requests. Each answer must equal, from its first to its last token, one of
the answers that the same request had before the load. The exit code is 1 if a request fails or an
answer differs. mixed_cluster.py starts the processes. docs/versions.md explains the order of the
steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from mixed_cluster import (
    PRESENT,
    PREVIOUS,
    MixedCluster,
    NoHistory,
    Part,
    mixed_cluster,
    previous_tree,
)

import kvrelay
from kvrelay.client import RetryPolicy
from kvrelay.errors import KvRelayError
from kvrelay.models import resolve_model

# Number of different requests.
KINDS = 6
AT_ONCE = 4
# Tokens of an answer.
TOKENS = 300
TIMEOUT_S = 240.0
RETRY = RetryPolicy(max_attempts=100, max_backoff_s=1.0)


@dataclass
class Counts:
    """Counts over all answers."""

    streams: int = 0
    failed: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    # Answers by version of the model.
    versions: Counter[int] = field(default_factory=Counter)
    # Answers that continued at another router.
    resumed: int = 0
    # Answers that continued on another worker.
    moved: int = 0
    # Duration of each step.
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no request failed and no answer mixed versions."""
        return self.streams > 0 and not self.failed and not self.mixed

    def json(self) -> dict[str, Any]:
        """Returns the counts as plain data for JSON."""
        return {
            "streams": self.streams,
            "failed": len(self.failed),
            "mixed": len(self.mixed),
            "versions": [self.versions[one] for one in sorted(self.versions)],
            "resumed": self.resumed,
            "moved": self.moved,
            "seconds": {name: round(one, 1) for name, one in self.seconds.items()},
            "examples": (self.failed + self.mixed)[:5],
        }


def request(kind: int) -> dict[str, Any]:
    """Returns a request of this kind. Prompt lengths and greedy or random sampling vary."""
    length = (12, 40, 90, 150)[kind % 4]
    prompt = [20 + (kind * 37 + number * 11) % 200 for number in range(length)]
    return {
        "token_ids": prompt,
        "max_tokens": TOKENS,
        "temperature": 0.0 if kind % 2 else 0.8,
        "seed": kind,
        "ignore_eos": True,
    }


class Load:
    """Repeats the same requests until it is stopped."""

    def __init__(self, cluster: MixedCluster) -> None:
        self.counts = Counts()
        # Answers by version of the model, then by kind of request.
        self.answers: list[list[tuple[int, ...]]] = []
        self._targets = [f"127.0.0.1:{grpc}" for grpc, _, _ in cluster.ports]
        self._stop = asyncio.Event()

    def client(self) -> kvrelay.AsyncClient:
        """Returns a client of all routers."""
        return kvrelay.AsyncClient(self._targets, timeout=TIMEOUT_S, retry=RETRY)

    async def learn(self) -> None:
        """Records the current answers as those of a version of the model."""
        async with self.client() as client:
            found = [(await client.generate(**request(kind))).token_ids for kind in range(KINDS)]
        if found not in self.answers:
            self.answers.append(found)

    async def run(self) -> None:
        """Sends requests, AT_ONCE at a time, until `stop`."""
        async with self.client() as client:
            await asyncio.gather(*(self._ask(client, number) for number in range(AT_ONCE)))

    def stop(self) -> None:
        """Ends `run` after the current requests."""
        self._stop.set()

    async def _ask(self, client: kvrelay.AsyncClient, number: int) -> None:
        while not self._stop.is_set():
            kind = number % KINDS
            number += AT_ONCE - 1
            self.counts.streams += 1
            try:
                answer = await client.generate(**request(kind))
            except KvRelayError as error:
                self.counts.failed.append(f"request {kind}: {error.code.name}: {error.message}")
                continue
            self.counts.resumed += answer.calls > 1
            self.counts.moved += answer.ledger is not None and len(answer.ledger.attempts) > 1
            known = [
                version for version, one in enumerate(self.answers) if one[kind] == answer.token_ids
            ]
            if known:
                self.counts.versions[known[0]] += 1
            else:
                attempts = (
                    [] if answer.ledger is None else [one.outcome for one in answer.ledger.attempts]
                )
                self.counts.mixed.append(
                    f"request {kind}: {answer.calls} calls, {attempts}: {answer.token_ids[:9]}"
                )


class Roll:
    """Replaces a controller with its workers, or a router."""

    def __init__(self, cluster: MixedCluster, load: Load) -> None:
        self._cluster = cluster
        self._load = load
        self._controller: Part | None = None
        self._router: Part | None = None
        self._slot = 0

    async def workers(self, tree: Path, model: str | None = None) -> None:
        """Replaces the controller and its workers. The new workers serve before the old workers
        drain.
        """
        began = time.monotonic()
        cluster = self._cluster
        if model is not None:
            cluster.config["model"] = {**cluster.config["model"], "path": model}
        before = frozenset(one.worker_id for one in await cluster.registry.workers())
        former, self._controller = self._controller, await cluster.controller(tree, tree, tree)
        wanted = sum(cluster.config[pool]["replicas"] for pool in ("prefill", "decode"))
        await cluster.workers(wanted, before)
        if former is not None:
            assert await former.stop() == 0, former.log
        self._took("workers", began)

    async def router(self, tree: Path) -> None:
        """Replaces the router. The new router serves before the old router drains."""
        began = time.monotonic()
        former = self._router
        self._router = await self._cluster.router(tree, self._slot)
        self._slot = 1 - self._slot
        if former is not None:
            assert await former.stop() == 0, former.log
        self._took("router", began)

    async def stop(self) -> None:
        """Stops the router and the controller."""
        for part in (self._router, self._controller):
            if part is not None:
                await part.stop()

    def _took(self, step: str, began: float) -> None:
        self._load.counts.seconds[f"{len(self._load.counts.seconds)} {step}"] = (
            time.monotonic() - began
        )


async def upgrade_build(previous: Path, folder: Path, pause_s: float) -> Counts:
    """Upgrades the workers, then the router. Rolls back in the opposite order."""
    async with mixed_cluster(folder, decode={"replicas": 2, "max_batch": 16}) as cluster:
        load = Load(cluster)
        roll = Roll(cluster, load)
        await roll.workers(previous)
        await roll.router(previous)
        await load.learn()
        running = asyncio.create_task(load.run())
        for step, tree in (
            (roll.workers, PRESENT),
            (roll.router, PRESENT),
            (roll.router, previous),
            (roll.workers, previous),
        ):
            await asyncio.sleep(pause_s)
            await step(tree)
        await asyncio.sleep(pause_s)
        load.stop()
        await running
        await roll.stop()
        return load.counts


async def upgrade_model(folder: Path, pause_s: float) -> Counts:
    """Upgrades to other weights and back, with the same router."""
    other = other_weights(folder / "demo")
    async with mixed_cluster(folder, decode={"replicas": 2, "max_batch": 16}) as cluster:
        load = Load(cluster)
        roll = Roll(cluster, load)
        await roll.workers(PRESENT)
        await roll.router(PRESENT)
        await load.learn()
        await roll.workers(PRESENT, str(other))
        await load.learn()
        assert len(load.answers) == 2, "the other weights must give other answers"
        running = asyncio.create_task(load.run())
        for model in ("demo", str(other)):
            await asyncio.sleep(pause_s)
            await roll.workers(PRESENT, model)
        await asyncio.sleep(pause_s)
        load.stop()
        await running
        await roll.stop()
        return load.counts


def other_weights(folder: Path) -> Path:
    """Writes a copy of the demo model with changed values at the end of some tensors. The first
    bytes of each tensor stay the same.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(resolve_model("demo"), folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if "mlp" in name:
            tensor.view(-1)[64:] *= 1.25
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def main() -> int:
    """Runs the upgrade and prints the counts as JSON. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--from", dest="revision", default=PREVIOUS, help="Git revision of the first build."
    )
    parser.add_argument(
        "--model",
        action="store_true",
        help="Upgrade the weights of the model instead of the build.",
    )
    parser.add_argument(
        "--pause", type=float, default=10.0, help="Seconds of load before and after each step."
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvrelay-upgrade-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            if options.model:
                counts = asyncio.run(upgrade_model(folder, options.pause))
            else:
                previous = previous_tree(folder / "previous", options.revision)
                counts = asyncio.run(upgrade_build(previous, folder, options.pause))
        except NoHistory as error:
            parser.error(str(error))
    print(json.dumps(counts.json(), indent=2))
    return 0 if counts.ok else 1


if __name__ == "__main__":
    sys.exit(main())
