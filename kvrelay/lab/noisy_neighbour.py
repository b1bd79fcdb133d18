"""Streams of one client, and long prompts of another, on a real cluster in two forms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random

from kvrelay.bench.run import Progress
from kvrelay.client import AsyncClient
from kvrelay.config.config_file import load_config
from kvrelay.config.schema import ClusterConfig
from kvrelay.lab.figures import NeighbourFigures
from kvrelay.launch.local_cluster import LocalCluster

FORMS: Mapping[str, Mapping[str, object]] = {
    "disaggregated": {"prefill.replicas": 1, "decode.replicas": 1},
    "colocated": {"prefill.replicas": 0, "decode.replicas": 2},
}
"""Two workers with a core each: one of each pool, or two that do both."""
_STREAMS = 4
# Clients that send prompts, each as soon as it has the first token of the one before.
_NEIGHBOURS = 2
_STREAM_PROMPT = 32
# Times that the progress moves while streams are alone, and while they are beside prompts. Drawing
# it delays a token by a millisecond, so it does not move with each token.
_MOVES = 12
# Answers are long, so that few new ones begin.
_ANSWER_TOKENS = 2048


def cluster_form(form: str, overrides: Mapping[str, object]) -> ClusterConfig:
    """Returns the configuration of a form. `overrides`: values by dotted keys."""
    return load_config(None, {**overrides, **FORMS[form]})


async def measure_neighbour(
    config: ClusterConfig,
    form: str,
    vocab_size: int,
    prompt_tokens: int,
    seconds: tuple[float, float],
    progress: Progress,
) -> NeighbourFigures:
    """Starts a cluster and measures its streams: alone, then beside prompts.

    seconds: of both parts. Raises what LocalCluster raises.
    """
    started = progress(f"starting a cluster, {form}", 1)
    async with (
        LocalCluster(config, quiet=True) as cluster,
        AsyncClient(cluster.endpoints.grpc) as client,
    ):
        (model,) = await client.models()
        load = _Load(client, vocab_size, model.max_model_len)
        # Connects, and compiles what the first requests need.
        await asyncio.gather(*(load.prompt(prompt_tokens) for _ in range(_NEIGHBOURS)))
        started()
        done = progress(f"streams beside long prompts, {form}", 2 * _MOVES)
        load.began = time.perf_counter()
        streams = [asyncio.create_task(load.streams()) for _ in range(_STREAMS)]
        failed = await _some_time(streams, seconds[0], done)
        prompts_from = time.perf_counter() - load.began
        load.ttft.clear()
        prompts = [asyncio.create_task(load.prompts(prompt_tokens)) for _ in range(_NEIGHBOURS)]
        failed |= await _some_time([*streams, *prompts], seconds[1], done)
        for task in [*streams, *prompts]:
            task.cancel()
        await asyncio.wait([*streams, *prompts])
        for task in failed:
            task.result()
    return NeighbourFigures(form, tuple(load.gaps), prompts_from, tuple(sorted(load.ttft)))


async def _some_time(
    tasks: Sequence[asyncio.Task[None]], seconds: float, done: Callable[[], None]
) -> set[asyncio.Task[None]]:
    """Lets endless tasks run. Calls `done` _MOVES times. Returns early with tasks that have
    failed.
    """
    for _ in range(_MOVES):
        failed, _ = await asyncio.wait(
            tasks, timeout=seconds / _MOVES, return_when=asyncio.FIRST_EXCEPTION
        )
        if failed:
            return failed
        done()
    return set()


class _Load:
    def __init__(self, client: AsyncClient, vocab_size: int, max_model_len: int) -> None:
        self._client = client
        self._vocab_size = vocab_size
        self._answer = min(_ANSWER_TOKENS, max_model_len - _STREAM_PROMPT - 1)
        self._random = Random(0)
        self.began = 0.0
        self.gaps: list[tuple[float, float]] = []
        self.ttft: list[float] = []

    async def streams(self) -> None:
        """Streams answers, one after the other."""
        while True:
            before = None
            async with self._client.generate(
                token_ids=self._tokens(_STREAM_PROMPT),
                max_tokens=self._answer,
                temperature=0.0,
                ignore_eos=True,
            ) as stream:
                async for _ in stream:
                    now = time.perf_counter()
                    if before is not None:
                        self.gaps.append((now - self.began, now - before))
                    before = now

    async def prompts(self, tokens: int) -> None:
        """Sends prompts, one after the other."""
        while True:
            await self.prompt(tokens)

    async def prompt(self, tokens: int) -> None:
        """Sends a prompt that no cache holds, and waits for its first token."""
        sent = time.perf_counter()
        async with self._client.generate(
            token_ids=self._tokens(tokens), max_tokens=1, temperature=0.0, ignore_eos=True
        ) as stream:
            async for _ in stream:
                self.ttft.append(time.perf_counter() - sent)

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=count)
