"""How long the first use of a JSON schema delays the answers of others.

    python benchmarks/schema_delay.py
    python benchmarks/schema_delay.py --model PATH --requests 60

Some streams without a grammar run all the time. Beside them, requests with a JSON schema arrive one
after the other, in turn with a schema that was used before, and with one that no request had. The
figure of a request is the longest gap between two parts of another stream while the request runs.
What a new schema costs the others is the difference between the two kinds, which is printed with
its 95 % interval by bootstrap. One token counts as a part, so gaps contain the steps of the batch
and, on one machine, the work of this client.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from random import Random
from typing import Annotated

import typer
from first_requests import words
from rich.console import Console
from rich.table import Table

from kvrelay.cli.options.cluster import OWN_CLUSTER
from kvrelay.client import AsyncClient
from kvrelay.config.config_file import load_config
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.percentiles import percentile

_SHARES = (50, 90, 99)
_RESAMPLES = 1000
# Tokens of a stream; the next one follows at once.
_STREAM_TOKENS = 2000
_PAUSE_S = 0.1
_FIELDS = 20


def schema(random: Random) -> str:
    """Returns an object schema of _FIELDS properties with names and bounds that are new."""
    properties = {
        f"{random.choice(('name', 'age', 'city'))}_{random.randrange(10**9)}": random.choice(
            ({"type": "string", "maxLength": 8}, {"type": "integer", "maximum": 99}, {"enum": [1]})
        )
        for _ in range(_FIELDS)
    }
    return json.dumps({"type": "object", "properties": properties, "required": list(properties)})


class Streams:
    """Answers without a grammar, and the times of their parts."""

    def __init__(self, client: AsyncClient, count: int) -> None:
        self._client = client
        # Of each stream: (time of a part, seconds since the part before it).
        self._gaps: list[list[tuple[float, float]]] = [[] for _ in range(count)]
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(count)]

    def longest_gap(self, began: float, ended: float) -> float:
        """Returns the longest gap of a stream that overlaps the time, in seconds."""
        return max(
            gap for stream in self._gaps for end, gap in stream if end > began and end - gap < ended
        )

    async def close(self) -> None:
        """Ends the streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, number: int) -> None:
        while True:
            last: float | None = None
            prompt = f"{number} Once upon a time"
            async with self._client.generate(
                prompt=prompt, max_tokens=_STREAM_TOKENS, temperature=1.0, ignore_eos=True
            ) as stream:
                async for _ in stream:
                    now = time.perf_counter()
                    if last is not None:
                        self._gaps[number].append((now, now - last))
                    last = now


async def measure(
    model: str, streams: int, requests: int, seed: int
) -> dict[str, list[tuple[float, float]]]:
    """Returns for each kind of schema (seconds of the request, longest gap of another stream)."""
    random = Random(seed)
    known = schema(random)
    found: dict[str, list[tuple[float, float]]] = {"known": [], "new": []}
    async with (
        LocalCluster(
            load_config(None, {**OWN_CLUSTER, "model.path": model}), quiet=True
        ) as cluster,
        AsyncClient(cluster.endpoints.grpc) as client,
    ):

        async def ask(source: str) -> None:
            prompt = words(random, 100)
            async with client.generate(
                prompt=prompt, max_tokens=16, guidance={"json_schema": source}
            ) as stream:
                await stream.result()

        await ask(known)
        running = Streams(client, streams)
        await asyncio.sleep(2)
        for _ in range(requests):
            for kind in found:
                began = time.perf_counter()
                await ask(known if kind == "known" else schema(random))
                ended = time.perf_counter()
                # The gap that the end falls into has to end, too.
                await asyncio.sleep(_PAUSE_S)
                found[kind].append((ended - began, running.longest_gap(began, ended)))
        await running.close()
    return found


def difference(
    known: list[float], new: list[float], share: float, seed: int
) -> tuple[float, float, float]:
    """Returns by how much a percentile of the new ones is larger, and its 95 % interval."""
    random = Random(seed)

    def percentile_of(values: list[float]) -> float:
        return percentile(sorted(random.choices(values, k=len(values))), share)

    found = sorted(percentile_of(new) - percentile_of(known) for _ in range(_RESAMPLES))
    middle = percentile(sorted(new), share) - percentile(sorted(known), share)
    return middle, percentile(found, 2.5), percentile(found, 97.5)


def main(
    model: Annotated[str, typer.Option(help="Model that is served.")] = "demo",
    streams: Annotated[int, typer.Option(min=1, help="Streams without a grammar.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each kind.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of the schemas and prompts.")] = 0,
) -> None:
    """Print the longest gaps that other streams had during requests with a schema."""
    found = asyncio.run(measure(model, streams, requests, seed))
    table = Table("schema", "request, ms", "longest gap, median", "p90", "p99", "largest")
    gaps = {kind: sorted(1000 * gap for _, gap in rows) for kind, rows in found.items()}
    for kind, rows in found.items():
        table.add_row(
            kind,
            f"{1000 * statistics.median(seconds for seconds, _ in rows):.1f}",
            *(f"{percentile(gaps[kind], share):.1f}" for share in _SHARES),
            f"{max(gaps[kind]):.1f}",
        )
    differences = [difference(gaps["known"], gaps["new"], one, seed) for one in _SHARES]
    for row, name in enumerate(("difference", "at least", "at most")):
        table.add_row(name, "", *(f"{one[row]:+.1f}" for one in differences), "")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
