"""What a tenant waits for beside one that fills the batch, in virtual time and over real workers'
code.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from simulation.hostile import STEP_S, run

from router.core.queueing.preemption import MIN_RUN_S

# A step is under way, its successor brings the place, and what was preempted before may stay until
# it has got on.
BESIDE_S = 4 * STEP_S[1] + MIN_RUN_S


@pytest.fixture(autouse=True)
def _collected_between_histories() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.long
def test_a_tenant_that_fills_the_batch_does_not_keep_others_out(seed: int) -> None:
    alone, _ = run(seed, flood=False)
    beside, result = run(seed, flood=True)
    assert not result.complaints
    assert all(client.record.ends[0].outcome == "length" for client in beside.clients)
    assert result.faults["a request gave way to another tenant"]
    assert max(beside.waits) <= max(alone.waits) + BESIDE_S
