"""The turns of a conversation through a real cluster: each computes and sends only what is new in
it.
"""

from __future__ import annotations

import random
import re

import httpx
import pytest
from support.running_cluster import RunningCluster

from kvrelay.client import Completion

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

SIZE = 32  # tokens in a block


async def complete(cluster: RunningCluster, token_ids: list[int], max_tokens: int) -> Completion:
    return await cluster.client.generate(
        token_ids=token_ids, temperature=0.0, max_tokens=max_tokens, ignore_eos=True
    ).result()


async def fetched_tokens(cluster: RunningCluster) -> float:
    async with httpx.AsyncClient(base_url=cluster.local.endpoints.http, timeout=60) as http:
        text = (await http.get("/metrics")).text
    found = re.search(r"^kvrelay_prefix_fetched_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


async def test_the_second_turn_computes_and_sends_only_what_is_new(cluster: RunningCluster) -> None:
    """The answer's KV is on the decode worker alone: the prefill worker fetches it from there."""
    draw = random.Random(11)
    prompt = [draw.randrange(300) for _ in range(300)]
    first = await complete(cluster, prompt, 1200)
    assert first.path == "disaggregated"
    assert first.usage.cached_tokens == 0
    before = await fetched_tokens(cluster)

    longer = [*prompt, *first.token_ids, *(draw.randrange(300) for _ in range(100))]
    second = await complete(cluster, longer, 8)
    # The last token's KV was never computed
    held = (len(prompt) + len(first.token_ids) - 1) // SIZE * SIZE
    assert second.path == "disaggregated"
    assert second.usage.cached_tokens == held
    assert second.why.endswith(f"holds {held} of its {len(longer)} tokens")
    assert second.ledger is not None
    assert second.ledger.handoff is not None
    assert second.ledger.handoff.cached_blocks == held // SIZE
    assert second.ledger.handoff.blocks == -(-len(longer) // SIZE) - held // SIZE
    phases = dict(second.ledger.phases)
    assert phases["fetch"] > 0
    assert sum(phases.values()) == pytest.approx(second.ledger.ttft_seconds)
    assert await fetched_tokens(cluster) - before == held - len(prompt) // SIZE * SIZE

    third = await complete(cluster, [*longer, *second.token_ids, 5, 6, 7], 8)
    assert third.path == "local", "what is new is too short to be worth a hand-off"
    assert third.usage.cached_tokens >= len(longer) // SIZE * SIZE
    alone = await complete(cluster, [300, *longer], 1)
    assert alone.usage.cached_tokens == 0, "a token before it makes it another sequence"
    for pool in (await cluster.settled()).pools:
        for worker in pool.workers:
            assert worker.load.integrity_ok, worker.load.integrity_error
