"""A standby worker takes the place of a decode worker that dies under a stream.

Shorter tests show the parts: test_actuator_standby.py the choice, test_template.py the process that
joins a pool, and row 1 of the fault matrix the stream.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.running_cluster import ANY_PORT, running_on

from kvrelay.config.schema import ClusterConfig
from kvrelay.wire.cluster import ClusterStatus

PROMPT = [(7 * i) % 300 for i in range(200)]
SAMPLED = {"temperature": 1.1, "seed": 11, "max_tokens": 1200, "ignore_eos": True}

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def stands_by(status: ClusterStatus) -> bool:
    return [one.state for one in status.standby] == ["ready"]


async def test_the_stream_goes_on_at_the_former_standby_worker_which_is_replaced(
    tmp_path: Path,
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("standby: 1\n")
    config = ClusterConfig.model_validate(
        {
            "model": {"path": "demo", "dtype": "float32"},
            "kv": {"memory": "128MiB"},
            "prefill": {"chunk_tokens": 128},
            "autoscaling": str(policy),
            "listen": ANY_PORT,
        }
    )
    async with running_on(config) as cluster:
        expected = await cluster.client.generate(token_ids=PROMPT, **SAMPLED).result()
        before = await cluster.until(stands_by, "one stands by", 120)
        assert [len(pool.workers) for pool in before.pools] == [1, 1], "it is no pool's capacity"
        (standby,), (doomed,) = before.standby, before.pools[1].workers
        async with cluster.client.generate(token_ids=PROMPT, **SAMPLED) as running:
            await anext(running)
            os.kill(doomed.pid, signal.SIGKILL)
            completion = await running.result()
        assert completion.token_ids == expected.token_ids
        assert completion.ledger is not None
        assert [one.decode_worker for one in completion.ledger.attempts] == [
            doomed.worker_id,
            standby.worker_id,
        ]
        after = await cluster.until(stands_by, "another stands by", 120)
        (successor,) = after.pools[1].workers
        assert (successor.worker_id, successor.pid) == (standby.worker_id, standby.pid)
        assert after.standby[0].pid not in (standby.pid, doomed.pid)
        assert successor.epoch > doomed.epoch
        again = await cluster.client.generate(token_ids=PROMPT, **SAMPLED).result()
        assert again.token_ids == expected.token_ids
