"""Rows of the request picture, and the history, from values."""

from __future__ import annotations

from dataclasses import replace

from kvrelay.errors import Cancelled
from kvrelay.types.requests import Handoff, PrefillTimings, SamplingParams
from kvrelay.worker_messages import HandedOff, HandoffTarget, Refused, Reserved, SequenceTokens
from router.core.lifecycle import Lifecycle, Settings
from router.core.path_policy import Assignment
from router.core.request import Request
from router.core.retry_budget import RetryBudget
from router.observability.history import SAMPLES, History, Sample
from router.observability.recent_requests import handoff_span, phases_of

REMOTE = Assignment("disaggregated", "d", "p", "least_loaded", "p is free first", 3)
LOCAL = Assignment("local", "d", "", "short_prompt", "3 uncached prompt tokens", 3)
TARGET = HandoffTarget("d", "here:1", 1, 42, 7, 4, 0, "layout", "host")
HANDOFF = Handoff("memory", 2, 64, 128, 0, seconds=1.5, exposed_seconds=0.5)
TIMINGS = PrefillTimings(queue_seconds=0.25, compute_seconds=1.0, cached_tokens=0, chunks=1)


def submitted(max_tokens: int = 4) -> Lifecycle:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    request = Request("r", (5, 6, 7), sampling, arrival=10.0, deadline=100.0)
    life = Lifecycle(request, Settings(3, lease_seconds=10.0, transport="shm"), RetryBudget())
    life.timeline.mark("tokenize", 10.25)
    return life


def tokens(
    life: Lifecycle, index: int, *token_ids: int, prefill: PrefillTimings | None = None
) -> SequenceTokens:
    finish = "length" if index + len(token_ids) == life.request.sampling.max_tokens else None
    return SequenceTokens(
        "r", life.attempt, index, token_ids, finish_reason=finish, prefill=prefill
    )


def decoding() -> Lifecycle:
    life = submitted()
    life.assign(REMOTE, life.attempt + 1, 11.0)
    life.on_event("d", Reserved("r", 1, TARGET), 11.5)
    life.on_event("p", tokens(life, 0, 100, prefill=TIMINGS), 13.0)
    life.on_event("p", HandedOff("r", 1, HANDOFF), 13.5)
    life.on_event("d", tokens(life, 1, 101), 14.0)
    return life


def test_the_picture_grows_with_the_request() -> None:
    life = submitted()
    assert phases_of(life, 10.5) == [("tokenize", 0.25), ("queue", 0.25)]
    life.assign(REMOTE, life.attempt + 1, 11.0)
    assert phases_of(life, 11.25)[2:] == [("reserve", 0.25)]
    life.on_event("d", Reserved("r", 1, TARGET), 11.5)
    assert phases_of(life, 12.0)[3:] == [("prefill", 0.5)]
    life.on_event("p", tokens(life, 0, 100, prefill=TIMINGS), 13.0)
    assert phases_of(life, 13.25)[3:] == [
        ("prefill_queue", 0.25), ("prefill", 1.0), ("return", 0.25), ("handoff", 0.25),
    ]  # fmt: skip
    assert handoff_span(life) is None


def test_a_hand_off_lies_beside_prefill_and_before_decode() -> None:
    life = decoding()
    # Committed half a second after the prompt was computed at 12.75
    assert handoff_span(life) == (1750.0, 3250.0)
    expected = [
        ("tokenize", 0.25), ("queue", 0.75), ("reserve", 0.5), ("prefill_queue", 0.25),
        ("prefill", 1.0),
        ("return", 0.25), ("handoff", 0.25), ("decode", 1.75),
    ]  # fmt: skip
    assert phases_of(life, 15.0) == expected
    life.on_event("d", tokens(life, 2, 102, 103), 15.0)
    assert life.state == "finished"
    assert phases_of(life, 99.0) == expected


def test_time_lost_with_a_worker_after_the_first_token_is_shown() -> None:
    life = decoding()
    life.worker_lost("d", expected=True, now=16.0)
    life.assign(LOCAL, life.attempt + 1, 17.0)
    timings = replace(TIMINGS, queue_seconds=0.0, compute_seconds=0.5)
    life.on_event("d", tokens(life, 2, 102, prefill=timings), 18.0)
    life.on_event("d", tokens(life, 3, 103), 19.0)
    names = [name for name, _ in phases_of(life, 19.0)]
    assert names[6:] == [
        "decode",
        "failed_attempt",
        "queue",
        "prefill_queue",
        "prefill",
        "return",
        "decode",
    ]
    assert dict(phases_of(life, 19.0))["failed_attempt"] == 2.0
    assert sum(seconds for _, seconds in phases_of(life, 19.0)) == 9.0
    ledger = life.timeline.ledger(13.0, 19.0, life.handoff, tuple(life.attempts))
    assert ledger.ttft_seconds == sum(seconds for _, seconds in ledger.phases) == 3.0, (
        "as before it was lost"
    )
    assert "failed_attempt" not in dict(ledger.phases)


def test_an_end_before_the_first_token_closes_the_phase_that_it_came_in() -> None:
    life = submitted()
    life.assign(LOCAL, life.attempt + 1, 11.0)
    life.cancel(Cancelled("gone"))
    assert phases_of(life, 12.0) == [("tokenize", 0.25), ("queue", 0.75), ("prefill", 1.0)]


def test_a_request_that_is_refused_again_and_again_leaves_one_mark() -> None:
    life = submitted()
    for attempt in range(1, 100):
        life.assign(REMOTE, life.attempt + 1, 11.0 + attempt)
        life.on_event("d", Refused("r", attempt, "full"), 11.0 + attempt)
    assert phases_of(life, 111.0) == [("tokenize", 0.25), ("queue", 100.75)]


def sample(**values: float | None) -> Sample:
    return Sample(**dict.fromkeys(Sample.__dataclass_fields__, 0) | values)  # type: ignore[arg-type]


def test_history_keeps_the_last_samples() -> None:
    history = History()
    for number in range(SAMPLES + 5):
        history.add(sample(running=number, ttft_p50=None))
    columns = history.columns()
    assert columns["running"] == list(range(5, SAMPLES + 5))
    assert columns["ttft_p50"] == [None] * SAMPLES


def test_rates_are_growth_per_second() -> None:
    history = History()
    assert history.rate({"a": {"tokens": 100}}, 50.0) == {"tokens": 0.0}
    assert history.rate({"a": {"tokens": 130}}, 52.0) == {"tokens": 15.0}
    assert history.rate({"a": {"tokens": 130}}, 52.0) == {"tokens": 0.0}
