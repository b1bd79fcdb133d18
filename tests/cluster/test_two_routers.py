"""An answer outlives its router: the client goes on at another one, from the same token."""

from __future__ import annotations

import pytest
from running_cluster import RunningCluster

from kvrelay.client import AsyncClient

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]
PROMPT = list(range(20, 120))


async def test_a_router_killed_amid_answers_changes_no_token(cluster: RunningCluster) -> None:
    first, second = cluster.local.endpoints, await cluster.local.add_router(cluster.local.config)
    ways = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 7})
    async with AsyncClient(first.grpc) as alone, AsyncClient([second.grpc, first.grpc]) as either:
        whole = [
            await alone.generate(token_ids=PROMPT, max_tokens=200, ignore_eos=True, **way)  # type: ignore[arg-type]
            for way in ways
        ]
        streams = [
            either.generate(token_ids=PROMPT, max_tokens=200, ignore_eos=True, **way)  # type: ignore[arg-type]
            for way in ways
        ]
        seen = [len((await anext(stream)).token_ids) for stream in streams]
        cluster.local._routers[-1].kill()
        relayed = [await stream.result() for stream in streams]
    assert all(0 < number < 200 for number in seen)
    for expected, answer in zip(whole, relayed, strict=True):
        assert answer.calls == 2
        assert answer.token_ids == expected.token_ids
        assert answer.text == expected.text
    await cluster.settled()
