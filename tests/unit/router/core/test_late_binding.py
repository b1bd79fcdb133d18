"""Prompts stay in the router's queue until a prefill worker is about to need them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dispatched import SHORT, request
from support.fake_worker import worker_info
from support.router_cluster import STEP_S, VirtualCluster

from kvrelay.tenants import Tenant
from kvrelay.types.requests import SamplingParams
from router.core import placement
from router.core.effects import Effect
from router.core.path_policy import Assignment, Wait
from router.core.queueing.prefill_gate import MOST_HELD
from router.core.workers.worker_table import BACKLOG_TENANTS, Claim, Worker

CHUNK = 512
# Tokens that a prefill worker computes in a step: a chunk takes 8 steps.
PER_STEP = CHUNK // 8


def cluster_of(prefill: int, decode: int, slots: int = 64) -> VirtualCluster:
    cluster = VirtualCluster(prefill, decode, slots)
    cluster.prefill_tokens = PER_STEP
    return cluster


def submit(
    cluster: VirtualCluster,
    name: str,
    tokens: int,
    deadline: float = 10_000.0,
    tenant: str = "",
    priority: int = 0,
) -> None:
    first = len(cluster.records)
    prompt = tuple(range(first, first + tokens))
    one = request(name, prompt, priority, deadline=cluster.now + deadline)
    cluster.submit(replace(one, tenant=Tenant(tenant)))


def queued(cluster: VirtualCluster, worker_id: str) -> int:
    worker = cluster.dispatcher._workers.get(worker_id)
    assert worker is not None
    return len(worker.prompts)


def test_a_busy_worker_gets_one_prompt_ahead_and_the_others_hold_no_batch_slot() -> None:
    cluster = cluster_of(1, 1)
    for number in range(20):
        submit(cluster, f"long{number}", 900)
    cluster.run(2 * STEP_S)
    assert queued(cluster, "p0") == 2
    assert len(cluster.workers["d0"].sequences) == 2
    assert cluster.dispatcher.waiting_for_prefill[0] == 18
    cluster.settle()
    assert all(one.whole for one in cluster.records.values())


def test_short_prompts_for_one_chunk_go_to_the_worker_together() -> None:
    cluster = cluster_of(1, 1)
    for number in range(64):
        submit(cluster, f"medium{number}", 64)
    cluster.run(2 * STEP_S)
    assert queued(cluster, "p0") * 64 == 2 * CHUNK


def test_another_tenants_prompt_goes_to_the_busy_worker_which_serves_both_by_turns() -> None:
    cluster = cluster_of(1, 1)
    for number in range(9):
        submit(cluster, f"heavy{number}", 6000, tenant="heavy")
    for number in range(9):
        submit(cluster, f"light{number}", 600, tenant="light")
    cluster.run(2 * STEP_S)
    bound = [one.tenant for one in cluster.dispatcher._workers.get("p0").prompts]  # type: ignore[union-attr]
    assert bound == ["heavy", "light", "light"]
    assert cluster.dispatcher.waiting_for_prefill[0] == 15


def test_an_urgent_prompt_does_not_wait_for_the_others_of_its_tenant() -> None:
    cluster = cluster_of(1, 1)
    for number in range(9):
        submit(cluster, f"usual{number}", 6000, priority=5)
    submit(cluster, "urgent", 600, priority=1)
    submit(cluster, "other", 600, priority=6)
    cluster.run(2 * STEP_S)
    bound = [one.priority for one in cluster.dispatcher._workers.get("p0").prompts]  # type: ignore[union-attr]
    assert bound == [5, 1]


def test_prompts_of_many_tenants_wait_their_turn_too() -> None:
    cluster = cluster_of(1, 1)
    for number in range(30):
        submit(cluster, f"one{number}", 6000, tenant=f"tenant{number}")
    cluster.run(2 * STEP_S)
    assert queued(cluster, "p0") == BACKLOG_TENANTS
    assert cluster.dispatcher.waiting_for_prefill[0] == 30 - BACKLOG_TENANTS
    cluster.start("p1", "prefill")
    assert queued(cluster, "p1") == BACKLOG_TENANTS
    cluster.settle()
    assert all(one.whole for one in cluster.records.values())


def test_a_prompt_that_ends_makes_room_for_the_next_at_once() -> None:
    """The queue does not wait for the next tick."""
    cluster = cluster_of(1, 1)
    cluster.dispatcher.tick = lambda now: []  # type: ignore[method-assign]
    endless = SamplingParams(max_tokens=10_000, seed=1)
    for number in range(6):
        prompt = tuple(range(number, number + 2000))
        cluster.submit(replace(request(f"long{number}", prompt, deadline=1e4), sampling=endless))
    cluster.run(STEP_S * 8 * 4 * 6)
    assert sum(bool(one.tokens) for one in cluster.records.values()) >= 5


def test_a_worker_that_joins_takes_from_the_queue_at_once() -> None:
    cluster = cluster_of(1, 2)
    for number in range(20):
        submit(cluster, f"long{number}", 4000)
    cluster.run(1.0)
    assert queued(cluster, "p0") == 1
    cluster.start("p1", "prefill")
    assert queued(cluster, "p1") == 1
    cluster.settle()
    ended = {one: cluster.records[f"long{one}"].ended_at for one in range(20)}
    assert sorted(ended, key=lambda one: ended[one]) == list(range(20)), "in order of arrival"


def test_who_needs_no_prefill_worker_does_not_wait_for_one() -> None:
    cluster = cluster_of(1, 1)
    for number in range(20):
        submit(cluster, f"long{number}", 4000)
    cluster.run(1.0)
    cluster.submit(request("short", SHORT))
    cluster.run(6 * STEP_S)
    assert cluster.records["short"].whole
    assert cluster.dispatcher.waiting_for_prefill[0] == 19
    assert cluster.dispatcher.waiting_for_prefill[1] == 19 * 4000


def test_who_waits_for_a_tenants_limit_does_not_wait_for_workers() -> None:
    cluster = cluster_of(1, 1)
    limited = Tenant("limited", max_running=2)
    for number in range(10):
        prompt = tuple(range(number, number + 4000))
        cluster.submit(replace(request(f"limited{number}", prompt, deadline=1e4), tenant=limited))
    assert cluster.dispatcher.waiting_at_limit == (0, 0), "one runs, and nine wait for prefill"
    cluster.submit(replace(request("short", SHORT), tenant=limited))
    cluster.step()
    assert cluster.dispatcher.waiting_at_limit == (9, 9 * 4000)
    assert cluster.dispatcher.waiting_for_prefill == (0, 0)
    cluster.settle()
    assert cluster.dispatcher.waiting_at_limit == (0, 0)


def test_where_decode_workers_have_no_room_nobody_waits_for_prefill() -> None:
    cluster = cluster_of(1, 1, slots=2)
    for number in range(20):
        submit(cluster, f"long{number}", 400)
    cluster.run(2 * STEP_S)
    assert (cluster.dispatcher.waiting, cluster.dispatcher.waiting_for_prefill[0]) == (18, 0)


def test_a_prompt_whose_turn_does_not_come_ends_at_its_deadline() -> None:
    cluster = cluster_of(1, 1)
    for number in range(4):
        submit(cluster, f"long{number}", 4000)
    submit(cluster, "hasty", 4000, deadline=5.0)
    cluster.run(6.0)
    ended = cluster.records["hasty"].end
    assert ended is not None
    assert ended.error is not None
    assert ended.error.code.name in ("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
    assert cluster.dispatcher.waiting_for_prefill[0] == 1
    cluster.kill("p0")
    cluster.settle()
    assert cluster.dispatcher.waiting_for_prefill[0] == 0


def test_the_fifth_tenant_is_served_in_its_turn() -> None:
    """The others keep the worker busy with new prompts that arrive all the time."""
    cluster = cluster_of(1, 1)
    for number in range(12 * 4):
        submit(cluster, f"before{number}", 200, tenant="abcd"[number % 4])
    cluster.run(0.5)
    submit(cluster, "fifth", 200, tenant="e")
    for number in range(200):
        submit(cluster, f"after{number}", 200, tenant="abcd"[number % 4])
        cluster.step()
    waited = cluster.records["fifth"].token_at[0] - 0.5
    assert waited < 12 * 4 * 200 / (PER_STEP / STEP_S)


def test_a_request_without_need_of_prefill_is_not_judged_by_the_queue_for_it() -> None:
    cluster = VirtualCluster(1, 1, slots=64, max_queue=20)
    cluster.prefill_tokens = PER_STEP
    for number in range(30):
        submit(cluster, f"long{number}", 2000)
    cluster.run(20.0)
    while cluster.dispatcher.waiting < 20:
        submit(cluster, f"more{len(cluster.records)}", 2000)
    submit(cluster, "long", 2000)
    cluster.submit(request("short", SHORT, deadline=cluster.now + 5.0))
    cluster.run(6 * STEP_S)
    assert "long" in cluster.refused
    assert cluster.records["short"].whole


def test_urgent_prompts_do_not_wait_for_less_urgent_ones_of_many_tenants() -> None:
    cluster = cluster_of(1, 1)
    for number in range(BACKLOG_TENANTS):
        submit(cluster, f"usual{number}", 6000, tenant=f"tenant{number}", priority=5)
    cluster.run(1.0)
    submit(cluster, "urgent", 600, tenant="urgent", priority=0)
    assert queued(cluster, "p0") == BACKLOG_TENANTS + 1


def test_a_long_queue_is_looked_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """When decode workers get room again, every prompt of the queue is new to the prefill
    workers.
    """
    cluster = cluster_of(1, 1, slots=5)
    endless = SamplingParams(max_tokens=10_000, seed=1)
    cluster.submit(replace(request("endless", SHORT), sampling=endless))
    for number in range(4):
        cluster.submit(request(f"short{number}", SHORT))
    for number in range(300):
        submit(cluster, f"long{number}", 6000, tenant=f"tenant{number % 3}")
    assert cluster.dispatcher.waiting_for_prefill == (0, 0)
    looks: list[int] = []
    decide = placement.assign

    def counted(*args: Any, **options: Any) -> Assignment | Wait:
        looks[-1] += 1
        return decide(*args, **options)

    monkeypatch.setattr(placement, "assign", counted)
    pump = cluster.dispatcher.pump

    def pumped(now: float) -> list[Effect]:
        looks.append(0)
        return pump(now)

    monkeypatch.setattr(cluster.dispatcher, "pump", pumped)
    # The tokens of the endless answer suffice to go on.
    monkeypatch.setattr(cluster.dispatcher, "tick", lambda _now: [])
    for _ in range(40):
        cluster.step()
    assert MOST_HELD <= max(looks) < 2 * MOST_HELD
    assert cluster.dispatcher._queue.deferred[0] == cluster.dispatcher.waiting == 297


def test_a_fast_worker_gets_prompts_for_the_time_between_two_looks() -> None:
    worker = Worker(worker_info("p0", "prefill"))
    decode = Worker(worker_info("d0", "decode"))

    def takes() -> int:
        worker.prompts.clear()
        while worker.takes_prompt("", 0, 2 * CHUNK, now=1.0):
            worker.queue_prompt(Claim(decode, worker, 1000, 1000, "", 0), now=1.0)
        return len(worker.prompts)

    assert takes() == 2
    load = replace(worker.info.load, prompt_tokens_per_second=200_000.0)
    worker.info = replace(worker.info, load=load)
    assert takes() == 6


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(9, 2000), st.integers(0, 9)),
        min_size=2,
        max_size=40,
    )
)
def test_the_prompts_of_a_tenant_start_in_order(arrivals: list[tuple[str, int, int]]) -> None:
    cluster = cluster_of(1, 1)
    for number, (tenant, tokens, steps) in enumerate(arrivals):
        submit(cluster, f"{tenant}{number}", tokens, tenant=tenant)
        for _ in range(steps):
            cluster.step()
    cluster.settle()
    for tenant in "abcdef":
        own = [one for name, one in cluster.records.items() if name.startswith(tenant)]
        starts = [one.token_at[0] for one in own]
        assert starts == sorted(starts)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(9, 6000), min_size=1, max_size=40),
    st.lists(st.sampled_from(["join", "leave", "more", "cancel"]), max_size=12),
    st.integers(1, 3),
)
def test_no_prefill_worker_idles_while_a_prompt_waits_in_the_queue(
    sizes: list[int], changes: list[str], prefill: int
) -> None:
    cluster = cluster_of(prefill, 2)
    for number, size in enumerate(sizes):
        submit(cluster, f"r{number}", size)
    for turn, change in enumerate(changes):
        workers = sorted(one for one in cluster.workers if one.startswith("p"))
        match change:
            case "join":
                cluster.start(f"p{9 + turn}", "prefill")
            case "leave" if len(workers) > 1:
                cluster.restart_s = 10_000.0
                cluster.kill(workers[0], expected=True)
            case "more":
                submit(cluster, f"more{turn}", 3000, tenant=f"tenant{turn % 3}")
            case "cancel":
                cluster.cancel(f"r{turn}")
        for _ in range(7):
            cluster.step()
            workers = sorted(one for one in cluster.workers if one.startswith("p"))
            if cluster.dispatcher.waiting:
                assert all(queued(cluster, one) for one in workers)
            for one in workers:
                worker = cluster.dispatcher._workers.get(one)
                assert worker is not None
                for tenant in {claim.tenant for claim in worker.prompts}:
                    own = [one.queued_tokens for one in worker.prompts if one.tenant == tenant]
                    assert sum(own[1:-1]) < 2 * CHUNK, "one prompt runs, and the last filled it up"
    cluster.restart_s = 1.0
    cluster.settle()
    assert cluster.dispatcher.waiting_for_prefill == (0, 0)
