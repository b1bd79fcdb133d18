"""Checks that many requests with different endings leak nothing: `python benchmarks/soak.py`.

The cluster runs as under `kvrelay serve`. Clients read an answer to its end, or cancel it at once,
after some tokens or after some time, or close their connection. At first, decode workers are killed
under load. Then the benchmark counts the resources of each process, sends many such requests, and
counts again. The exit code is 1 if a process holds more resources than before, or if a request
fails that its client did not cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

# Makes the test packages importable.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import grpc
import typer
from rich.console import Console
from support.running_cluster import ANY_PORT, RunningCluster, running_on

from kvrelay.config.schema import ClusterConfig
from kvrelay.process.child import family
from kvrelay.wire import inference as wire

Ending = Literal[
    "whole",
    "cancelled at once",
    "cancelled after tokens",
    "cancelled after a while",
    "connection closed",
]
ENDINGS: tuple[Ending, ...] = Ending.__args__  # type: ignore[attr-defined]
AT_ONCE = 6
# Share of the cycles before the first count.
WARM_UP = 0.1
# Allowed growth per process.
MAY_GROW = {"descriptors": 8, "threads": 8, "memory files": 0, "resident MiB": 24.0}

app = typer.Typer(add_completion=False)
log = Console(stderr=True)


@dataclass
class Soak:
    """Sends requests to one cluster."""

    target: str
    draw: random.Random
    # Requests left to send.
    left: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)

    async def run(self, cycles: int) -> None:
        """Sends `cycles` requests, AT_ONCE at a time."""
        self.left = cycles

        async def work() -> None:
            while self.left > 0:
                self.left -= 1
                await self.one()

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())

    async def one(self) -> None:
        """Sends one request with a random ending on a new connection."""
        draw, ending = self.draw, self.draw.choice(ENDINGS)
        prompt = [draw.randrange(300) for _ in range(draw.randint(1, 400))]
        whole = ending == "whole"
        sampling = wire.SamplingOptions(
            max_tokens=draw.randint(1, 16) if whole else 400, ignore_eos=True, temperature=0.0
        )
        request = wire.request_to_proto(
            wire.GenerateRequest(token_ids=tuple(prompt), sampling=sampling)
        )
        tokens, a_while = draw.randint(1, 12), draw.random() * 0.2
        async with grpc.aio.insecure_channel(self.target) as channel:
            call = wire.InferenceServiceStub(channel).Generate(request, timeout=120)
            try:
                match ending:
                    case "whole":
                        received = sum([len(one.token_ids) async for one in call])
                        if received != sampling.max_tokens:
                            self.failures[f"{received} of {sampling.max_tokens} tokens"] += 1
                    case "cancelled after tokens":
                        received = 0
                        async for one in call:
                            received += len(one.token_ids)
                            if received >= tokens:
                                break
                    case "cancelled after a while" | "connection closed":
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(a_while):
                                await call.read()
            except grpc.aio.AioRpcError as error:
                self.failures[f"{ending}: {error.code().name}: {error.details()}"] += 1
            except asyncio.CancelledError:
                # The timeout cancels `read`, not this task.
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
            if ending != "connection closed":
                call.cancel()
        self.endings[ending] += 1


def held(workers: dict[int, str]) -> dict[str, dict[str, float]]:
    """Returns the resources of each process of the cluster. workers: names by process id."""
    found = {}
    for pid in family(os.getpid())[1:]:
        folder = Path(f"/proc/{pid}")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = (folder / "cmdline").read_text().split("\0")
            links = [_link(entry) for entry in (folder / "fd").iterdir()]
            name = workers.get(pid) or next(
                (one for one in words if one in ("router", "controller")), words[0][-40:]
            )
            pages = int((folder / "statm").read_text().split()[1])
            found[f"{name} {pid}"] = {
                "descriptors": len(links),
                "threads": len(list((folder / "task").iterdir())),
                "memory files": sum("kvrelay-" in link for link in links),
                "resident MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            }
    return found


def _link(entry: Path) -> str:
    # The descriptor may be closed in the meantime.
    with contextlib.suppress(OSError):
        return str(entry.readlink())
    return ""


async def at_rest(cluster: RunningCluster) -> dict[str, dict[str, float]]:
    """Waits until the cluster is idle and returns the resources of its processes."""
    status = await cluster.settled(prefill=1, seconds=120)
    assert status.router.running + status.router.waiting == 0, status.router
    workers = [one for pool in status.pools for one in pool.workers]
    broken = [one for one in workers if not one.load.integrity_ok]
    assert not broken, broken
    # Time in which unused connections are closed.
    await asyncio.sleep(6.0)
    return held({one.pid: one.worker_id for one in workers})


async def soak(cycles: int, kills: int, seed: int) -> bool:
    """Runs the benchmark. Returns whether nothing leaked and no request failed."""
    config = ClusterConfig.model_validate(
        {
            "model": {"path": "demo", "dtype": "float32"},
            "kv": {"memory": "64MiB"},
            "prefill": {"replicas": 1, "chunk_tokens": 128},
            "decode": {"replicas": 2},
            "listen": ANY_PORT,
        }
    )
    async with running_on(config) as cluster:
        draw = random.Random(seed)
        run = Soak(cluster.local.endpoints.grpc, draw)
        for done in range(kills):
            victim = draw.choice(await cluster.workers("decode"))
            os.kill(victim.pid, signal.SIGKILL)
            log.print(f"killed {victim.worker_id}, {done + 1} of {kills}")
            await run.run(int(cycles * WARM_UP / kills))
            await cluster.settled(prefill=1, seconds=120)
        await run.run(int(cycles * WARM_UP))
        before = await at_rest(cluster)
        run.endings.clear()
        while sum(run.endings.values()) < cycles:
            await run.run(min(1000, cycles - sum(run.endings.values())))
            log.print(f"{sum(run.endings.values())} requests")
        after = await at_rest(cluster)
    for ending, count in sorted(run.endings.items()):
        print(f"{count:6} {ending}")
    for failure, count in run.failures.items():
        print(f"{count:6} FAILED: {failure}")
    return told(before, after) and not run.failures


def told(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> bool:
    """Prints the resources of the processes. Returns whether no process grew more than allowed."""
    well = True
    for process in sorted(before.keys() & after.keys()):
        was, now = before[process], after[process]
        grown = [name for name, more in MAY_GROW.items() if now[name] > was[name] + more]
        well = well and not grown
        figures = ", ".join(f"{name} {was[name]:.0f} → {now[name]:.0f}" for name in MAY_GROW)
        print(f"{process:>40}: {figures}{'  LEAKED: ' + ', '.join(grown) if grown else ''}")
    return well


@app.command()
def main(
    cycles: Annotated[
        int, typer.Option(min=10, help="Number of requests between the two counts.")
    ] = 10_000,
    kills: Annotated[
        int, typer.Option(min=1, help="Number of decode workers killed before the first count.")
    ] = 5,
    seed: int = 0,
) -> None:
    """Send requests with different endings and check for leaks."""
    raise typer.Exit(0 if asyncio.run(soak(cycles, kills, seed)) else 1)


if __name__ == "__main__":
    app()
