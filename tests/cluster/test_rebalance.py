"""A worker changes over to the other pool under load: the same process, the same weights, and
nobody notices.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.running_cluster import ANY_PORT, running_on

from kvrelay.client import Completion
from kvrelay.config.config_file import load_config

CLUSTER = """
model: {path: demo, dtype: float32}
kv: {memory: 128MiB}
prefill: {replicas: 2, kv: {memory: 64MiB, block_size: 64}}
decode: {replicas: 1, max_batch: 2}
autoscaling: policy.yaml
"""
POLICY = """
rebalance: true
interval_s: 0.25
prefill:
  {min_replicas: 1, max_replicas: 2, metrics: [{name: queue_depth, target: 2}],
   downscale_delay_s: 600}
decode:
  {min_replicas: 1, max_replicas: 2, metrics: [{name: queue_depth, target: 2}],
   upscale_delay_s: 1}
"""
ASKED_AT_ONCE = 6

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


async def test_two_and_one_become_one_and_two_and_no_request_notices(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    config = load_config(
        tmp_path / "cluster.yaml", {f"listen.{name}": address for name, address in ANY_PORT.items()}
    )
    async with running_on(config) as cluster:

        def ask(number: int) -> asyncio.Task[Completion]:
            prompt = list(range(10 + number, 110 + 3 * number))
            call = cluster.client.generate(
                token_ids=prompt, max_tokens=150, ignore_eos=True, seed=number
            )
            return asyncio.create_task(call.result())

        before = await cluster.settled(prefill=2, decode=1)
        expected = [await ask(number) for number in range(ASKED_AT_ONCE)]
        assert (await cluster.status()).decisions == (), "one request at a time leaves no queue"

        enough, answers = asyncio.Event(), list[tuple[int, Completion]]()

        async def keep_asking(number: int) -> None:
            while not enough.is_set():
                answers.append((number, await ask(number)))

        load = [asyncio.create_task(keep_asking(number)) for number in range(ASKED_AT_ONCE)]
        await cluster.until(
            lambda now: [len(pool.workers) for pool in now.pools] == [1, 2], "one changes over", 120
        )
        changed = len(answers)
        while len(answers) < changed + ASKED_AT_ONCE:
            await asyncio.sleep(0.1)
        enough.set()
        await asyncio.gather(*load)
        after = await cluster.settled(prefill=1, decode=2)

        assert [one.token_ids for _, one in answers] == [
            expected[number].token_ids for number, _ in answers
        ]
        was = {one.worker_id: one for pool in before.pools for one in pool.workers}
        now = {one.worker_id: one for pool in after.pools for one in pool.workers}
        assert {name: one.pid for name, one in now.items()} == {
            name: one.pid for name, one in was.items()
        }
        (turned,) = (one for name, one in now.items() if one.pool != was[name].pool)
        assert turned.pool == "decode"
        assert turned.epoch > max(one.epoch for one in was.values())
        served = {
            attempt.decode_worker
            for _, one in answers
            if one.ledger
            for attempt in one.ledger.attempts
        }
        assert turned.worker_id in served

        assert cluster.local._log is not None
        cluster.local._log.seek(0)
        log = cluster.local._log.read().decode()
        assert log.count("weights_loaded") == len(was)
        reasons = {one.pool: one.reason for one in after.decisions}
        assert set(reasons) == {"prefill", "decode"}
        assert reasons["prefill"].endswith("1 of 2 can be spared, and decode grows")
