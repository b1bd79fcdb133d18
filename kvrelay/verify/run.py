"""Starts a cluster and sends the same requests over each of its paths."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import grpc

from kvrelay.client import AsyncClient, Completion
from kvrelay.client.base_client import channel_options
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import Internal
from kvrelay.launch.endpoints import Endpoints
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.types.workers import POOLS
from kvrelay.verify.cases import Case, make_cases
from kvrelay.verify.reference import Reference
from kvrelay.verify.report import Answers, Report, compare
from kvrelay.wire.cluster import ClusterServiceStub, cluster_status_from_proto, pb

_CONCURRENCY = 16
# Tokens; more than any prompt has.
_ALL = 2**30
_KILL_TRIES = 5
# Responses; fewer if there are few tokens.
_KILL_AT = 60
_REPLACED_WITHIN_S = 60.0
_GENERATE = "transformers' generate"
_LOCAL = "the local path"
_EXPECTED = f"generate where greedy, else {_LOCAL}"

Progress = Callable[[str, int], Callable[[], None]]
"""(what, of how many) to a function that is called after each."""


async def verify(config: ClusterConfig, requests: int, progress: Progress) -> Report:
    """Starts a cluster with two decode workers and three routers, and compares the answers.

    Raises Internal if an answer took another path than intended.
    """
    # The path must follow from the routers' thresholds alone.
    config = config.model_copy(update={"slo": None})
    local_only = _with(config, decode={"replicas": 2}, router={"local_below_tokens": _ALL})
    async with LocalCluster(local_only, quiet=True) as cluster:
        routers = {"local": cluster.endpoints}
        for transport in ("shm", "grpc"):
            routers[transport] = await cluster.add_router(
                _with(
                    cluster.config,
                    router={"local_below_tokens": 0},
                    transfer={"transport": transport},
                    listen={"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "admin": "127.0.0.1:0"},
                )
            )
        async with AsyncClient(cluster.endpoints.grpc) as client:
            (model,) = await client.models()
        max_len = model.max_model_len
        reference = await asyncio.to_thread(
            Reference, cluster.config.model.path, config.model.dtype
        )
        cases = make_cases(requests, reference.vocab_size, max_len)
        greedy = [case for case in cases if case.greedy]
        generate = await asyncio.to_thread(
            reference.greedy, greedy, progress("transformers generate", len(greedy))
        )

        completions = await _complete(routers["local"], cases, progress("local path", len(cases)))
        _check_path(completions, "local")
        local = _answers(completions)
        # `generate` does not support quantised KV. Then it only checks the local path, which is the
        # reference for the other paths.
        quantised = any(config.pool_kv(pool).dtype != "auto" for pool in POOLS)
        expected, expected_name = (
            (local, _LOCAL) if quantised else ({**local, **generate}, _EXPECTED)
        )
        reports = [compare("local", cases, local, generate, _GENERATE, reference.margin)]
        for transport in ("shm", "grpc"):
            completions = await _complete(
                routers[transport], cases, progress(f"hand-off over {transport}", len(cases))
            )
            _check_path(completions, transport)
            path = f"disaggregated, {transport}"
            reports.append(
                compare(
                    path, cases, _answers(completions), expected, expected_name, reference.margin
                )
            )
        kill_at = min(_KILL_AT, sum(map(len, local.values())) // 4)
        completions, hit = await _after_death(routers["shm"], cases, kill_at, progress)
        path, note = (
            "disaggregated, decode worker killed",
            f"{hit} {'request was' if hit == 1 else 'requests were'} on the killed worker",
        )
        reports.append(
            compare(
                path, cases, _answers(completions), expected, expected_name, reference.margin, note
            )
        )
        stopped = progress("stopping the cluster", 1)
    stopped()
    return Report(config.model.path, config.model.dtype, requests, tuple(reports))


async def _complete(
    router: Endpoints,
    cases: list[Case],
    done: Callable[[], None],
    streaming: Callable[[], None] = lambda: None,
) -> dict[str, Completion]:
    """Sends all cases through one router, at most _CONCURRENCY at a time. Calls `streaming` for
    each response.
    """
    slots = asyncio.Semaphore(_CONCURRENCY)
    completions: dict[str, Completion] = {}

    async def one(client: AsyncClient, case: Case) -> None:
        async with slots, client.generate(**case.options) as stream:
            async for _ in stream:
                streaming()
            completions[case.name] = await stream.result()
        done()

    async with AsyncClient(router.grpc) as client:
        await asyncio.gather(*(one(client, case) for case in cases))
    return completions


def _answers(completions: dict[str, Completion]) -> Answers:
    return {name: completion.token_ids for name, completion in completions.items()}


def _check_path(completions: dict[str, Completion], wanted: str) -> None:
    """Raises Internal unless each answer used the given transport, or the local path. Answers of
    one token have no hand-off and are not checked.
    """
    for name, completion in completions.items():
        handoff = completion.ledger.handoff if completion.ledger is not None else None
        took = handoff.transport if handoff is not None else completion.path
        if took != wanted and len(completion.token_ids) > 1:
            raise Internal(
                f"request {name} took the {took} path instead of the {wanted} path: "
                f"{completion.why}"
            )


async def _after_death(
    router: Endpoints, cases: list[Case], kill_at: int, progress: Progress
) -> tuple[dict[str, Completion], int]:
    """Kills a decode worker after `kill_at` responses. If no request was on the worker at that
    time, tries again with another worker after half as many responses.

    Returns the answers, and the number of requests that were on the killed worker. Raises Internal
    if no try hit a request.
    """
    killed: set[int] = set()
    for tried in range(_KILL_TRIES):
        victim = await _decode_worker_pid(router, killed)
        killed.add(victim)
        again = f", try {tried + 1}" if tried else ""
        kill_after = max(1, kill_at >> tried)
        responses = 0

        def streaming() -> None:
            nonlocal responses
            responses += 1
            if responses == kill_after:  # noqa: B023 - this try's
                os.kill(victim, signal.SIGKILL)  # noqa: B023

        completions = await _complete(
            router, cases, progress(f"decode worker killed{again}", len(cases)), streaming
        )
        hit = sum(
            len(completion.ledger.attempts) > 1
            for completion in completions.values()
            if completion.ledger is not None
        )
        if hit:
            return completions, hit
    raise Internal(f"no request was in flight on the killed worker in {_KILL_TRIES} tries")


async def _decode_worker_pid(router: Endpoints, killed: set[int]) -> int:
    """Returns the process id of a ready decode worker, once there are two that were not killed."""
    async with (
        grpc.aio.insecure_channel(router.admin, channel_options(router.admin)) as channel,
        asyncio.timeout(_REPLACED_WITHIN_S),
    ):
        while True:
            status = cluster_status_from_proto(
                await ClusterServiceStub(channel).GetStatus(pb.GetStatusRequest())
            )
            ready = [
                worker
                for pool in status.pools
                for worker in pool.workers
                if pool.name == "decode" and worker.state == "ready" and worker.pid not in killed
            ]
            if len(ready) > 1:
                return ready[0].pid
            await asyncio.sleep(0.2)


def _with(config: ClusterConfig, **sections: dict[str, object]) -> ClusterConfig:
    """Returns a copy of the configuration with some keys of some sections changed."""
    return config.model_copy(
        update={
            name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()
        }
    )
