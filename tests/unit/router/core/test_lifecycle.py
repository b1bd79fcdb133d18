from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvrelay.errors import (
    Cancelled,
    Code,
    DataLoss,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    KvRelayError,
    Unavailable,
)
from kvrelay.tenants import Tenant
from kvrelay.types.requests import (
    FinishReason,
    Handoff,
    PrefillTimings,
    SamplingParams,
    TokenLogprobs,
)
from kvrelay.worker_messages import (
    Abort,
    Failed,
    HandedOff,
    HandoffTarget,
    Prefill,
    Refused,
    Reserve,
    Reserved,
    RunLocal,
    SequenceTokens,
)
from router.core.effects import Effect, Emit, End, Send
from router.core.lifecycle import HANDOFF_REPORT_S, Lifecycle, Settings
from router.core.path_policy import Assignment
from router.core.poison_detection import PAUSE_S
from router.core.request import Request
from router.core.retry_budget import RetryBudget

PROMPT = (5, 6, 7)
REMOTE = Assignment("disaggregated", "d", "p", "least_loaded", "p is free first", 3)
LOCAL = Assignment("local", "d", "", "short_prompt", "3 uncached prompt tokens", 3)
HANDOFF = Handoff("memory", 2, 64, 128, 0, 0.02, 0.01)
TARGET = HandoffTarget("d", "here:1", 1, 42, 7, 4, 0, "layout", "host")


def lifecycle(
    max_tokens: int = 4, resume: tuple[int, ...] = (), max_attempts: int = 3
) -> Lifecycle:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    request = Request("r", PROMPT, sampling, arrival=0.0, deadline=100.0, resume=resume)
    return Lifecycle(
        request, Settings(max_attempts, lease_seconds=10.0, transport="shm"), RetryBudget()
    )


def placed(assignment: Assignment = REMOTE, **options: Any) -> Lifecycle:
    life = lifecycle(**options)
    life.assign(assignment, life.attempt + 1, 1.0)
    return life


def prefilling(**options: Any) -> Lifecycle:
    life = placed(**options)
    life.on_event("d", Reserved("r", life.attempt, TARGET), 2.0)
    return life


def tokens(
    life: Lifecycle, index: int, *token_ids: int, finish: FinishReason | None = None
) -> SequenceTokens:
    return SequenceTokens("r", life.attempt, index, token_ids, finish_reason=finish)


def handing_off(**options: Any) -> Lifecycle:
    life = prefilling(**options)
    life.on_event("p", tokens(life, 0, 100), 3.0)
    return life


def decoding(**options: Any) -> Lifecycle:
    life = handing_off(**options)
    life.on_event("p", HandedOff("r", life.attempt, HANDOFF), 4.0)
    return life


def test_each_attempt_has_the_salt_of_the_request() -> None:
    sampling = SamplingParams(max_tokens=4, seed=1)
    tenant = Tenant("acme", salt="secret")
    request = Request("r", PROMPT, sampling, 0.0, 100.0, tenant=tenant, cache_salt="ann")
    life = Lifecycle(request, Settings(3, lease_seconds=10.0, transport="shm"), RetryBudget())
    salts = []
    for attempt, assignment in enumerate((LOCAL, REMOTE, LOCAL), 1):
        (send,) = life.assign(assignment, attempt, float(attempt))
        assert isinstance(send, Send)
        assert isinstance(send.command, Reserve | RunLocal)
        salts.append(send.command.spec.salt)
        life.worker_lost("d", True, attempt + 0.5)
    assert salts == [tenant.salt_for("ann")] * 3


def emitted(effects: list[Effect]) -> list[tuple[int, tuple[int, ...]]]:
    return [(one.index, one.token_ids) for one in effects if isinstance(one, Emit)]


def sent(effects: list[Effect]) -> list[tuple[str, type]]:
    return [(one.worker_id, type(one.command)) for one in effects if isinstance(one, Send)]


def error_of(effects: list[Effect]) -> KvRelayError:
    end = effects[-1]
    assert isinstance(end, End)
    assert end.error is not None
    return end.error


def test_the_way_of_an_undisturbed_request() -> None:
    life = lifecycle()
    (reserve,) = life.assign(REMOTE, life.attempt + 1, 1.0)
    assert isinstance(reserve, Send)
    assert isinstance(reserve.command, Reserve)
    assert (reserve.worker_id, reserve.command.lease_seconds, life.state) == (
        "d",
        10.0,
        "reserving",
    )
    (prefill,) = life.on_event("d", Reserved("r", 1, TARGET), 2.0)
    assert reserve.command.spec.deadline_s == 99.0
    spec = replace(reserve.command.spec, deadline_s=98.0)  # what is left a second later
    assert prefill == Send("p", Prefill(spec, replace(TARGET, transport="shm")))
    assert (life.state, life.lease_id) == ("prefilling", 42)
    assert emitted(life.on_event("p", tokens(life, 0, 100), 3.0)) == [(0, (100,))]
    assert life.state == "handing_off"
    assert life.on_event("p", HandedOff("r", 1, HANDOFF), 4.0) == []
    assert (life.state, life.lease_id) == ("decoding", None)
    effects = life.on_event("d", tokens(life, 1, 101, 102, 103, finish="length"), 5.0)
    assert emitted(effects) == [(1, (101, 102, 103))]
    assert effects[-1] == End("r", "length")
    assert sent(effects) == []
    assert [one.outcome for one in life.attempts] == ["finished"]


def test_local_path() -> None:
    life = lifecycle()
    (run,) = life.assign(LOCAL, life.attempt + 1, 1.0)
    assert isinstance(run, Send)
    assert isinstance(run.command, RunLocal)
    assert (run.worker_id, life.state) == ("d", "prefilling")
    life.on_event("d", tokens(life, 0, 100), 2.0)
    assert life.state == "decoding"
    assert life.on_event("d", tokens(life, 1, 101, finish="stop"), 3.0)[-1] == End("r", "stop")


def test_first_token_that_ends_the_answer_frees_the_lease() -> None:
    life = prefilling(max_tokens=1)
    effects = life.on_event("p", tokens(life, 0, 100, finish="length"), 3.0)
    assert sent(effects) == [("d", Abort)]
    assert effects[-1] == End("r", "length")


def test_answer_ends_at_max_tokens_though_the_worker_goes_on() -> None:
    life = decoding(max_tokens=2)
    effects = life.on_event("d", tokens(life, 1, 101, 102, 103), 5.0)
    assert emitted(effects) == [(1, (101,))]
    assert sent(effects) == [("d", Abort)]
    assert effects[-1] == End("r", "length")


def test_logprobs_stay_with_their_tokens_when_duplicates_fall_away() -> None:
    life = decoding()
    logprobs = tuple(TokenLogprobs(-float(one)) for one in range(3))
    event = replace(tokens(life, 0, 100, 101, 102), logprobs=logprobs)
    (emit,) = life.on_event("d", event, 5.0)
    assert isinstance(emit, Emit)
    assert (emit.index, emit.token_ids, emit.logprobs) == (1, (101, 102), logprobs[1:])


@pytest.mark.parametrize("again", [tokens(decoding(), 0, 100), tokens(decoding(), 1, 101)])
def test_duplicates_show_nothing(again: SequenceTokens) -> None:
    life = decoding()
    life.on_event("d", tokens(life, 1, 101), 5.0)
    assert life.on_event("d", again, 6.0) == []
    assert life.tokens == [100, 101]


def test_duplicate_of_the_last_tokens_does_not_end_it_twice() -> None:
    life = decoding(max_tokens=2)
    last = tokens(life, 1, 101, finish="length")
    assert life.on_event("d", last, 5.0)[-1] == End("r", "length")
    assert life.on_event("d", last, 6.0) == []


def test_decode_worker_ahead_of_the_first_token_waits_for_it() -> None:
    life = prefilling()
    assert life.on_event("d", tokens(life, 2, 102), 3.0) == []
    assert life.on_event("d", tokens(life, 1, 101), 3.0) == []
    effects = life.on_event("p", tokens(life, 0, 100), 3.1)
    assert emitted(effects) == [(0, (100,)), (1, (101,)), (2, (102,))]
    assert (life.attempt, life.state) == (1, "decoding")


def test_early_tokens_do_not_outlive_their_attempt() -> None:
    life = prefilling()
    life.on_event("d", tokens(life, 1, 101), 3.0)
    life.worker_lost("p", expected=True, now=3.1)
    life.assign(REMOTE, life.attempt + 1, 4.0)
    life.on_event("d", Reserved("r", 2, TARGET), 4.1)
    assert emitted(life.on_event("p", tokens(life, 0, 100), 5.0)) == [(0, (100,))]


def test_tokens_of_the_decode_worker_prove_the_commit() -> None:
    life = handing_off()
    life.on_event("d", tokens(life, 1, 101), 4.0)
    assert life.state == "decoding"
    assert life.worker_lost("p", expected=False, now=5.0) == []
    assert life.on_event("p", Failed("r", 1, Code.UNAVAILABLE, "no acknowledgement"), 5.0) == []
    assert life.attempt == 1


def test_a_gap_is_given_to_another_attempt() -> None:
    life = decoding()
    effects = life.on_event("d", tokens(life, 2, 102), 5.0)
    assert sent(effects) == [("d", Abort)]
    assert life.state == "queued"
    assert "sent token 2; expected token 1" in life.attempts[0].outcome


# Losses


def test_next_attempt_goes_on_where_the_lost_one_ended() -> None:
    life = decoding()
    life.on_event("d", tokens(life, 1, 101), 5.0)
    assert life.worker_lost("d", expected=False, now=6.0) == []
    assert life.state == "queued"
    (send,) = life.assign(replace(REMOTE, decode="d2"), life.attempt + 1, 7.0)
    assert isinstance(send, Send)
    assert isinstance(send.command, Reserve)
    spec = send.command.spec
    assert (spec.token_ids, spec.prompt_len, spec.attempt, spec.num_emitted) == (
        (*PROMPT, 100, 101),
        3,
        2,
        2,
    )
    assert life.avoid == {"d"}


@pytest.mark.parametrize("late", [
    tokens(decoding(), 1, 101),
    Reserved("r", 1, TARGET),
    Refused("r", 1, "full"),
    Failed("r", 1, Code.INTERNAL, "late"),
    HandedOff("r", 1, HANDOFF),
])  # fmt: skip
def test_events_of_an_attempt_that_was_given_up_are_dropped(
    late: SequenceTokens | Reserved | Refused | Failed | HandedOff,
) -> None:
    life = placed()
    life.on_event("d", Failed("r", 1, Code.INTERNAL, "broken"), 1.5)
    life.assign(REMOTE, life.attempt + 1, 2.0)
    assert life.on_event("d", late, 3.0) == []
    assert (life.state, life.attempt, len(life.attempts)) == ("reserving", 2, 1)


def test_events_of_strangers_are_dropped() -> None:
    life = prefilling()
    assert life.on_event("other", Failed("r", 1, Code.INTERNAL, "not mine"), 3.0) == []
    assert life.on_event("d", HandedOff("r", 1, HANDOFF), 3.0) == []
    assert life.on_event("p", Reserved("r", 1, TARGET), 3.0) == []
    assert life.on_event("other", tokens(life, 0, 100), 3.0) == []
    assert (life.state, life.handoff) == ("prefilling", None)


@pytest.mark.parametrize(
    ("life", "lost", "told"),
    [
        (placed(), "p", [("d", Abort)]),
        (placed(), "d", []),
        (prefilling(), "p", [("d", Abort)]),
        (prefilling(), "d", [("p", Abort)]),
        (handing_off(), "p", [("d", Abort)]),
        (handing_off(), "d", [("p", Abort)]),
        (decoding(), "d", []),
    ],
)
def test_loss_of_a_worker_frees_the_other_and_tries_again(
    life: Lifecycle, lost: str, told: list[tuple[str, type]]
) -> None:
    assert sent(life.worker_lost(lost, expected=False, now=5.0)) == told
    assert life.state == "queued"
    assert life.attempts[0].outcome == f"{lost} was lost"


def test_loss_of_the_prefill_worker_after_the_hand_off_does_not_matter() -> None:
    life = decoding()
    assert life.worker_lost("p", expected=False, now=5.0) == []
    assert life.state == "decoding"


def test_attempts_are_bounded_and_the_last_error_is_told() -> None:
    life = placed(max_attempts=2)
    life.on_event("d", Failed("r", 1, Code.INTERNAL, "first"), 2.0)
    life.assign(REMOTE, life.attempt + 1, 3.0)
    life.on_event("d", Reserved("r", 2, TARGET), 3.1)
    effects = life.on_event("p", Failed("r", 2, Code.DATA_LOSS, "digest differs"), 4.0)
    assert sent(effects) == [("d", Abort)]
    assert isinstance(error_of(effects), DataLoss)
    assert life.state == "failed"
    assert [one.outcome for one in life.attempts] == ["d: first", "p: digest differs"]


def test_invalid_argument_ends_it_at_once() -> None:
    life = prefilling()
    effects = life.on_event(
        "p", Failed("r", 1, Code.INVALID_ARGUMENT, "too long for this worker"), 3.0
    )
    assert sent(effects) == [("d", Abort)]
    assert isinstance(error_of(effects), InvalidArgument)


@pytest.mark.parametrize("refuser", ["d", "p"])
def test_a_refusal_is_not_an_attempt(refuser: str) -> None:
    life = placed() if refuser == "d" else prefilling()
    effects = life.on_event(refuser, Refused("r", 1, "full"), 3.0)
    assert sent(effects) == ([] if refuser == "d" else [("d", Abort)])
    assert (life.state, life.attempts) == ("queued", [])


def test_request_that_kills_two_workers_is_not_given_a_third() -> None:
    life = prefilling(max_attempts=9)
    life.worker_lost("p", expected=False, now=3.0)
    assert (life.crashes.score, life.crashes.not_before) == (1, 3.0 + PAUSE_S)
    life.assign(LOCAL, life.attempt + 1, 4.0)
    effects = life.worker_lost("d", expected=False, now=5.0)
    assert isinstance(error_of(effects), Internal)
    assert "2 workers crashed" in error_of(effects).message


@pytest.mark.parametrize(
    ("life", "lost", "expected"),
    [
        (prefilling(), "d", False),  # it only kept the lease
        (prefilling(), "p", True),  # it was draining
        (placed(), "d", False),  # nothing was computed yet
    ],
)
def test_losses_that_are_not_the_requests_fault(life: Lifecycle, lost: str, expected: bool) -> None:
    life.worker_lost(lost, expected, 3.0)
    assert not life.crashes.score


def test_progress_clears_a_request_of_suspicion() -> None:
    life = decoding(max_tokens=9)
    life.on_event("d", tokens(life, 1, 101), 5.0)
    life.worker_lost("d", expected=False, now=6.0)
    assert not life.crashes.suspected


# Ends


@pytest.mark.parametrize(
    ("life", "told"),
    [
        (lifecycle(), []),
        (placed(), ["d"]),
        (prefilling(), ["p", "d"]),
        (handing_off(), ["p", "d"]),
        (decoding(), ["d"]),
        (placed(LOCAL), ["d"]),
    ],
)
def test_cancel_in_each_state(life: Lifecycle, told: list[str]) -> None:
    effects = life.cancel(Cancelled("by the client"))
    assert sent(effects) == [(one, Abort) for one in told]
    assert effects[-1] == End("r", "cancelled", error_of(effects))
    assert life.cancel(Cancelled("again")) == []
    assert life.on_event("d", tokens(life, len(life.tokens), 1), 9.0) == []


def test_deadline() -> None:
    effects = prefilling().expire("")
    assert isinstance(error_of(effects), DeadlineExceeded)
    assert sent(effects) == [("p", Abort), ("d", Abort)]


def test_deadline_without_a_worker_says_so() -> None:
    error = error_of(lifecycle().expire("no decode worker is ready"))
    assert isinstance(error, Unavailable)
    assert error.retry_after_s is not None


def test_complete_answer_waits_for_the_account_of_its_hand_off() -> None:
    life = handing_off(max_tokens=2)
    assert emitted(life.on_event("d", tokens(life, 1, 101, finish="length"), 4.0)) == [(1, (101,))]
    assert life.state == "finishing"
    assert life.tick(4.0) == []
    assert life.on_event("p", HandedOff("r", 1, HANDOFF), 4.1) == [End("r", "length")]
    assert life.handoff == HANDOFF


def test_account_of_a_lost_attempt_is_not_that_of_the_next() -> None:
    life = decoding()
    life.worker_lost("d", expected=False, now=5.0)
    life.assign(LOCAL, life.attempt + 1, 6.0)
    life.on_event("d", tokens(life, 1, 101, 102, 103, finish="length"), 7.0)
    assert (life.state, life.handoff) == ("finished", None)


def test_it_does_not_wait_for_long() -> None:
    life = handing_off(max_tokens=2)
    for _ in range(2):
        life.on_event("d", tokens(life, 1, 101, finish="length"), 4.0)
    assert len(life.attempts) == 1
    assert life.tick(4.0 + HANDOFF_REPORT_S) == [End("r", "length")]


def test_stop_string_ends_it_everywhere() -> None:
    life = handing_off()
    effects = life.complete("stop", 4.0)
    assert sent(effects) == [("p", Abort), ("d", Abort)]
    assert effects[-1] == End("r", "stop")


def test_resumed_request_begins_after_the_tokens_that_came() -> None:
    life = lifecycle(resume=(100, 101))
    (send,) = life.assign(LOCAL, life.attempt + 1, 1.0)
    assert isinstance(send, Send)
    assert isinstance(send.command, RunLocal)
    assert (send.command.spec.token_ids, send.command.spec.num_emitted) == ((*PROMPT, 100, 101), 2)
    assert emitted(life.on_event("d", tokens(life, 2, 102), 2.0)) == [(2, (102,))]


# The ledger


def test_phases_follow_each_other_and_add_up() -> None:
    life = lifecycle(max_tokens=3)
    life.timeline.mark("tokenize", 0.5)
    life.assign(REMOTE, life.attempt + 1, 1.0)
    life.on_event("d", Reserved("r", 1, TARGET), 1.25)
    timings = PrefillTimings(queue_seconds=0.5, compute_seconds=1.0, cached_tokens=2, chunks=1)
    life.on_event("p", replace(tokens(life, 0, 100), prefill=timings), 3.0)
    life.on_event("p", HandedOff("r", 1, HANDOFF), 3.5)
    life.on_event("d", tokens(life, 1, 101), 4.0)
    life.on_event("d", tokens(life, 2, 102, finish="length"), 6.0)
    ledger = life.timeline.ledger(3.125, 6.5, life.handoff, tuple(life.attempts))
    assert dict(ledger.phases) == {
        "tokenize": 0.5, "queue": 0.5, "reserve": 0.25, "prefill_queue": 0.5, "prefill": 1.0,
        "return": 0.25,
        "emit": 0.125,
    }  # fmt: skip
    assert ledger.ttft_seconds == 3.125
    assert (ledger.second_token_gap_seconds, ledger.decode_seconds, ledger.e2e_seconds) == (
        0.875,
        2.875,
        6.5,
    )
    assert (ledger.handoff, life.cached_tokens) == (HANDOFF, 2)


def test_lost_attempt_before_the_first_token_has_its_place_in_the_ledger() -> None:
    life = prefilling()
    life.worker_lost("p", expected=True, now=5.0)
    life.assign(LOCAL, life.attempt + 1, 5.5)
    life.on_event("d", tokens(life, 0, 100), 7.0)
    ledger = life.timeline.ledger(7.0, 7.0, None, ())
    assert dict(ledger.phases)["failed_attempt"] == 3.0
    assert sum(seconds for _, seconds in ledger.phases) == ledger.ttft_seconds == 7.0


def test_each_attempt_has_its_own_phases_which_add_up_to_the_last_token() -> None:
    life = prefilling()
    life.worker_lost("p", expected=True, now=5.0)
    # Waits in the queue again, and a worker that had no room is no attempt.
    life.assign(LOCAL, life.attempt + 1, 5.5)
    life.on_event("d", tokens(life, 0, 100), 7.0)
    life.on_event("d", tokens(life, 1, 101), 7.5)
    life.worker_lost("d", expected=True, now=8.0)
    life.assign(LOCAL, life.attempt + 1, 8.25)
    life.on_event("d", tokens(life, 2, 102, finish="length"), 9.0)
    first, second, third = life.timeline.ledger(7.125, 9.0, None, tuple(life.attempts)).attempts
    assert dict(second.phases) == {
        "queue": 0.5, "return": 1.5, "decode": 0.5, "failed_attempt": 0.5
    }  # fmt: skip
    assert dict(third.phases) == {"queue": 0.25, "decode": 0.75}
    assert dict(first.phases)["failed_attempt"] == 3.0
    assert sum(sum(dict(one.phases).values()) for one in (first, second, third)) == 9.0
    assert third.outcome == "finished"


def test_worker_timings_beyond_what_the_router_saw_are_cut() -> None:
    life = placed(LOCAL)
    timings = PrefillTimings(queue_seconds=9.0, compute_seconds=9.0, cached_tokens=99, chunks=1)
    life.on_event("d", replace(tokens(life, 0, 100), prefill=timings), 2.0)
    ledger = life.timeline.ledger(2.0, 2.0, None, ())
    assert ledger.ttft_seconds == 2.0
    assert min(seconds for _, seconds in ledger.phases) >= 0
    assert life.cached_tokens == len(PROMPT)


@pytest.mark.parametrize(
    ("predicted", "found", "why"),
    [
        (2, 2, "p is free first"),
        (0, 2, "p is free first; then 2 of 3 prompt tokens were found cached"),
        (2, 0, "p is free first; then 0 of 3 prompt tokens were found cached"),
    ],
)
def test_why_and_usage_agree_on_cached_tokens(predicted: int, found: int, why: str) -> None:
    life = placed(replace(REMOTE, cached_tokens=predicted))
    life.on_event("d", Reserved("r", life.attempt, TARGET), 2.0)
    first = replace(tokens(life, 0, 100), prefill=PrefillTimings(0.0, 0.1, found, 1))
    life.on_event("p", first, 3.0)
    assert life.cached_tokens == found
    assert life.last_assignment is not None
    assert life.last_assignment.own_why == why
    assert life.last_assignment == life.assignment
    again = replace(first, index=1, prefill=PrefillTimings(0.0, 0.1, 1, 1))
    life.on_event("p", again, 3.1)
    assert life.last_assignment.own_why == why
