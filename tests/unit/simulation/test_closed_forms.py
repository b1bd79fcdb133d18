"""Simulated waits beside queueing theory, and the bounds of a scenario."""

from __future__ import annotations

import heapq
import math
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import simulated

from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.workload import PlannedRequest
from kvrelay.simulation.scenario import MAX_BLOCKS, Delays

PROMPT = 64
# One prompt is one chunk, the router does not choose the path, and only prefills take time.
CONFIG: dict[str, Any] = {
    "slo": None,
    "router": {
        "local_below_tokens": 0,
        "max_queue": 10**6,
        "default_deadline_s": 1e9,
    },
    "prefill": {"chunk_tokens": PROMPT},
    "kv": {"memory": "64MiB", "prefix_cache": False},
}
FREE = {
    "prefill_token_s": 0.0,
    "prefill_token_context_s": 0.0,
    "decode_base_s": 0.0,
    "decode_sequence_s": 0.0,
    "decode_context_token_s": 0.0,
    "handoff_base_s": 0.0,
    "handoff_byte_s": 0.0,
}


def simulated_waits(times: list[float], service_s: float, workers: int, policy: str) -> Report:
    """Simulates prompts that each take `service_s`. A chunk never holds two of them."""
    random = Random(0)
    plan = [
        PlannedRequest(at, None, tuple(random.choices(range(simulated.VOCAB), k=PROMPT)), 1, index)
        for index, at in enumerate(times)
    ]
    worker = simulated.profile(prefill_base_s=service_s, **FREE)
    config = {**CONFIG, "router": {**CONFIG["router"], "policy": policy}}
    return simulated.run(
        simulated.scenario(workers, 1, worker, config=config, delays=Delays(0.0, 0.0, 0.0)), plan
    )


def first_come_first_served(times: list[float], service_s: float, workers: int) -> list[float]:
    """Returns the times in the system, by the recursion of Kiefer and Wolfowitz (1955)."""
    free = [0.0] * workers
    found = []
    for at in times:
        end = max(heapq.heappop(free), at) + service_s
        heapq.heappush(free, end)
        found.append(end - at)
    return found


@settings(max_examples=12, deadline=None)
@given(
    workers=st.integers(1, 4),
    # Idle, busy, and overloaded.
    load=st.sampled_from([0.01, 0.5, 0.9, 1.3]),
    batch=st.integers(1, 5),
    seed=st.integers(0, 2**20),
    policy=st.sampled_from(["kv_aware", "least_loaded", "round_robin"]),
)
def test_equal_prompts_wait_exactly_as_in_one_queue(
    workers: int, load: float, batch: int, seed: int, policy: str
) -> None:
    # Short: before a worker has reported its rate, the router does not know when a prompt ends.
    service_s = 1e-3
    random = Random(seed)
    rate = load * workers / service_s / batch
    times, at = [], 0.0
    for _ in range(40 // batch):
        at += random.expovariate(rate)
        times += [at] * batch
    report = simulated_waits(times, service_s, workers, policy)
    assert all(row.path == "disaggregated" for row in report.rows)
    # Requests that arrive together may be served in any order. The times at which requests leave
    # do not depend on the order, since all prompts are equal.
    waits = first_come_first_served(times, service_s, workers)
    expected = sorted(at + wait for at, wait in zip(times, waits, strict=True))
    left = sorted(row.scheduled_s + (row.ttft_s or 0.0) for row in report.rows)
    assert left == pytest.approx(expected, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_worker_waits_as_m_d_1(load: float) -> None:
    """Mean wait: load x service / (2 (1 - load)), Pollaczek and Khinchine."""
    random, at, times = Random(5), 0.0, []
    for _ in range(20_000):
        at += random.expovariate(load)
        times.append(at)
    report = simulated_waits(times, 1.0, 1, "kv_aware")
    mean = math.fsum(row.ttft_s or 0.0 for row in report.rows) / len(times) - 1.0
    assert mean == pytest.approx(load / (2 * (1 - load)), rel=0.08)


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_a_memory_that_depends_on_the_machine_is_refused(pool: str) -> None:
    with pytest.raises(InvalidArgument, match=f"kv.memory of the {pool} pool is auto"):
        simulated.scenario(config={pool: {"kv": {"memory": "auto"}}})


@given(st.integers(1, 2**62), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_the_blocks_of_all_workers_are_bounded(memory: int, workers: int) -> None:
    config = {"kv": {"memory": memory, "block_size": 16}}
    each = memory // (16 * simulated.KV_TOKEN_BYTES)
    if 0 < 2 * workers * each <= MAX_BLOCKS:
        simulated.scenario(workers, workers, config=config)
    else:
        with pytest.raises(InvalidArgument, match=r"holds no block|the most is"):
            simulated.scenario(workers, workers, config=config)


def test_the_error_names_only_workers_that_exist() -> None:
    with pytest.raises(InvalidArgument) as caught:
        simulated.scenario(0, 2, failures=[("prefill-0", 1.0)])
    assert "the workers are decode-0 to decode-1" in caught.value.message
