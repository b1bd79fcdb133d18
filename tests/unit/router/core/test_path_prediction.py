"""The path that is predicted to keep more requests within the SLO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.dispatched import request
from support.router_cluster import STEP_S, VirtualCluster

from kvrelay.config.model_sections import RouterConfig, SloConfig
from kvrelay.tenants import ANONYMOUS, Tenant
from kvrelay.types.requests import Slo
from kvrelay.types.workers import ModelVersion
from router.core.path_policy import Assignment, Wait, assign
from router.core.path_prediction import Outlook, outlook_of
from router.core.worker_view import WorkerView

NOBODY = frozenset[str]()
# Help comes from half of it on.
OUTLOOK = Outlook(ttft_s=4.0)
# 1,000 tokens per second.
PREFILL = WorkerView("p", "prefill", prompt_rate=1000.0)
DECODE = WorkerView("d", "decode", prompt_rate=1000.0)


def decide(
    *workers: WorkerView, num_tokens: int = 1000, outlook: Outlook | None = OUTLOOK
) -> Assignment | Wait:
    return assign(workers, num_tokens, NOBODY, RouterConfig(), outlook=outlook)


def path(decision: Assignment | Wait) -> str:
    return decision.path if isinstance(decision, Assignment) else "wait"


@pytest.mark.parametrize(
    ("queued", "outlook", "expected"),
    [
        (900, OUTLOOK, "disaggregated"),
        (1100, OUTLOOK, "local"),
        (0, replace(OUTLOOK, waited_s=1.5), "disaggregated"),
        (700, replace(OUTLOOK, waited_s=0.5), "local"),
        (900, replace(OUTLOOK, waited_s=9.0), "local"),
        (0, replace(OUTLOOK, tokens_ahead=1100), "local"),
        (1100, None, "disaggregated"),
    ],
    ids=["in time", "queued", "has waited", "waited", "late anyway", "ahead", "no SLO"],
)
def test_a_decode_worker_helps_where_prefill_workers_would_take_half_of_the_ttft(
    queued: int, outlook: Outlook | None, expected: str
) -> None:
    decision = decide(replace(PREFILL, queued_tokens=queued), DECODE, outlook=outlook)
    assert path(decision) == expected


def test_the_reason_has_the_figures_for_those_who_see_the_cluster() -> None:
    decision = decide(replace(PREFILL, queued_tokens=3000), DECODE)
    assert isinstance(decision, Assignment)
    assert decision.reason == "slo_ttft"
    why = (
        "d prefills it within slo.itl_ms, because prefill workers are predicted to take more than "
        "half of slo.ttft_ms"
    )
    assert decision.why_for(Tenant("another")) == why
    figures = "predicted TTFT 1,000 ms instead of 4,000 ms"
    assert decision.why_for(ANONYMOUS) == f"{why}, {figures}"


@pytest.mark.parametrize(
    ("rate", "figures"),
    [
        (999.0, "predicted TTFT 4,001 ms instead of 4,004 ms"),
        (998.3, "predicted TTFT 4,004 ms on both paths"),
    ],
)
def test_a_reason_has_no_two_figures_that_read_the_same(rate: float, figures: str) -> None:
    late = replace(DECODE, queued_tokens=2997, prompt_rate=rate)
    decision = decide(replace(PREFILL, queued_tokens=3004), late)
    assert isinstance(decision, Assignment)
    assert decision.why_for(ANONYMOUS).endswith(f", {figures}")


def test_a_busy_prefill_pool_is_helped_and_otherwise_waited_for() -> None:
    busy = replace(PREFILL, full=True, queued_tokens=1024)
    assert path(decide(busy, DECODE)) == "local"
    assert path(decide(busy, DECODE, num_tokens=500)) == "wait"


@pytest.mark.parametrize(
    ("decode", "why"),
    [
        (replace(DECODE, full=True), "no batch slot"),
        (replace(DECODE, takes_prompt=False), "prompts enough"),
        (replace(DECODE, prompt_rate=0.0), "no time beside its answers"),
        (replace(DECODE, queued_tokens=3000), "later than the prefill workers"),
        (replace(DECODE, prompt_rate=200.0), "too slow"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_no_help(decode: WorkerView, why: str) -> None:
    assert path(decide(replace(PREFILL, queued_tokens=2500), decode)) != "local", why


def test_the_fittest_decode_worker_helps() -> None:
    decoders = [
        replace(DECODE, worker_id="d0", queued_tokens=400),
        replace(DECODE, worker_id="d1", prompt_rate=600.0),
        replace(DECODE, worker_id="d2", held_tokens=9000),
        replace(DECODE, worker_id="d3", sick=True, cached_tokens=500),
    ]
    decision = decide(replace(PREFILL, queued_tokens=3000), *decoders)
    assert isinstance(decision, Assignment)
    assert decision.decode == "d2"


def test_a_helper_has_the_model_version_of_the_prefill_workers() -> None:
    old, new = ModelVersion("a"), ModelVersion("b")
    workers = [
        replace(PREFILL, queued_tokens=9000, model=old),
        replace(DECODE, worker_id="d0", model=old, full=True),
        replace(DECODE, worker_id="d1", model=new),
    ]
    assert path(decide(*workers, outlook=None)) == path(decide(*workers))


def test_an_unmeasured_decode_worker_counts_as_half_as_fast_as_the_prefill_workers() -> None:
    prefill = replace(PREFILL, queued_tokens=1000)
    for rate, expected in ((None, "disaggregated"), (500.0, "disaggregated"), (1000.0, "local")):
        assert path(decide(prefill, replace(DECODE, prompt_rate=rate), num_tokens=1100)) == expected


def test_the_worker_that_is_predicted_gets_the_prompt() -> None:
    slow = replace(PREFILL, worker_id="slow", prompt_rate=400.0)
    fast = replace(PREFILL, worker_id="fast", queued_tokens=100)
    decision = decide(slow, fast, DECODE, num_tokens=1500)
    assert isinstance(decision, Assignment)
    assert decision.prefill == "fast"


@given(
    st.builds(
        replace,
        st.just(PREFILL),
        queued_tokens=st.integers(0, 10**6),
        full=st.booleans(),
        prompt_rate=st.none(),
    ),
    st.builds(replace, st.just(DECODE), prompt_rate=st.none() | st.floats(0, 1e4)),
    st.integers(1, 5000),
)
def test_without_measurements_the_threshold_decides(
    prefill: WorkerView, decode: WorkerView, num_tokens: int
) -> None:
    with_outlook = decide(prefill, decode, num_tokens=num_tokens)
    assert with_outlook == decide(prefill, decode, num_tokens=num_tokens, outlook=None)


@pytest.mark.parametrize(
    ("decode", "prefill", "expected"),
    [
        (DECODE, PREFILL, "local"),
        (replace(DECODE, prompt_rate=None), PREFILL, "local"),
        (replace(DECODE, prompt_rate=0.0), PREFILL, "disaggregated"),
        (replace(DECODE, prompt_rate=0.0), replace(PREFILL, full=True), "local"),
        (replace(DECODE, prompt_rate=0.0), replace(PREFILL, queued_tokens=4000), "local"),
        (replace(DECODE, queued_tokens=5000), PREFILL, "disaggregated"),
    ],
)
def test_a_short_prompt_does_not_delay_answers_that_need_all_their_time(
    decode: WorkerView, prefill: WorkerView, expected: str
) -> None:
    assert path(decide(prefill, decode, num_tokens=20)) == expected
    decision = decide(prefill, decode, num_tokens=20)
    assert isinstance(decision, Assignment)
    assert "inf" not in decision.load
    waited_for = replace(OUTLOOK, tokens_ahead=1)
    assert path(decide(prefill, decode, num_tokens=20, outlook=waited_for)) == "local"


RATES = st.floats(100.0, 1e4)
TOKENS = st.integers(0, 20_000)
PREFILLERS = st.builds(
    replace, st.just(PREFILL), queued_tokens=TOKENS, full=st.booleans(), prompt_rate=RATES
)
DECODERS = st.builds(
    replace,
    st.just(DECODE),
    queued_tokens=TOKENS,
    full=st.booleans(),
    takes_prompt=st.booleans(),
    prompt_rate=st.none() | st.just(0.0) | RATES,
)


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(
    st.lists(PREFILLERS, min_size=1, max_size=3),
    st.lists(DECODERS, min_size=1, max_size=3),
    st.integers(64, 20_000),
    st.builds(replace, st.just(OUTLOOK), waited_s=st.floats(0, 3), tokens_ahead=TOKENS),
)
def test_help_is_a_last_resort_that_costs_no_answer_its_itl(
    prefillers: list[WorkerView], decoders: list[WorkerView], num_tokens: int, outlook: Outlook
) -> None:
    prefillers = [replace(one, worker_id=f"p{at}") for at, one in enumerate(prefillers)]
    decoders = [replace(one, worker_id=f"d{at}") for at, one in enumerate(decoders)]
    decision = decide(*prefillers, *decoders, num_tokens=num_tokens, outlook=outlook)
    assume(isinstance(decision, Assignment) and decision.reason == "slo_ttft")
    assert isinstance(decision, Assignment)
    (helper,) = (one for one in decoders if one.worker_id == decision.decode)
    assert helper.takes_prompt
    assert not helper.full
    assert helper.prompt_rate != 0
    for one in prefillers:
        alone = outlook.waited_s + (one.queued_tokens + num_tokens) / one.prompt_rate
        assert outlook.tokens_ahead or alone > outlook.ttft_s / 2


COMMON = SloConfig(ttft_ms=500, itl_ms=20)


@pytest.mark.parametrize(
    ("slo", "ttft_s"), [(Slo(), 0.5), (Slo(ttft_ms=5000), 5.0), (Slo(ttft_ms=1e-9), 0.5)]
)
def test_a_request_may_ask_for_a_longer_ttft_than_the_common_one(slo: Slo, ttft_s: float) -> None:
    assert outlook_of(COMMON, slo, 0.25, 70) == Outlook(ttft_s, 0.25, 70)


def overrun(
    slo: dict[str, float] | None, tenants: str = "a", own: Sequence[Slo] = (Slo(),)
) -> VirtualCluster:
    """Prompts that come five times as fast as the prefill worker computes them, in virtual time.
    own: objectives of the requests, in turns.
    """
    cluster = VirtualCluster(1, 2, slots=64, slo=slo)
    cluster.prefill_tokens = 64
    cluster.step()
    for number in range(20):
        one = request(f"r{number}", tuple(range(number, number + 640)))
        tenant = Tenant(tenants[number % len(tenants)])
        objective = own[number % len(own)]
        cluster.submit(replace(one, arrival=cluster.now, tenant=tenant, slo=objective))
        cluster.run(0.1)
    cluster.settle()
    return cluster


SLO = {"ttft_ms": 2000, "itl_ms": 100}


@pytest.mark.parametrize("tenants", ["a", "abc"])
def test_with_an_slo_decode_workers_take_what_the_prefill_workers_cannot(tenants: str) -> None:
    def ttft(slo: dict[str, float] | None) -> list[float]:
        records = overrun(slo, tenants).records.values()
        return [one.token_at[0] - one.request.arrival for one in records]

    assert max(ttft(None)) > 5
    helped = ttft(SLO)
    assert max(helped) <= 2.4, "predictions are inexact"
    assert sum(one > 0.4 for one in helped) >= 5, "no prompt is taken without need"
    assert median(helped) < 0.25, "help does not come at the last moment"


def test_a_burst_is_helped_at_once() -> None:
    """The first of a burst would be in time, and the last would not."""
    cluster = VirtualCluster(1, 2, slots=64, slo=SLO)
    cluster.prefill_tokens = 128
    cluster.step()
    for number in range(12):
        one = request(f"r{number}", tuple(range(number, number + 640)))
        cluster.submit(replace(one, arrival=cluster.now))
    cluster.settle()
    waits = [one.token_at[0] - one.request.arrival for one in cluster.records.values()]
    assert median(waits) < 0.3
    assert max(waits) < 0.9


def test_the_prompts_of_a_tenant_are_helped_in_their_order() -> None:
    """A decode worker of this cluster takes no time, so the prompts that it prefills are those with
    an early first token.
    """
    records = list(overrun(SLO).records.values())
    waits = [one.token_at[0] - one.request.arrival for one in records]
    firsts = [one.token_at[0] for one in records]
    late = sum(earlier > later + 2 * STEP_S for earlier, later in pairwise(firsts))
    assert max(waits) > 0.4
    assert late <= 5, "each prompt that a prefill worker computes may be overtaken by the next"


def test_a_prompt_that_may_wait_keeps_no_help_from_those_behind_it() -> None:
    patient = Slo(ttft_ms=60_000)
    records = overrun(SLO, own=(patient, Slo())).records.values()
    waits = [one.token_at[0] - one.request.arrival for one in records]
    assert max(waits[3::2]) < 0.25
    assert max(waits[::2]) > 2.4, "who has time waits"


def test_a_full_queue_is_full_with_an_slo_too() -> None:
    cluster = VirtualCluster(1, 2, slots=64, slo=SLO, max_queue=10)
    cluster.prefill_tokens = 64
    cluster.step()
    for number in range(200):
        one = request(f"r{number}", tuple(range(number, number + 640)))
        cluster.submit(replace(one, arrival=cluster.now))
        assert cluster.dispatcher.waiting <= 10
    assert cluster.refused
