"""Hand-offs by vLLM's own NixlConnector: the same tokens, and nothing stays held after a fault."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import pytest
import pytest_asyncio
from faults.cancels import cancelled_in
from faults.checkers import Invariant
from faults.fleet import Fleet, record, running_fleet
from faults.fleet_worker import Forks
from faults.history import Case, Evidence
from faults.prompts import LONG, OTHER, PROMPT
from support.vllm_reference import WAIT_S, alone

from kvrelay.client import AsyncClient, Completion

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("nixl") is None, reason="needs nixl; `make test-vllm` has it"),
]
ANSWER = 24
BY_NIXL = {"transport": "vllm-nixl"}
ONE = {"replicas": 1}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(forks: Forks) -> AsyncIterator[Fleet]:
    """One worker of each pool."""
    async with running_fleet(forks, transfer=BY_NIXL, prefill=ONE, decode=ONE) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pairs(forks: Forks) -> AsyncIterator[Fleet]:
    """Two workers of each pool, so that others can continue."""
    async with running_fleet(forks, transfer=BY_NIXL) as fleet:
        yield fleet


def prompts(count: int, *lengths: int) -> list[list[int]]:
    draw = random.Random(18)
    return [[draw.randrange(3, 2000) for _ in range(draw.choice(lengths))] for _ in range(count)]


async def answers(fleet: Fleet, asked: list[list[int]], **sampling: Any) -> list[Completion]:
    """Eight at a time."""
    slots = asyncio.Semaphore(8)
    fixed = {"max_tokens": ANSWER, "ignore_eos": True, "timeout": WAIT_S}
    async with AsyncClient(fleet.router.endpoints.grpc) as client:

        async def ask(prompt: list[int]) -> Completion:
            async with slots:
                return await client.generate(token_ids=prompt, **{**fixed, **sampling}).result()

        return list(await asyncio.gather(*(ask(prompt) for prompt in asked)))


async def test_tokens_are_those_of_one_engine_alone(pair: Fleet) -> None:
    asked = prompts(32, 65, 96, 128, 300, 511, 700)
    order = {"model": pair.model, "prompts": asked, "max_tokens": ANSWER}
    (expected,) = await asyncio.to_thread(alone, order)
    found = await answers(pair, asked, temperature=0.0)
    assert [list(one.token_ids) for one in found] == expected
    block = pair.config.kv.block_size
    for prompt, one in zip(asked, found, strict=True):
        assert one.path == "disaggregated"
        assert one.ledger is not None
        handoff = one.ledger.handoff
        assert handoff is not None
        assert (handoff.transport, handoff.blocks) == ("vllm-nixl", -(-len(prompt) // block))
        assert handoff.bytes == handoff.blocks * handoff.block_bytes
        assert handoff.seconds > 0
    await nothing_held(pair)


async def test_an_answer_of_one_token_needs_no_read(pair: Fleet) -> None:
    found = await answers(pair, prompts(4, 130), temperature=0.0, max_tokens=1)
    assert [len(one.token_ids) for one in found] == [1] * 4
    await nothing_held(pair)


async def test_the_first_token_does_not_wait_for_the_read(pair: Fleet) -> None:
    case = Case(pair.config.transfer.lease_s)
    asked = pair.ask(case, "early!hold@committing", PROMPT)
    worker = await pair.reached(asked.history.request_id, "committing")
    await asked.tokens(1)
    assert asked.num_tokens == 1
    pair.let_go(worker)
    history = await asked.ended()
    assert (history.end.status, len(history.token_ids)) == ("length", 48)
    await nothing_held(pair)


@pytest.mark.parametrize(
    "state", ["prefilling", "handing off", "waiting to decode", "decoding", "finishing"]
)
async def test_a_cancelled_request_leaves_nothing(pair: Fleet, state: str) -> None:
    async with pair.case(Invariant.BLOCKS) as case:
        fault = record(case, f"cancelled while {state}")
        names = [one.request_id async for one in cancelled_in(pair, case, state, 5)]
        fault.evidence += [Evidence(time.monotonic(), f"{name} was cancelled") for name in names]
    assert len(names) == 5
    await nothing_held(pair)


async def test_blocks_whose_time_is_over_are_not_read(pairs: Fleet) -> None:
    """They may hold other KV by then, so the decode worker computes the prompt."""
    await pairs.learn(LONG)
    case = Case(pairs.config.transfer.lease_s)
    asked = pairs.ask(case, "late!tell@token:0!hold@joined", LONG)
    name = asked.history.request_id
    decode, sender = await pairs.reached(name, "joined"), await pairs.reached(name, "token:0")
    async with asyncio.timeout(WAIT_S):
        while (await sender.sample()).blocks_held:
            await asyncio.sleep(0.05)
    pairs.let_go(decode)
    history = await asked.ended()
    assert history.token_ids == history.expected
    assert "kv_read_failed" in (pairs.folder / f"{decode.worker_id}.log").read_text()
    await nothing_held(pairs)


async def test_what_the_decode_worker_has_cached_is_not_read(forks: Forks) -> None:
    """Another tenant's salt has no hits, and gives the same tokens."""
    kv = {"memory": "64MiB", "prefix_cache": True}
    async with running_fleet(forks, transfer=BY_NIXL, kv=kv, prefill=ONE, decode=ONE) as fleet:
        assert fleet.config.kv.block_size == 32
        prefix, rest = prompts(2, 128)
        (first,) = await answers(fleet, [prefix], temperature=0.0)
        (second,) = await answers(fleet, [prefix + rest[:100]], temperature=0.0)
        (other,) = await answers(fleet, [prefix + rest[:100]], temperature=0.0, cache_salt="other")
        assert [blocks_read(one) for one in (first, second, other)] == [4, 4, 8]
        assert second.token_ids == other.token_ids
        await nothing_held(fleet)


def blocks_read(found: Completion) -> int:
    assert found.ledger is not None
    assert found.ledger.handoff is not None
    return found.ledger.handoff.blocks


@pytest.mark.parametrize("at", ["committing", "joined", "token:9"])
async def test_a_killed_decode_worker_leaves_nothing(pairs: Fleet, at: str) -> None:
    await pairs.learn(PROMPT, OTHER)
    async with pairs.case(Invariant.ANSWER, Invariant.BLOCKS, Invariant.TOKENS) as case:
        asked = pairs.ask(case, f"killed!stop@{at}", PROMPT)
        worker = await pairs.reached(asked.history.request_id, at)
        assert worker.pool == "decode"
        pairs.ask(case, "beside", OTHER, bystander=True)
        await pairs.kill(case, worker)
        history = await asked.ended()
    assert len(history.attempts) == 2
    await nothing_held(pairs)


async def test_a_killed_prefill_worker_leaves_nothing(pairs: Fleet) -> None:
    """It dies when its blocks are about to be read. The decode worker computes the prompt, or the
    router begins again.
    """
    await pairs.learn(LONG, OTHER)
    async with pairs.case(Invariant.ANSWER, Invariant.BLOCKS, Invariant.TOKENS) as case:
        asked = pairs.ask(case, "killed!tell@token:0!hold@joined", LONG)
        name = asked.history.request_id
        decode = await pairs.reached(name, "joined")
        await asked.tokens(1)
        sender = await pairs.reached(name, "token:0")
        assert sender.pool == "prefill"
        pairs.ask(case, "beside", OTHER, bystander=True)
        await pairs.kill(case, sender)
        pairs.let_go(decode)
        await asked.ended()
    await nothing_held(pairs)


async def nothing_held(fleet: Fleet) -> None:
    """vLLM frees what it held for a worker that died when the time of the hold is over."""
    for worker in fleet.alive:
        await fleet.at_rest(worker)
        await fleet.left_in_vllm(worker)
