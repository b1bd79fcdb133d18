"""Tenants beside one that fills the batch: what they wait for, and what its streams go through. In
virtual time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.router_books import check_books
from support.router_cluster import STEP_S, Record, VirtualCluster

from kvrelay.errors import Cancelled
from kvrelay.tenants import Tenant
from kvrelay.types.requests import SamplingParams
from kvrelay.worker_messages import Abort, Refused, Reserve, RunLocal
from router.core.placement import Placement
from router.core.queueing.preemption import MIN_RUN_S, PROGRESS_TOKENS, TURN_S
from router.core.request import Request

HOG, OTHER = Tenant("hog"), Tenant("other")
SHORT, LONG = (1, 2, 3), tuple(range(40))
STEPS_S = 8 * STEP_S  # to be placed, prefilled, handed over and heard


def ask(
    cluster: VirtualCluster,
    tenant: Tenant,
    max_tokens: int,
    prompt: tuple[int, ...] = SHORT,
    priority: int = 0,
    deadline_s: float = 9_000.0,
) -> Record:
    name = f"{tenant.name}/{len(cluster.records)}"
    sampling = SamplingParams(max_tokens=max_tokens, seed=len(cluster.records))
    deadline = cluster.now + deadline_s
    cluster.submit(Request(name, prompt, sampling, cluster.now, deadline, priority, tenant=tenant))
    return cluster.records[name]


def running(cluster: VirtualCluster) -> Counter[str]:
    return Counter(one.share.tenant.name for one in cluster.dispatcher._running.values())


def preempted(cluster: VirtualCluster, one: Record) -> int:
    return cluster.dispatcher._entries[one.request.request_id].life.preemptions


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["local", "disaggregated"])
@pytest.mark.parametrize("decode", [1, 3])
@pytest.mark.sweep(4)
def test_short_requests_do_not_wait_for_the_end_of_long_answers_of_others(
    prompt: tuple[int, ...], decode: int
) -> None:
    cluster = VirtualCluster(1, decode, slots=4)
    hogs = [ask(cluster, HOG, 1200, prompt) for _ in range(8 * decode)]
    cluster.run(5.0)
    assert running(cluster) == {"hog": 4 * decode}, "all that is idle may be used"
    waits = []
    for _ in range(40):
        one = ask(cluster, OTHER, 1, prompt)
        while one.end is None:
            cluster.step()
            check_books(cluster.dispatcher)
            assert cluster.now - one.request.arrival < 60, "it waits for the end of a long answer"
        waits.append(one.ended_at - one.request.arrival)
        cluster.run(0.5)
    assert max(waits) <= STEPS_S
    assert not cluster.refused
    cluster.settle()
    assert all(one.whole for one in hogs), (
        "a stream that gave way goes on with the tokens that it would have had"
    )


def test_no_tenant_waits_for_the_next_search_of_another() -> None:
    """A search without a victim is not repeated at once, but only for the tenant that made it."""
    cluster = VirtualCluster(0, 1, slots=4)
    for _ in range(8):
        ask(cluster, HOG, 1200)
    cluster.run(5.0)
    first = ask(cluster, OTHER, 50)
    # In vain: the other tenant has less.
    cluster.dispatcher.pump(cluster.now)
    second = ask(cluster, OTHER, 1)
    assert running(cluster) == {"hog": 2, "other": 2}, "placed at its arrival"
    cluster.settle()
    assert first.whole
    assert second.whole


def test_requests_behind_a_blocked_one_of_their_tenant_cost_no_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = VirtualCluster(0, 1, slots=4)
    for _ in range(8):
        ask(cluster, HOG, 50)
    searches = 0
    decide = Placement._decide

    def counted(*arguments: Any) -> Any:
        nonlocal searches
        searches += 1
        return decide(*arguments)

    monkeypatch.setattr(Placement, "_decide", counted)
    many = [ask(cluster, HOG, 5) for _ in range(200)]
    for one in many[::2]:
        cluster.cancel(one.request.request_id)
    assert searches == 0
    cluster.settle()
    assert all(one.whole for one in many[1::2])


def test_without_others_nobody_gives_way() -> None:
    cluster = VirtualCluster(0, 2, slots=4)
    for number in range(40):
        ask(cluster, HOG, 5 + number % 90, priority=number % 3)
        cluster.run(0.1)
    cluster.settle()
    assert cluster.dispatcher.preemptions == 0


def test_it_can_be_switched_off() -> None:
    cluster = VirtualCluster(0, 1, slots=2, preemption=False)
    hogs = [ask(cluster, HOG, 200) for _ in range(2)]
    one = ask(cluster, OTHER, 1)
    cluster.settle()
    assert cluster.dispatcher.preemptions == 0
    assert one.ended_at > min(hog.ended_at for hog in hogs)


@pytest.mark.parametrize(
    ("weights", "slots"),
    [((1, 1), (4, 4)), ((3, 1), (6, 2)), ((1, 7), (1, 7)), ((1, 1, 2), (2, 2, 4))],
)
def test_tenants_that_wait_hold_their_weighted_share(
    weights: tuple[int, ...], slots: tuple[int, ...]
) -> None:
    cluster = VirtualCluster(0, 2, slots=4)
    for number, weight in enumerate(weights):
        for _ in range(20):
            ask(cluster, Tenant(str(number), weight=weight), 3000)
        cluster.run(1.0)
    cluster.run(4.0)
    for _ in range(100):
        cluster.step()
        found = running(cluster)
        assert all(abs(found[str(number)] - share) <= 1 for number, share in enumerate(slots)), (
            found
        )
    before = cluster.dispatcher.preemptions
    cluster.run(30.0)
    assert cluster.dispatcher.preemptions == before, "shares that are met are left alone"


@pytest.mark.parametrize(
    ("hog_tokens", "tokens", "prompt"),
    [(200, 10, SHORT), (200, 1, LONG), (20, 10, LONG), (5, 100, SHORT)],
)
def test_slots_do_not_go_to_and_fro(hog_tokens: int, tokens: int, prompt: tuple[int, ...]) -> None:
    """Two tenants that always have requests waiting, however long they are: shares are moved
    once.
    """
    cluster = VirtualCluster(0, 1, slots=4)
    for _ in range(600):
        waiting = Counter(one.split("/")[0] for one in cluster.dispatcher._queue)
        for _ in range(4 - waiting["hog"]):
            ask(cluster, HOG, hog_tokens)
        for _ in range(4 - waiting["other"] if cluster.now > 3.0 else 0):
            ask(cluster, OTHER, tokens, prompt)
        cluster.step()
    assert cluster.dispatcher.preemptions <= 2
    given = Counter(
        one.request.tenant.name
        for one in cluster.records.values()
        for at in one.token_at
        if at > 4.0
    )
    assert given["hog"] == pytest.approx(given["other"], rel=0.05)


def test_slots_that_cannot_be_shared_are_taken_in_turns() -> None:
    cluster = VirtualCluster(0, 1, slots=1)
    hog = ask(cluster, HOG, 2000)
    cluster.run(10.0)
    others = [ask(cluster, OTHER, 400), ask(cluster, Tenant("third"), 400)]
    cluster.run(2 * TURN_S + STEPS_S)
    assert all(one.tokens for one in others)
    cluster.settle()
    assert all(one.whole for one in (hog, *others))
    assert cluster.dispatcher.preemptions <= hog.ended_at / TURN_S


def test_a_flood_is_no_way_past_it() -> None:
    """Each moment a new request of the hog's, and all that it has at once again whenever something
    ends.
    """
    cluster = VirtualCluster(0, 2, slots=4)
    waits = []
    for number in range(400):
        ask(cluster, HOG, 300)
        if number % 10 == 9:
            waits.append(ask(cluster, OTHER, 2))
        cluster.step()
    cluster.run(5.0)
    assert all(
        one.whole and one.ended_at - one.request.arrival <= MIN_RUN_S + 2 * STEPS_S for one in waits
    )


def test_streams_that_were_lost_with_a_worker_keep_nobody_out() -> None:
    """They go first in their priority, and are too many for the workers that are left."""
    cluster = VirtualCluster(0, 2, slots=4)
    cluster.restart_s = 1e9
    for _ in range(8):
        ask(cluster, HOG, 3000)
    cluster.run(1.0)
    cluster.kill("d0", expected=True)
    one = ask(cluster, OTHER, 1)
    cluster.run(STEPS_S)
    assert one.whole


def test_less_urgent_requests_take_nothing_from_more_urgent_ones() -> None:
    cluster = VirtualCluster(0, 1, slots=4)
    hogs = [ask(cluster, HOG, 200) for _ in range(4)]
    one = ask(cluster, OTHER, 1, priority=5)
    cluster.settle()
    assert cluster.dispatcher.preemptions == 0
    assert one.ended_at > min(hog.ended_at for hog in hogs)


def test_a_preempted_stream_keeps_its_deadline_and_counts_no_attempt() -> None:
    cluster = VirtualCluster(0, 1, slots=2, max_attempts=1)
    doomed = [ask(cluster, HOG, 5000, deadline_s=30.0) for _ in range(2)]
    cluster.run(2.0)
    for _ in range(20):
        ask(cluster, OTHER, 5000)
    ask(cluster, Tenant("third"), 5000)
    ask(cluster, Tenant("fourth"), 5000)
    cluster.run(31.0)
    for one in doomed:
        assert one.end is not None
        assert one.end.error is not None
        assert one.end.error.code.name == "DEADLINE_EXCEEDED"
        assert one.ended_at == pytest.approx(one.request.deadline, abs=2 * STEP_S)


def test_a_preempted_stream_can_be_cancelled_and_leaves_nothing_behind() -> None:
    cluster = VirtualCluster(0, 1, slots=2)
    hogs = [ask(cluster, HOG, 500) for _ in range(2)]
    cluster.run(2.0)
    ask(cluster, OTHER, 500)
    (paused,) = [one for one in hogs if one.request.request_id in cluster.dispatcher._queue]
    cluster.cancel(paused.request.request_id)
    check_books(cluster.dispatcher)
    assert paused.end is not None
    assert isinstance(paused.end.error, Cancelled)
    assert cluster.dispatcher.waiting == 0
    cluster.settle()


def test_its_time_is_told_and_the_phases_add_up() -> None:
    cluster = VirtualCluster(0, 1, slots=2)
    first = ask(cluster, HOG, 500)
    ask(cluster, HOG, 500)
    victim = cluster.dispatcher._entries["hog/1"].life
    ask(cluster, OTHER, 10)
    cluster.run(5.0)
    assert [one.outcome for one in victim.attempts] == [
        "preempted: another tenant had less than its share"
    ]
    ledger = victim.timeline.ledger(cluster.now, cluster.now, None, tuple(victim.attempts))
    assert "preempted" in dict(ledger.phases)
    assert ledger.ttft_seconds == pytest.approx(cluster.now - victim.request.arrival)
    cluster.settle()
    assert first.whole
    assert first.end is not None


def test_who_returns_is_decoded_where_its_tokens_are_cached() -> None:
    cluster = VirtualCluster(1, 2, slots=2)
    hogs = [ask(cluster, HOG, 400, LONG) for _ in range(4)]
    cluster.run(5.0)
    life = cluster.dispatcher._entries
    worker_of = {
        one.request.request_id: life[one.request.request_id].life.assignment.decode for one in hogs
    }
    ask(cluster, OTHER, 1, LONG[::-1])
    (victim,) = [
        one.request.request_id
        for one in hogs
        if one.request.request_id in cluster.dispatcher._queue
    ]
    cluster.run(STEPS_S)
    assignment = life[victim].life.assignment
    assert assignment is not None
    assert assignment.decode == worker_of[victim]
    assert assignment.uncached_tokens < 16, "less than a block"


def test_tokens_that_the_client_has_already_are_charged_as_the_prompt_is() -> None:
    """They are computed again: a client that resumes gets no prefill for nothing."""
    charges = []
    for resume in ((), tuple(range(100, 200))):
        cluster = VirtualCluster(0, 1)
        sampling = SamplingParams(max_tokens=300, seed=1)
        request = Request("one", LONG, sampling, 0.0, 100.0, resume=resume, tenant=OTHER)
        cluster.dispatcher.submit(request, 0.0)
        charges.append(cluster.dispatcher._queue.share(OTHER).counter)
        assert request.most_tokens == len(LONG) + 300
    assert charges == [len(LONG), len(LONG) + 100]


def test_who_cancels_at_once_is_charged_for_the_prompt() -> None:
    cluster = VirtualCluster(1, 1)
    for _ in range(10):
        cluster.cancel(ask(cluster, HOG, 300, LONG).request.request_id)
    assert cluster.dispatcher._queue.share(HOG).counter == 10 * len(LONG)


def test_a_refused_successor_costs_no_second_victim() -> None:
    """The worker has not got the blocks back yet: they come with the end of its step."""
    cluster = VirtualCluster(0, 1, slots=4)
    for _ in range(4):
        ask(cluster, HOG, 3000)
    cluster.run(2.0)
    cluster.workers["d0"].refuse = "full"
    one = ask(cluster, OTHER, 1)
    for _ in range(12):
        cluster.step()
        assert cluster.dispatcher.preemptions <= 2
    cluster.workers["d0"].refuse = ""
    cluster.run(5.0)
    assert one.whole


def test_who_is_above_its_share_of_blocks_gives_way_though_it_has_few_slots() -> None:
    cluster = VirtualCluster(0, 1, slots=8)
    worker = cluster.workers["d0"]
    worker.info = replace(worker.info, load=replace(worker.info.load, blocks_total=16))
    cluster.dispatcher.workers_changed([worker.info], cluster.now)
    small = ask(cluster, HOG, 3000, tuple(range(100)))
    large = ask(cluster, HOG, 3000, tuple(range(130)))
    cluster.run(1.0)
    assert running(cluster) == {"hog": 2}
    one = ask(cluster, OTHER, 5, tuple(range(60)))
    assert (preempted(cluster, small), preempted(cluster, large)) == (1, 0), (
        "the one that is cheaper to restore"
    )
    cluster.run(STEPS_S)
    assert one.whole


@dataclass(frozen=True)
class Ask:
    tenant: int
    max_tokens: int
    after_s: float


ASKS = st.lists(
    st.builds(Ask, st.integers(0, 2), st.integers(1, 150), st.sampled_from((0.0, 0.0, 0.2, 2.0))),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(
    ASKS,
    st.lists(st.sampled_from((0.5, 1.0, 3.0)), min_size=3, max_size=3),
    st.integers(1, 2),
    st.integers(1, 4),
    st.data(),
)
def test_whoever_asks_for_whatever(
    asks: list[Ask], weights: list[float], decode: int, slots: int, data: st.DataObject
) -> None:
    """Work is conserved, each answer is whole, books are right, and preemption is bounded for each
    request.
    """
    cluster = VirtualCluster(0, decode, slots)
    tenants = [Tenant(str(number), weight=weight) for number, weight in enumerate(weights)]
    counts: Counter[str] = Counter()

    def step() -> None:
        cluster.step()
        check_books(cluster.dispatcher)
        for name, entry in cluster.dispatcher._entries.items():
            counts[name] = entry.life.preemptions
        if cluster.dispatcher.waiting:
            assert cluster.dispatcher.running == decode * slots, (
                "a slot is idle while a request waits"
            )

    lost = data.draw(st.booleans(), label="a worker is lost")
    for number, one in enumerate(asks):
        ask(cluster, tenants[one.tenant], one.max_tokens)
        until = cluster.now + one.after_s
        while cluster.now < until:
            step()
        if lost and decode == 2 and number == len(asks) // 2 and "d0" in cluster.workers:
            cluster.restart_s = STEP_S / 2
            cluster.kill("d0", expected=True)
            cluster.step()
    while cluster.dispatcher.unfinished:
        step()
        assert cluster.now < 10_000
    for name, one in cluster.records.items():
        assert one.whole
        assert counts[name] <= 1 + len(one.tokens) / PROGRESS_TOKENS
    if len({one.tenant for one in asks}) == 1:
        assert cluster.dispatcher.preemptions == 0
    assert (
        cluster.dispatcher.preemptions <= 3 * len(asks) + cluster.now / MIN_RUN_S * decode * slots
    )


def test_commands_reach_the_worker_in_the_order_in_which_the_slot_changes_hands() -> None:
    cluster = VirtualCluster(0, 1, slots=1)
    ask(cluster, HOG, 3000)
    cluster.run(TURN_S + 1.0)
    worker = cluster.workers["d0"]
    worker.commands.clear()
    ask(cluster, OTHER, 1)
    cluster.step()
    assert [type(one) for one in worker.commands[:2]] == [Abort, RunLocal]
    assert not any(isinstance(one, Refused | Reserve) for one in worker.commands)
