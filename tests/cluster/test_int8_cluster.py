"""A cluster whose KV is int8, end to end."""

from __future__ import annotations

import pytest
from support.running_cluster import ANY_PORT, running_on

from kvrelay.config.schema import ClusterConfig

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

# Of the demo model: tokens, layers, K and V, heads, dim, bytes
BFLOAT16_BLOCK_BYTES = 16 * 5 * 2 * 2 * 64 * 2


async def test_an_int8_cluster_answers_and_hands_over_half_the_bytes() -> None:
    config = ClusterConfig.model_validate(
        {
            "kv": {"dtype": "int8", "block_size": 16, "memory": "64MiB"},
            "prefill": {"chunk_tokens": 64},
            "listen": ANY_PORT,
        }
    )
    prompt = [40 + i % 90 for i in range(150)]
    async with running_on(config) as running:
        await running.settled(prefill=1, decode=1)
        done = await running.client.generate(
            token_ids=prompt, max_tokens=24, temperature=0.0, ignore_eos=True
        ).result()
        assert len(done.token_ids) == 24
        assert done.path == "disaggregated", done.why
        assert done.ledger is not None
        handoff = done.ledger.handoff
        assert handoff is not None
        assert handoff.blocks == 10
        assert handoff.bytes == 10 * handoff.block_bytes
        assert 0.5 < handoff.block_bytes / BFLOAT16_BLOCK_BYTES < 0.52
        answer = await running.client.generate(
            messages=[("user", "What is 3 plus 4?")], temperature=0.0
        ).result()
        assert answer.text == "3 plus 4 is 7."
        status = await running.settled(prefill=1, decode=1)
        assert status.block_bytes == handoff.block_bytes
