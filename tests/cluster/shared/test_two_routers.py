"""Routers side by side on one Redis. An answer outlives its router: the client goes on at another
one, or at the same one once it is started again, from the same token; and two that know nothing of
each other's requests give no worker more than it has room for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import httpx
import pytest
from faults.fleet import Fleet, running_fleet
from faults.history import WorkerSample
from faults.prompts import tokens
from support.router_processes import running_by_process
from support.running_cluster import RunningCluster

from kvrelay.client import AsyncClient, Completion

SLOTS = 3  # of each decode worker, which each router could fill alone
KINDS, CLIENTS, REQUESTS, LENGTH = 6, 14, 60, 40

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]
PROMPT = list(range(20, 120))
TOKENS = 1500  # far more than come before the router is killed


@pytest.mark.long
async def test_a_router_killed_amid_answers_changes_no_token(cluster: RunningCluster) -> None:
    first, second = cluster.local.endpoints, await cluster.local.add_router(cluster.local.config)
    ways = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 7})
    async with AsyncClient(first.grpc) as alone, AsyncClient([second.grpc, first.grpc]) as either:
        async with AsyncClient(second.grpc) as other:
            # From here on, the second router has workers, and answers first.
            await other.generate(token_ids=PROMPT, max_tokens=1)
        whole = [
            await alone.generate(token_ids=PROMPT, max_tokens=TOKENS, ignore_eos=True, **way)  # type: ignore[arg-type]
            for way in ways
        ]
        streams = [
            either.generate(token_ids=PROMPT, max_tokens=TOKENS, ignore_eos=True, **way)  # type: ignore[arg-type]
            for way in ways
        ]
        begun = await asyncio.gather(*map(anext, streams))
        seen = [len(event.token_ids) for event in begun]
        cluster.local._routers[-1].kill()
        relayed = [await stream.result() for stream in streams]
    assert all(0 < number < TOKENS for number in seen)
    for expected, answer in zip(whole, relayed, strict=True):
        assert answer.calls == 2
        assert answer.token_ids == expected.token_ids
        assert answer.text == expected.text
    await cluster.settled()


async def test_a_router_that_is_killed_starts_again_and_its_streams_go_on(
    cluster: RunningCluster,
) -> None:
    """At the same ports, though the kernel chose them at the first start."""
    (router, *_) = cluster.local._routers
    (killed,) = router.children
    async with AsyncClient(cluster.local.endpoints.grpc) as client:
        whole = await client.generate(token_ids=PROMPT, max_tokens=TOKENS, ignore_eos=True, seed=1)
        stream = client.generate(token_ids=PROMPT, max_tokens=TOKENS, ignore_eos=True, seed=1)
        seen = len((await anext(stream)).token_ids)
        killed.process.kill()
        relayed = await stream.result()
    assert 0 < seen < TOKENS
    assert relayed.calls > 1
    assert relayed.token_ids == whole.token_ids
    assert router.children != [killed]
    assert (await killed.end()).message == "the router was ended by SIGKILL"
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.get(f"{cluster.local.endpoints.http}/health")).status_code == 200
    await cluster.settled()


@pytest.mark.long
async def test_one_of_several_processes_is_killed(cluster: RunningCluster) -> None:
    config = cluster.local.config
    router = config.router.model_copy(update={"processes": 2})
    endpoints = await cluster.local.add_router(config.model_copy(update={"router": router}))
    group = cluster.local._routers[-1]
    way = {"token_ids": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0}
    async with AsyncExitStack() as exits:
        clients = [await exits.enter_async_context(AsyncClient(endpoints.grpc)) for _ in range(6)]
        whole = await clients[0].generate(**way)  # type: ignore[arg-type]
        streams = [one.generate(**way) for one in clients]  # type: ignore[arg-type]
        await asyncio.gather(*map(anext, streams))
        running = await running_by_process(endpoints.http)
        number = max(running, key=running.__getitem__)
        group.children[number].process.kill()
        answers = [await one.result() for one in streams]
    assert {tuple(one.token_ids) for one in answers} == {tuple(whole.token_ids)}
    # On a busy machine, some may have ended before.
    assert 0 < sum(one.calls > 1 for one in answers) <= running[number]
    await cluster.settled()
    await group.stop()


@pytest.mark.long
async def test_two_routers_under_load_overbook_nobody_and_one_is_killed() -> None:
    async with running_fleet(decode={"max_batch": SLOTS}) as fleet:
        first, second = fleet.router, await fleet.add_router()
        await fleet.complete()
        ways = [
            [first.endpoints.grpc, second.endpoints.grpc],
            [second.endpoints.grpc, first.endpoints.grpc],
        ]
        async with AsyncClient(ways[0]) as one, AsyncClient(ways[1]) as other:

            async def ask(client: AsyncClient, kind: int) -> Completion:
                prompt = tokens(30 + 60 * kind, 40 + kind)  # some are handed over, some are not
                draw = {"temperature": 0.8, "seed": kind} if kind % 2 else {"temperature": 0.0}
                return await client.generate(
                    token_ids=prompt, max_tokens=LENGTH, ignore_eos=True, **draw
                ).result()  # type: ignore[arg-type]

            expected = [(await ask(one, kind)).token_ids for kind in range(KINDS)]
            answers: list[tuple[int, Completion]] = []
            left = iter(range(REQUESTS))

            async def work(client: AsyncClient) -> None:
                while (number := next(left, None)) is not None:
                    answers.append((number % KINDS, await ask(client, number % KINDS)))

            over = asyncio.Event()
            sampling = asyncio.create_task(_samples(fleet, over))
            load = [
                asyncio.create_task(work((one, other)[number % 2])) for number in range(CLIENTS)
            ]
            await fleet.until(lambda: len(answers) >= REQUESTS // 3, "a third is answered", 120)
            first.child.kill()
            await asyncio.gather(*load)
            over.set()
            samples = await sampling

    assert len(answers) == REQUESTS
    assert Counter(answer.finish_reason for _, answer in answers) == {"length": REQUESTS}
    assert [answer.token_ids for _, answer in answers] == [expected[kind] for kind, _ in answers]
    assert any(answer.calls > 1 for _, answer in answers), "the killed router had requests"
    most = {
        name: max(sample.busy for sample in samples if sample.worker_id == name)
        for name in ("decode-0", "decode-1")
    }
    assert most == {"decode-0": SLOTS, "decode-1": SLOTS}, (
        "all batch slots are taken, and no batch slot twice"
    )
    assert all(
        sample.blocks_held <= sample.blocks_total and not sample.integrity_error
        for sample in samples
    )
    assert all(sample.blocks_held == 0 for sample in samples[-2:])


async def _samples(fleet: Fleet, over: asyncio.Event) -> list[WorkerSample]:
    """Of the decode workers, again and again until it is over and they are at rest."""
    samples: list[WorkerSample] = []
    async with asyncio.timeout(120):
        while not (over.is_set() and samples and all(one.at_rest for one in samples[-2:])):
            samples += await asyncio.gather(*(worker.sample() for worker in fleet.pool("decode")))
            await asyncio.sleep(0.01)
    return samples
