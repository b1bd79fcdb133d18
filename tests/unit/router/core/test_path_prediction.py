"""The path that is predicted to keep more requests within the SLO."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.dispatched import request
from support.router_cluster import VirtualCluster

from kvrelay.config.schema import ClusterConfig, RouterConfig
from kvrelay.tenants import ANONYMOUS, Tenant
from kvrelay.types.requests import Slo
from router.core.path_policy import Assignment, Wait, assign
from router.core.path_prediction import Outlook, outlook_of
from router.core.worker_view import WorkerView

NOBODY = frozenset[str]()
OUTLOOK = Outlook(ttft_s=2.0, itl_s=0.1, chunk_tokens=256, least_chunk=32)
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
        (0, replace(OUTLOOK, tokens_ahead=1100), "local"),
        (1100, None, "disaggregated"),
    ],
    ids=["in time", "queued", "late anyway", "waited", "ahead", "no SLO"],
)
def test_a_decode_worker_helps_where_prefill_workers_would_miss_the_ttft(
    queued: int, outlook: Outlook | None, expected: str
) -> None:
    decision = decide(replace(PREFILL, queued_tokens=queued), DECODE, outlook=outlook)
    assert path(decision) == expected


def test_the_reason_has_the_figures_for_those_who_see_the_cluster() -> None:
    decision = decide(replace(PREFILL, queued_tokens=3000), DECODE)
    assert isinstance(decision, Assignment)
    assert decision.reason == "slo_ttft"
    why = (
        "d prefills it within slo.itl_ms, because prefill workers are predicted to miss slo.ttft_ms"
    )
    assert decision.why_for(Tenant("another")) == why
    figures = "predicted TTFT 1.00 s instead of 4.00 s"
    assert decision.why_for(ANONYMOUS) == f"{why}, {figures}"


def test_a_busy_prefill_pool_is_helped_and_otherwise_waited_for() -> None:
    busy = replace(PREFILL, full=True, queued_tokens=1024)
    assert path(decide(busy, DECODE)) == "local"
    assert path(decide(busy, DECODE, num_tokens=500)) == "wait"


@pytest.mark.parametrize(
    ("decode", "why"),
    [
        (replace(DECODE, full=True), "no batch slot"),
        (replace(DECODE, takes_prompt=False), "prompts enough"),
        (replace(DECODE, streams=4, step_s=0.08), "too little time beside its answers"),
        (replace(DECODE, streams=4, step_s=0.2), "its answers are late already"),
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
        replace(DECODE, worker_id="d1", streams=8, step_s=0.03),
        replace(DECODE, worker_id="d2", held_tokens=9000),
        replace(DECODE, worker_id="d3", sick=True, cached_tokens=500),
    ]
    decision = decide(replace(PREFILL, queued_tokens=3000), *decoders)
    assert isinstance(decision, Assignment)
    assert decision.decode == "d2"


def test_an_unmeasured_decode_worker_counts_as_fast_as_the_prefill_workers() -> None:
    decision = decide(replace(PREFILL, queued_tokens=3000), replace(DECODE, prompt_rate=0.0))
    assert path(decision) == "local"


@given(
    st.builds(
        replace,
        st.just(PREFILL),
        queued_tokens=st.integers(0, 10**6),
        full=st.booleans(),
        prompt_rate=st.just(0.0),
    ),
    st.builds(replace, st.just(DECODE), streams=st.integers(0, 9), step_s=st.floats(0, 1)),
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
        (replace(DECODE, streams=4, step_s=0.02), PREFILL, "local"),
        (replace(DECODE, streams=4, step_s=0.085), PREFILL, "disaggregated"),
        (replace(DECODE, streams=4, step_s=0.085), replace(PREFILL, full=True), "local"),
        (replace(DECODE, streams=4, step_s=0.085), replace(PREFILL, queued_tokens=2000), "local"),
        # Nothing is left to keep.
        (replace(DECODE, streams=4, step_s=0.12), PREFILL, "local"),
        (replace(DECODE, queued_tokens=3000), PREFILL, "disaggregated"),
    ],
)
def test_a_short_prompt_does_not_delay_answers_that_are_in_time(
    decode: WorkerView, prefill: WorkerView, expected: str
) -> None:
    assert path(decide(prefill, decode, num_tokens=20)) == expected


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
    prompt_rate=st.just(0.0) | RATES,
    streams=st.integers(0, 3),
    step_s=st.floats(0, 0.12),
    itl_s=st.just(0.0) | st.floats(0.01, 0.2),
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
    assert not helper.streams or helper.step_s < (helper.itl_s or outlook.itl_s)
    for one in prefillers:
        alone = outlook.waited_s + (one.queued_tokens + num_tokens) / one.prompt_rate
        assert outlook.tokens_ahead or alone > outlook.ttft_s


@pytest.mark.parametrize(
    ("decode", "expected"),
    [
        (replace(DECODE, streams=4, step_s=0.05, itl_s=0.06), "disaggregated"),
        (replace(DECODE, streams=4, step_s=0.05, itl_s=0.1), "local"),
        (replace(DECODE, streams=4, step_s=0.15, itl_s=0.3), "local"),
    ],
    ids=["strict", "as configured", "loose"],
)
def test_running_answers_may_ask_for_their_own_itl(decode: WorkerView, expected: str) -> None:
    assert path(decide(replace(PREFILL, queued_tokens=9000), decode)) == expected


COMMON = {"slo": {"ttft_ms": 500, "itl_ms": 20}, "decode": {"chunk_tokens": 1024}}


@pytest.mark.parametrize(
    ("config", "slo", "ttft_s", "itl_s"),
    [
        (COMMON, Slo(), 0.5, 0.02),
        (COMMON, Slo(ttft_ms=50, itl_ms=1), 0.05, 0.02),
        ({**COMMON, "slo": None}, Slo(ttft_ms=50), 0.05, float("inf")),
    ],
)
def test_the_outlook_is_that_of_the_request_and_of_the_configuration(
    config: dict[str, object], slo: Slo, ttft_s: float, itl_s: float
) -> None:
    outlook = outlook_of(ClusterConfig.model_validate(config), slo, 0.25, 70)
    assert outlook == Outlook(ttft_s, itl_s, 1024, 128, 0.25, 70)


def test_without_any_ttft_the_threshold_decides() -> None:
    config = ClusterConfig.model_validate({"slo": None})
    assert outlook_of(config, Slo(itl_ms=5), 0.25, 70) is None


def ttft_of(slo: dict[str, float] | None) -> list[float]:
    """The TTFTs of prompts that come five times as fast as the prefill worker computes them."""
    cluster = VirtualCluster(1, 2, slots=64, slo=slo)
    cluster.prefill_tokens = 64
    for number in range(20):
        one = request(f"r{number}", tuple(range(number, number + 640)))
        cluster.submit(replace(one, arrival=cluster.now))
        cluster.run(0.1)
    cluster.settle()
    return [one.token_at[0] - one.request.arrival for one in cluster.records.values()]


def test_with_an_slo_decode_workers_take_what_the_prefill_workers_cannot() -> None:
    assert max(ttft_of(None)) > 5
    helped = ttft_of({"ttft_ms": 2000, "itl_ms": 100})
    assert max(helped) <= 2.1
    assert sum(one > 1 for one in helped) >= 5, "no prompt is taken without need"
