from __future__ import annotations

from dataclasses import replace

import pytest
from support.dispatched import LONG, SHORT, TARGET, attempt, placements, request, submit
from support.fake_worker import worker_info

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
)
from kvrelay.tenants import Tenant
from kvrelay.types.requests import Handoff, PrefillTimings, SamplingParams
from kvrelay.types.workers import PoolName, WorkerLoad
from kvrelay.worker_messages import (
    Abort,
    Failed,
    HandedOff,
    Prefill,
    Refused,
    Renew,
    Reserve,
    Reserved,
    RunLocal,
    SequenceTokens,
    TokenBatch,
)
from router.core.dispatcher import Dispatcher
from router.core.effects import Effect, End, Notice, Send
from router.core.path_policy import Assignment
from router.core.request import Request
from router.core.workers.worker_table import FULL_FOR_S


def dispatcher(
    *workers: str, eviction: dict[str, object] | None = None, **router: object
) -> Dispatcher:
    """With workers named d0, d1 (decode) and p0, p1 (prefill)."""
    config = ClusterConfig.model_validate(
        {
            "router": {"local_below_tokens": 8} | router,
            "decode": {"max_batch": 4},
            "kv": {"block_size": 16, "eviction": eviction},
        }
    )
    made = Dispatcher(config)
    for name in workers:
        made.worker_found(worker_info(name, pool_of(name)), 0.0)
    return made


@pytest.mark.parametrize(("eviction", "placed"), [(None, 0), ({"budget_tokens": 128}, 1)])
def test_a_long_answer_takes_the_room_that_its_kv_takes(
    eviction: dict[str, int] | None, placed: int
) -> None:
    """The worker has room for 256 tokens; one request has 240 and another 40."""
    made = dispatcher(eviction=eviction)
    info = worker_info("d0", "decode")
    load = replace(info.load, blocks_total=16)
    made.worker_found(replace(info, load=load, block_size=16), 0.0)
    submit(made, replace(request("long", LONG), sampling=SamplingParams(max_tokens=500, seed=1)))
    tokens = SequenceTokens(
        "long", attempt(made, "long"), 0, (1,) * 200, prefill=PrefillTimings(0.0, 0.1, 0, 1)
    )
    made.on_event("d0", TokenBatch((tokens,)), 1.0)
    assert len(placements(submit(made, request("other", LONG), 1.0))) == placed


def pool_of(name: str) -> PoolName:
    return "prefill" if name.startswith("p") else "decode"


def hand_over(made: Dispatcher, request_id: str, now: float) -> None:
    """Of a request that p0 computes for d0: its KV is there, and its first token."""
    number = attempt(made, request_id)
    made.on_event("d0", Reserved(request_id, number, TARGET), now)
    first = SequenceTokens(request_id, number, 0, (1,), prefill=PrefillTimings(0.0, 0.1, 0, 1))
    made.on_event("p0", TokenBatch((first,)), now)
    made.on_event("p0", HandedOff(request_id, number, Handoff("shm", 2, 64, 128, 0, 0.1, 0.0)), now)


def finish(
    made: Dispatcher, worker_id: str, request_id: str, number: int | None = None, now: float = 1.0
) -> list[Effect]:
    tokens = SequenceTokens(
        request_id,
        attempt(made, request_id) if number is None else number,
        0,
        (1,),
        finish_reason="stop",
    )
    return made.on_event(worker_id, TokenBatch((tokens,)), now)


def test_request_waits_for_a_worker() -> None:
    made = dispatcher()
    assert submit(made, request("a")) == []
    assert (made.waiting, made.running) == (1, 0)
    assert placements(made.worker_found(worker_info("d0", "decode"), 1.0)) == [("a", "d0")]
    assert (made.waiting, made.running) == (0, 1)


def test_priority_goes_first_and_equals_in_order_of_arrival() -> None:
    made = dispatcher()
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        submit(made, request(name, priority=priority))
    placed = placements(made.worker_found(worker_info("d0", "decode"), 1.0))
    assert [name for name, _ in placed] == ["urgent", "first", "second", "late"]


def test_full_queue_refuses() -> None:
    made = dispatcher(max_queue=2)
    submit(made, request("a"))
    submit(made, request("b"))
    with pytest.raises(ResourceExhausted) as caught:
        submit(made, request("c"))
    assert caught.value.retry_after_s is not None
    assert made.unfinished == 2


def test_live_request_id_is_not_taken_twice_but_an_ended_one_is() -> None:
    made = dispatcher("d0")
    submit(made, request("a"))
    with pytest.raises(FailedPrecondition):
        submit(made, request("a"))
    assert finish(made, "d0", "a")[-1] == End("a", "stop")
    assert placements(submit(made, request("a"))) == [("a", "d0")]


def test_decode_worker_that_refuses_is_passed_over() -> None:
    made = dispatcher("d0", "d1")
    ((_, first),) = placements(submit(made, request("a")))
    ((_, second),) = placements(made.on_event(first, Refused("a", 1, "full"), 0.1))
    assert {first, second} == {"d0", "d1"}


def test_request_that_all_refuse_waits_until_one_gets_rid_of_a_sequence() -> None:
    made = dispatcher("d0")
    submit(made, request("a"))
    submit(made, request("b"))
    assert placements(made.on_event("d0", Refused("b", attempt(made, "b"), "full"), 0.1)) == []
    assert made.waiting == 1
    assert placements(finish(made, "d0", "a", now=0.1 + FULL_FOR_S[0] / 2)) == [("b", "d0")]


def test_request_that_all_refuse_is_offered_again_after_a_while() -> None:
    made = dispatcher("d0")
    submit(made, request("a"))
    made.on_event("d0", Refused("a", 1, "full"), 0.1)
    assert placements(made.tick(0.1 + FULL_FOR_S[0] / 2)) == []
    assert placements(made.tick(0.1 + FULL_FOR_S[0])) == [("a", "d0")]


def test_those_behind_do_not_overtake_one_that_finds_no_room() -> None:
    made = dispatcher("d0")
    submit(made, request("a"))
    made.on_event("d0", Refused("a", 1, "full"), 0.1)
    assert submit(made, request("b"), 0.1) == []
    assert [name for name, _ in placements(made.tick(5.0))] == ["a", "b"]


def test_a_worker_is_given_as_many_sequences_as_it_has_slots() -> None:
    made = dispatcher("d0")
    placed = [placements(submit(made, request(str(one)))) for one in range(6)]
    assert [bool(one) for one in placed] == [True] * 4 + [False] * 2
    assert placements(finish(made, "d0", "0")) == [("4", "d0")]


def test_a_worker_is_not_given_more_than_its_blocks_hold() -> None:
    made = dispatcher()
    info = replace(worker_info("d0", "decode"), load=WorkerLoad(blocks_total=4))
    made.worker_found(info, 0.0)
    assert placements(submit(made, request("a", LONG))) == [("a", "d0")]
    assert placements(submit(made, request("b", LONG))) == []


def test_draining_worker_keeps_what_it_has_and_gets_nothing_new() -> None:
    made = dispatcher("d0")
    submit(made, request("a"))
    made.workers_changed([replace(worker_info("d0", "decode"), state="draining")], 1.0)
    assert submit(made, request("b"), 1.0) == []
    assert finish(made, "d0", "a")[-1] == End("a", "stop")
    assert made.waiting == 1


def test_news_of_another_epoch_are_not_of_this_worker() -> None:
    made = dispatcher("d0")
    made.workers_changed([replace(worker_info("d0", "decode", epoch=2), state="draining")], 1.0)
    assert placements(submit(made, request("a"))) == [("a", "d0")]


def test_new_epoch_of_a_worker_means_that_the_old_one_is_lost() -> None:
    made = dispatcher("d0")
    submit(made, request("a"))
    made.worker_found(worker_info("d0", "decode", epoch=2), 1.0)
    assert placements(made.tick(2.0)) == [("a", "d0")]
    assert finish(made, "d0", "a", number=1) == []
    assert finish(made, "d0", "a")[-1] == End("a", "stop")


def test_leases_are_renewed_until_the_commit() -> None:
    made = dispatcher("d0", "p0")
    submit(made, request("a", LONG))
    made.on_event("d0", Reserved("a", 1, TARGET), 0.1)
    (renew,) = [one for one in made.tick(5.0) if isinstance(one, Send)]
    assert renew == Send("d0", Renew((TARGET.lease_id,), 10.0))
    assert made.tick(5.1) == []
    made.on_event("p0", TokenBatch((SequenceTokens("a", 1, 0, (1,)),)), 6.0)
    made.on_event("d0", TokenBatch((SequenceTokens("a", 1, 1, (2,)),)), 6.1)
    assert made.tick(50.0) == []


def test_deadline_while_no_worker_is_there() -> None:
    made = dispatcher()
    submit(made, request("a", deadline=5.0))
    assert made.tick(4.9) == []
    (end,) = made.tick(5.0)
    assert isinstance(end, End)
    assert isinstance(end.error, Unavailable)
    assert made.unfinished == 0


def test_deadline_of_a_request_that_runs() -> None:
    made = dispatcher("d0")
    submit(made, request("a", deadline=5.0))
    made.tick(4.9)
    ends = [effect for effect in made.tick(5.0) if isinstance(effect, End)]
    assert [type(end.error) for end in ends] == [DeadlineExceeded]
    assert made.unfinished == 0


def test_cancelled_request_leaves_the_queue() -> None:
    made = dispatcher()
    submit(made, request("a"))
    made.cancel("a", Cancelled("gone"), 1.0)
    assert (made.waiting, made.unfinished) == (0, 0)
    assert made.worker_found(worker_info("d0", "decode"), 2.0) == []
    assert made.cancel("a", Cancelled("gone"), 3.0) == []


def test_shared_prefix_goes_where_it_was_computed() -> None:
    made = dispatcher("d0", "p0", "p1")
    life, _ = made.submit(request("a", LONG), 0.0)
    assert life.assignment is not None
    first = life.assignment.prefill
    made.cancel("a", Cancelled("gone"), 0.1)
    made.worker_lost("d0", 0.2)  # its successor's cache is empty, so the short path is not taken
    made.worker_found(worker_info("d0", "decode", epoch=2), 0.3)
    life, _ = made.submit(request("b", LONG[:39]), 0.4)
    assert life.assignment is not None
    assert (life.assignment.reason, life.assignment.prefill) == ("prefix_hit", first)
    assert life.assignment.why == f"{first} should hold 32 of 39 prompt tokens"


@pytest.mark.parametrize(
    ("tenant", "cache_salt"),
    [(Tenant("b", salt="b"), "ann"), (Tenant("a", salt="a"), "bob"), (Tenant("a", salt="a"), None)],
    ids=["another tenant", "another cache_salt", "no cache_salt"],
)
def test_where_and_why_a_request_is_placed_tells_nothing_of_others_prompts(
    tenant: Tenant, cache_salt: str | None
) -> None:
    def placed(theirs: tuple[int, ...]) -> Assignment | None:
        made = dispatcher("d0", "p0", "p1")
        submit(made, replace(request("a", theirs), tenant=tenant, cache_salt=cache_salt))
        made.cancel("a", Cancelled("gone"), 0.1)
        mine = replace(request("b", LONG), tenant=Tenant("a", salt="a"), cache_salt="ann")
        return made.submit(mine, 0.2)[0].assignment

    assert placed(LONG) == placed(tuple(range(200, 240)))


def test_warm_prompt_is_prefilled_where_it_will_be_decoded() -> None:
    made = dispatcher("d0", "p0")
    submit(made, request("a", LONG))
    hand_over(made, "a", 0.1)
    made.cancel("a", Cancelled("gone"), 0.2)
    life, effects = made.submit(request("b", LONG[:36]), 0.3)
    assert [type(one.command) for one in effects if isinstance(one, Send)] == [RunLocal]
    assert life.assignment is not None
    assert life.assignment.why == "4 uncached prompt tokens are below local_below_tokens=8"


def test_last_token_of_a_prompt_is_never_taken_for_cached() -> None:
    made = dispatcher("d0", "p0")
    made.submit(request("a", LONG[:32]), 0.0)
    hand_over(made, "a", 0.1)
    life, _ = made.submit(request("b", LONG[:32]), 0.2)
    assert life.assignment is not None
    assert life.assignment.why == "p0 should hold 16 of 32 prompt tokens"


def test_what_was_not_handed_over_is_not_looked_for_on_the_decode_worker() -> None:
    """An answer of one token ends before its hand-off begins."""
    made = dispatcher("d0", "p0")
    submit(made, request("a", LONG))
    made.on_event("d0", Reserved("a", attempt(made, "a"), TARGET), 0.1)
    finish(made, "p0", "a")
    life, effects = made.submit(request("b", LONG), 2.0)
    assert [type(one.command) for one in effects if isinstance(one, Send)] == [Reserve]
    assert life.assignment is not None
    assert life.assignment.why.startswith("p0 should hold")


def test_without_prefill_workers_the_decode_worker_does_it_all() -> None:
    made = dispatcher("d0")
    life, _ = made.submit(request("a", LONG), 0.0)
    assert life.assignment is not None
    assert (life.assignment.path, life.assignment.why) == ("local", "no prefill worker is ready")


def test_worker_that_failed_a_request_is_avoided_by_it() -> None:
    made = dispatcher("d0", "d1")
    ((_, first),) = placements(submit(made, request("a")))
    ((_, second),) = placements(made.on_event(first, Failed("a", 1, Code.INTERNAL, "broken"), 0.1))
    assert second != first


@pytest.mark.parametrize(("emitted", "path"), [(12, "disaggregated"), (13, "local")])
def test_an_answer_near_its_budget_goes_on_where_its_queries_are_computed(
    emitted: int, path: str
) -> None:
    """A hand-off does not bring the queries of the last 16 tokens before the budget of 128."""
    made = dispatcher("d0", "p0", eviction={"budget_tokens": 128})
    resumed = replace(request("a", tuple(range(100))), resume=tuple(range(emitted)))
    life, _ = made.submit(resumed, 0.0)
    assert life.assignment is not None
    assert life.assignment.path == path


def test_suspects_run_one_at_a_time() -> None:
    made = dispatcher("d0")
    for name in ("a", "b"):
        submit(made, request(name))
    made.worker_lost("d0", 1.0)
    assert made.worker_found(worker_info("d0", "decode", epoch=2), 1.0) == []  # both pause
    assert placements(made.tick(2.0)) == [("a", "d0")]
    # No suspect waits for nobody
    assert placements(submit(made, request("c"), 2.0)) == [("c", "d0")]
    assert placements(finish(made, "d0", "a", now=3.0)) == [("b", "d0")]


def test_suspect_that_waits_for_its_lease_is_still_alone() -> None:
    made = dispatcher("d0", "p0")
    for name in ("a", "b"):
        submit(made, request(name, (ord(name), *LONG)))
        made.on_event("d0", Reserved(name, attempt(made, name), TARGET), 0.1)
    made.worker_lost("p0", 1.0)
    made.worker_found(worker_info("p0", "prefill", epoch=2), 1.0)
    assert [name for name, _ in placements(made.tick(2.0))] == ["a"]


def test_next_turn_of_a_conversation_goes_where_the_last_was_decoded() -> None:
    made = dispatcher("d0", "d1", local_below_tokens=0)
    life, _ = made.submit(request("a", LONG[:30]), 0.0)
    assert life.assignment is not None
    first = life.assignment.decode
    tokens = SequenceTokens("a", 1, 0, (7, 8), finish_reason="stop")
    made.on_event(first, TokenBatch((tokens,)), 1.0)
    life, _ = made.submit(request("b", (*LONG[:30], 7, 8, 9)), 2.0)
    assert life.assignment is not None
    assert (life.assignment.decode, life.assignment.uncached_tokens) == (first, 1)


def test_prefill_follows_the_reservation() -> None:
    made = dispatcher("d0", "p0")
    (reserve,) = submit(made, request("a", LONG))
    assert isinstance(reserve, Send)
    assert isinstance(reserve.command, Reserve)
    (prefill,) = made.on_event("d0", Reserved("a", 1, TARGET), 0.1)
    assert isinstance(prefill, Send)
    assert isinstance(prefill.command, Prefill)
    assert (prefill.worker_id, prefill.command.target.transport) == ("p0", "auto")


def test_requests_that_left_while_they_waited_leave_nothing_behind() -> None:
    made = dispatcher()
    for number in range(500):
        name = f"r{number}"
        made.submit(Request(name, SHORT, SamplingParams(seed=0), arrival=0.0, deadline=60.0), 0.0)
        if number % 100:
            made.cancel(name, Cancelled("gone"), 0.0)
    assert made.waiting == 5
    placed = [
        one.command
        for one in made.worker_found(worker_info("d0", "decode"), 1.0)
        if isinstance(one, Send)
    ]
    assert [one.spec.request_id for one in placed if isinstance(one, RunLocal)][:2] == [
        "r0",
        "r100",
    ]


def test_late_events_of_a_cancelled_request_are_not_taken_for_its_namesakes() -> None:
    made = dispatcher("d0")
    submit(made, request("a"))
    old = attempt(made, "a")
    made.cancel("a", Cancelled("gone"), 0.5)
    submit(made, request("a"), 0.6)
    assert attempt(made, "a") != old
    assert made.on_event("d0", TokenBatch((SequenceTokens("a", old, 0, (66,)),)), 0.7) == []
    assert made.on_event("d0", Failed("a", old, Code.INTERNAL, "late"), 0.7) == []
    assert finish(made, "d0", "a")[-1] == End("a", "stop")


def test_full_queue_makes_room_for_a_tenant_that_has_less_of_it() -> None:
    made = dispatcher(max_queue=2)
    for name in ("a", "b"):
        submit(made, request(name))
    made.check_room(Tenant("other"))
    ended, *_ = submit(made, replace(request("c"), tenant=Tenant("other")))
    assert isinstance(ended, End)
    assert (ended.request_id, type(ended.error)) == ("b", ResourceExhausted)
    assert ended.error is not None
    assert ended.error.retry_after_s is not None
    assert (made.waiting, made.unfinished) == (2, 2)
    assert made.admission.rejected == {"queue_full": 1}
    with pytest.raises(ResourceExhausted):
        made.check_room(Tenant("other"))


def test_room_is_for_all_requests_that_come_together() -> None:
    made = dispatcher(max_queue=4)
    # Some of them may find room on workers.
    made.check_room(Tenant(""), requests=100)
    for name in ("a", "b"):
        submit(made, request(name))
    made.check_room(Tenant(""), requests=2)
    with pytest.raises(
        ResourceExhausted,
        match=r"^3 choices do not fit into the queue, in which 2 of 4 places are taken; ask for",
    ):
        made.check_room(Tenant(""), requests=3)
    # Another tenant displaces them.
    made.check_room(Tenant("other"), requests=3)


def test_request_whose_deadline_has_passed_is_not_sent() -> None:
    made = dispatcher("d0")
    submit(made, request("a"))
    made.on_event("d0", Refused("a", 1, "full"), 0.1)
    submit(made, request("b", deadline=3.0), 0.1)
    effects = made.worker_found(worker_info("d1", "decode"), 3.0)
    assert placements(effects) == [("a", "d1")]
    assert [one.request_id for one in effects if isinstance(one, End)] == ["b"]


def test_deadline_that_passes_while_blocks_are_reserved_ends_it_there() -> None:
    made = dispatcher("d0", "p0")
    submit(made, request("a", LONG, deadline=3.0))
    effects = made.on_event("d0", Reserved("a", attempt(made, "a"), TARGET), 3.0)
    assert [one.command for one in effects if isinstance(one, Send)] == [Abort("a", 1)]
    assert isinstance(effects[-1], End)
    assert isinstance(effects[-1].error, DeadlineExceeded)


def test_worker_that_sees_the_deadline_pass_is_not_blamed() -> None:
    made = dispatcher("d0", "d1")
    for number in range(4):
        submit(made, request(f"a{number}", deadline=3.0))
    for number in range(4):
        worker_id = made._entries[f"a{number}"].life.holders[0]
        failed = Failed(
            f"a{number}", attempt(made, f"a{number}"), Code.DEADLINE_EXCEEDED, "the deadline passed"
        )
        (end,) = made.on_event(worker_id, failed, 2.95 + number / 1000)
        assert isinstance(end, End)
        assert isinstance(end.error, DeadlineExceeded)
    assert made.sick == ()


@pytest.mark.parametrize(("seconds", "blamed"), [(2.0, True), (2.95, False), (3.2, False)])
def test_a_handoff_that_fails_at_the_deadline_blames_no_link(seconds: float, blamed: bool) -> None:
    """The decode worker gives its lease back at the deadline, and the push fails."""
    made = dispatcher("d0", "p0")
    submit(made, request("a", LONG, deadline=3.0))
    made.on_event("d0", Reserved("a", attempt(made, "a"), TARGET), 1.0)
    closed = Failed("a", attempt(made, "a"), Code.FAILED_PRECONDITION, "the lease was closed")
    effects = made.on_event("p0", closed, seconds)
    notices = [one for one in effects if isinstance(one, Notice)]
    assert [one.worker_id for one in notices] == ["p0"] * blamed


def test_worker_that_refuses_again_and_again_is_asked_less_often() -> None:
    made = dispatcher("d0")
    submit(made, request("a"))
    asked, now = 0, 0.0
    for _ in range(1000):
        now += 0.01
        if made.running:
            asked += 1
            made.on_event("d0", Refused("a", attempt(made, "a"), "full"), now)
        made.tick(now)
    assert 6 <= asked <= 10


def test_worker_that_took_one_is_asked_again_as_soon_as_the_first_time() -> None:
    made = dispatcher("d0", "p0")
    submit(made, request("a", LONG))
    for now in (0.0, 0.2, 0.5):
        made.on_event("d0", Refused("a", attempt(made, "a"), "full"), now)
        made.tick(now + 2.0)
    made.on_event("d0", Reserved("a", attempt(made, "a"), TARGET), 3.0)
    submit(made, request("b", LONG[1:]), 3.0)
    made.on_event("d0", Refused("b", attempt(made, "b"), "full"), 3.1)
    assert placements(made.tick(3.1 + FULL_FOR_S[0])) == [("b", "d0")]


def test_sequences_carry_the_time_that_is_left_and_their_tenant() -> None:
    made = dispatcher("d0")
    (send,) = submit(made, replace(request("a", deadline=9.0), tenant=Tenant("acme")), 4.0)
    assert isinstance(send, Send)
    assert isinstance(send.command, RunLocal)
    assert (send.command.spec.deadline_s, send.command.spec.tenant) == (5.0, "acme")


def test_quarantine_is_counted() -> None:
    made = dispatcher("d0", "d1")
    submit(made, request("a"))
    for number in (1.0, 2.0):
        made.worker_lost(made._entries["a"].life.holders[0], number)
        made.tick(number + 0.5)
    with pytest.raises(FailedPrecondition, match="quarantine"):
        submit(made, request("b"), 3.0)
    assert (len(made.quarantine), made.admission.rejected["quarantined"]) == (1, 1)
