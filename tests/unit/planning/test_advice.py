"""Sizes of pools: they serve the demand, no smaller ones do, and the choice follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import FailedPrecondition
from kvrelay.planning.advice import Advice, advise
from kvrelay.planning.kv_size import KvSize
from kvrelay.planning.model_source import published
from kvrelay.planning.model_table import find_model
from kvrelay.planning.sizing.demand import Demand, LatencySlo
from kvrelay.planning.sizing.disaggregated import PoolSize, decode_pool, prefill_pool
from kvrelay.planning.sizing.worker_kind import FormulaCosts, WorkerKind, largest, smallest
from kvrelay.planning.step_cost_model import StepCostModel
from kvrelay.planning.workload import Workload


def kind(room: float = 4e9, degree: int = 1, **costs: float) -> WorkerKind:
    """A worker of 1 ms per prompt token, and of decode steps of 10 ms and 0.1 ms per sequence."""
    base = {
        "prefill_base_s": 0.0,
        "prefill_token_s": 1e-3,
        "prefill_token_context_s": 0.0,
        "decode_base_s": 1e-2,
        "decode_sequence_s": 1e-4,
        "decode_context_token_s": 0.0,
        "handoff_base_s": 0.0,
        "handoff_byte_s": 1e-10,
        "start_s": 1.0,
        "role_change_s": 1.0,
    }
    model = StepCostModel(**{**base, **costs}, kind="measured")
    found = find_model("qwen2.5-0.5b")
    assert found is not None
    kv = KvSize(published(found, None).shape, "bf16", "native")
    return WorkerKind(degree, FormulaCosts(model), kv, room)


def demand(
    rate: float = 5.0, prompt: int = 100, answer: int = 50, ttft_s: float = 1.0, itl_s: float = 0.05
) -> Demand:
    work = Workload(rate, rate, 1.0, ((prompt, answer),))
    return Demand(work, LatencySlo(ttft_s, itl_s, 0.9), 512)


DEMANDS = st.builds(
    demand,
    st.floats(0.1, 100),
    st.integers(10, 600),
    st.integers(2, 200),
    st.floats(0.7, 5),
    st.floats(0.011, 0.2),
)


def pool(size: PoolSize | str) -> PoolSize:
    assert isinstance(size, PoolSize), size
    return size


@settings(max_examples=60, deadline=None)
@given(DEMANDS)
def test_pools_carry_the_load(asked: Demand) -> None:
    prefill, decode = pool(prefill_pool(asked, kind())), pool(decode_pool(asked, kind()))
    work = asked.workload
    assert prefill.workers * 1 > work.rate * work.mean_prompt * 1e-3
    assert 0 < prefill.utilisation < 1
    assert decode.batch <= decode.max_batch
    generated = decode.workers * decode.batch / decode.step_s
    assert generated == pytest.approx(work.rate * work.decoded, rel=1e-6)
    assert decode.max_step_s <= asked.slo.itl_s
    assert prefill.missed + decode.missed <= 1 - asked.slo.attainment + 1e-9


@settings(max_examples=40, deadline=None)
@given(DEMANDS, st.floats(1, 3))
def test_more_load_or_a_tighter_slo_never_takes_fewer_workers(asked: Demand, by: float) -> None:
    work, slo = asked.workload, asked.slo
    more = replace(asked, workload=replace(work, rate=work.rate * by))
    loose = replace(asked, slo=replace(slo, ttft_s=slo.ttft_s * by, itl_s=slo.itl_s * by))
    for size in (prefill_pool, decode_pool):
        workers = pool(size(asked, kind())).workers
        assert pool(size(more, kind())).workers >= workers
        assert pool(size(loose, kind())).workers <= workers


@settings(max_examples=40, deadline=None)
@given(DEMANDS, st.floats(1, 4))
def test_more_memory_never_takes_more_workers(asked: Demand, by: float) -> None:
    small = pool(decode_pool(asked, kind(room=2e8)))
    assert pool(decode_pool(asked, kind(room=2e8 * by))).workers <= small.workers


@settings(max_examples=40, deadline=None)
@given(DEMANDS)
def test_the_choice_has_the_fewest_devices(asked: Demand) -> None:
    found = advise(asked, [kind(), kind(degree=2)])
    assert found.devices is not None
    if found.colocated is None:
        assert found.disaggregate
    else:
        assert found.chosen_devices == min(found.devices, found.colocated.devices)
        assert found.disaggregate == (found.devices < found.colocated.devices)
        assert found.colocated.missed <= 1 - asked.slo.attainment
    assert found.verdict.startswith("Disaggregate" if found.disaggregate else "Do not")
    assert str(found.chosen_devices) in found.verdict
    cost = found.cost(asked, 2.0)
    per_hour = asked.workload.rate * 3600 * asked.workload.mean_answer / 1e6
    assert cost.per_million_output * per_hour == pytest.approx(2.0 * found.chosen_devices)
    # The devices of the busiest minute run all day, and most of it brings fewer tokens.
    quiet = replace(asked, workload=replace(asked.workload, mean_rate=asked.workload.rate / 4))
    assert found.cost(quiet, 2.0).per_hour == cost.per_hour
    assert found.cost(quiet, 2.0).per_million_tokens == pytest.approx(4 * cost.per_million_tokens)


def test_a_small_load_is_not_disaggregated() -> None:
    found = advise(demand(rate=0.1), [kind()])
    assert (found.chosen_devices, found.disaggregate) == (1, False)
    assert "takes 1 device for the same SLO, and prefill and decode pools take 2" in found.verdict


def test_an_itl_of_little_more_than_a_decode_step_disaggregates() -> None:
    """A chunk of 16 tokens takes 16 ms beside the step of 10 ms."""
    found = advise(demand(itl_s=0.02), [kind()])
    assert found.disaggregate
    assert found.colocated is None
    assert "leaves no time for prompts" in found.verdict


@pytest.mark.parametrize(
    ("asked", "worker", "says"),
    [
        (demand(prompt=2000, ttft_s=1.0), kind(), "longer than the TTFT of 1000 ms"),
        (demand(itl_s=0.005), kind(), "above the ITL of 5 ms"),
        (demand(), kind(room=1e6), "no worker has memory for its KV"),
        (demand(rate=1e5), kind(), "more than 4,096 prefill workers"),
    ],
)
def test_an_impossible_demand_is_refused_with_the_reason(
    asked: Demand, worker: WorkerKind, says: str
) -> None:
    with pytest.raises(FailedPrecondition, match=says):
        advise(asked, [worker])


def test_a_slow_link_needs_more_workers() -> None:
    slow = kind(handoff_byte_s=1e-6)
    found = pool(prefill_pool(demand(), slow))
    assert found.limit == "hand-off link"
    assert found.link_utilisation <= 0.7


def test_bursts_need_more_workers() -> None:
    calm = demand(rate=30.0)
    bursty = replace(calm, workload=replace(calm.workload, arrival_scv=30.0))
    assert pool(prefill_pool(bursty, kind())).workers > pool(prefill_pool(calm, kind())).workers


def test_the_bottleneck_is_named() -> None:
    texts = set[str]()
    for asked in (demand(rate=50, prompt=900), demand(rate=50, answer=400), demand(rate=0.1)):
        found: Advice = advise(asked, [kind()])
        texts.add(found.bottleneck.split(":")[0])
    assert texts <= {"prefill", "decode", "prompts", "none"}
    assert len(texts) > 1


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_searches_find_the_edge(edge: int, most: int) -> None:
    assert largest(lambda number: number <= edge, most) == min(edge, most)
    expected = None if edge > most else max(1, edge)
    assert smallest(lambda number: number >= edge, 1, most) == expected
