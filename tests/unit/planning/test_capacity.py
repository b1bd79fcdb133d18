"""Users, contexts and step times move the right way, and agree with naive searches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import simulated

from kvrelay.errors import FailedPrecondition, KvRelayError
from kvrelay.planning.device import Device, Efficiency, device_names, find_device
from kvrelay.planning.handoff import hand_off
from kvrelay.planning.kv_size import KvSize
from kvrelay.planning.model_source import published
from kvrelay.planning.model_table import find_model, model_names
from kvrelay.planning.plan import Plan, Question, make_plan
from kvrelay.planning.roofline import Roofline
from kvrelay.planning.sizing.capacity import MOST, latency_context, latency_users
from kvrelay.planning.sizing.demand import LatencySlo
from kvrelay.planning.sizing.worker_kind import FlatKv, FormulaCosts, WorkerKind
from kvrelay.planning.workload import Workload

NAMES = st.sampled_from(model_names())
DEVICES = st.sampled_from(device_names())


def question(name: str, device: Device | str = "h100", **changes: object) -> Question:
    found = find_model(name)
    assert found is not None
    chosen = find_device(device) if isinstance(device, str) else device
    base = Question(published(found, None), chosen, LatencySlo(2.0, 0.1, 0.9))
    return replace(base, **changes)  # type: ignore[arg-type]


def planned(asked: Question) -> Plan | None:
    """The plan; None if the model does not fit."""
    try:
        return make_plan(asked)
    except FailedPrecondition:
        return None


def roofline(name: str = "llama-3.1-8b", device: str = "h100", degree: int = 1) -> Roofline:
    found = find_model(name)
    assert found is not None
    model = published(found, None)
    kv = KvSize(model.shape, "bf16", "native")
    return Roofline(model.memory, kv, find_device(device), Efficiency(), degree)


@settings(max_examples=40, deadline=None)
@given(NAMES, DEVICES, st.floats(1, 4), st.integers(1, 64), st.integers(1, 200_000))
def test_more_memory_never_serves_fewer(
    name: str, device: str, factor: float, users: int, context: int
) -> None:
    small = find_device(device)
    large = replace(small, memory_bytes=small.memory_bytes * factor)
    asked = question(name, small, devices=8, users=users, context=context)
    before, after = planned(asked), planned(replace(asked, device=large))
    if before is None:
        return
    assert after is not None
    assert after.walls[0].by_memory >= before.walls[0].by_memory
    assert after.users[0].by_memory >= before.users[0].by_memory
    assert after.free_bytes >= before.free_bytes


@settings(max_examples=40, deadline=None)
@given(NAMES, st.integers(1, 100_000), st.integers(1, 100_000), st.integers(1, 300))
def test_longer_contexts_and_more_users_never_fit_better(
    name: str, one: int, other: int, users: int
) -> None:
    short, long = sorted((one, other))
    asked = question(name, "h200", devices=8, users=users, context=short)
    before = planned(asked)
    after = planned(replace(asked, context=long, users=users + 1))
    if before is None:
        return
    assert after is not None
    assert after.users[0].by_memory <= before.users[0].by_memory
    assert after.users[0].by_latency <= before.users[0].by_latency
    assert after.walls[0].by_memory <= before.walls[0].by_memory
    assert after.walls[0].by_latency <= before.walls[0].by_latency


@given(NAMES, st.integers(1, 500), st.integers(0, 5000), st.sampled_from([1, 2, 4, 8]))
def test_more_work_never_takes_less_time(name: str, size: int, tokens: int, degree: int) -> None:
    costs = roofline(name, degree=degree)
    assert costs.decode_s(size + 1, tokens + 1) >= costs.decode_s(size, tokens)
    assert costs.prefill_s(size + 1, tokens) >= costs.prefill_s(size, tokens)
    assert costs.prefill_s(size, tokens + 1) >= costs.prefill_s(size, tokens)
    # Beside a batch, a chunk costs more than alone, and less than in a step of its own.
    mixed = costs.mixed_s(size, tokens, 8, 8 * tokens)
    both = costs.prefill_s(size, tokens) + costs.decode_s(8, 8 * tokens)
    assert costs.prefill_s(size, tokens) <= mixed * (1 + 1e-12)
    assert mixed <= both * (1 + 1e-12)


@given(NAMES, st.integers(1, 5000), st.integers(1, 600), st.integers(0, 3000))
def test_a_prompt_takes_about_the_sum_of_its_chunks(
    name: str, tokens: int, chunk: int, before: int
) -> None:
    """The attention of a prompt counts as one kernel, so its chunks may only take longer."""
    costs = roofline(name)
    done, total = 0, 0.0
    while done < tokens:
        size = min(chunk, tokens - done)
        total += costs.prefill_s(size, before + done)
        done += size
    whole = costs.prompt_s(tokens, chunk, before)
    assert whole <= total * (1 + 1e-9)
    # Each chunk reads the earlier KV again.
    reread = math.ceil(tokens / chunk) * costs.kv.sequence_bytes(before + tokens)
    assert total <= whole + reread / costs.bytes_per_s + 1e-12


@settings(max_examples=40)
@given(NAMES, st.integers(1, 64), st.floats(0.001, 0.5))
def test_the_wall_is_the_last_step_within_the_itl(name: str, users: int, itl_s: float) -> None:
    costs = roofline(name)
    tokens = latency_context(costs, users, itl_s)
    if tokens < MOST:
        assert costs.decode_s(users, users * (tokens + 1)) > itl_s
    if tokens:
        assert costs.decode_s(users, users * tokens) <= itl_s
        assert latency_users(costs, tokens, itl_s) >= users


def test_the_times_of_a_7b_model_by_hand() -> None:
    """1,024 tokens of prefill at 312 TFLOP/s take 46 ms, and a decode step at 2 TB/s takes 7 ms."""
    costs = roofline("llama-2-7b", "a100")
    ideal = replace(costs, efficiency=Efficiency(1, 1, 1))
    assert ideal.prefill_s(1024) * 1000 == pytest.approx(46, rel=0.05)
    assert ideal.decode_s(1, 1) * 1000 == pytest.approx(6.6, rel=0.05)
    assert ideal.bound(ideal.matrices(1024)) == "compute"
    assert ideal.bound(ideal.matrices(1)) == "bandwidth"


def test_one_token_reads_only_its_experts() -> None:
    memory = roofline("mixtral-8x7b").memory
    embeddings = 2 * 32000 * 4096
    assert memory.read_bytes(1) == pytest.approx(2 * 12.88e9 - embeddings, rel=0.001)
    assert memory.read_bytes(10_000) == pytest.approx(2 * 46.70e9 - embeddings, rel=0.001)


@given(NAMES, st.integers(1, 20_000), st.integers(16, 4096), st.floats(1e8, 1e12))
def test_a_hand_off_is_hidden_at_most_whole(
    name: str, tokens: int, chunk: int, rate: float
) -> None:
    costs = roofline(name)
    found = hand_off(costs, costs.kv, tokens, chunk, rate)
    assert found.num_bytes == pytest.approx(costs.kv.sequence_bytes(tokens))
    assert 0 <= found.hidden_share <= 1
    # The last chunk cannot be sent before it is computed.
    last = costs.kv.bytes_per_token * (tokens - (tokens - 1) // chunk * chunk)
    if tokens <= 256 * chunk:
        assert found.exposed_s >= last / rate * (1 - 1e-6)
    assert found.exposed_s <= found.transfer_s * (1 + 1e-9)


@given(NAMES, st.integers(1, 256), st.integers(1, 8192), st.integers(16, 4096))
def test_linear_costs_meet_the_roofline_where_they_are_fitted(
    name: str, batch: int, context: int, chunk: int
) -> None:
    costs = roofline(name)
    linear = costs.linear(batch, context, chunk)
    assert linear.kind == "analytic"
    exact = costs.decode_s(batch, batch * context)
    assert linear.decode_s(batch, batch * context) >= exact * (1 - 1e-9)
    assert linear.prefill_s(chunk) == pytest.approx(costs.prefill_s(chunk), rel=0.5)


@pytest.mark.parametrize("name", device_names())
def test_each_device_has_figures_and_their_source(name: str) -> None:
    device = find_device(name)
    assert min(device.memory_bytes, device.bandwidth, device.link, device.network) > 0
    assert device.rate("unknown") == device.rate("bf16") > 0
    assert len(device.source) > 20


def test_a_model_that_does_not_fit_is_refused_with_the_figures() -> None:
    with pytest.raises(KvRelayError, match=r"8 x NVIDIA L4.*812 GB of weights.*173 GB"):
        make_plan(question("llama-3.1-405b", "l4"))


@given(
    st.floats(0, 0.01),
    st.floats(1e-6, 1e-3),
    st.dictionaries(st.integers(1, 64), st.floats(0, 1e-2), max_size=3),
    st.integers(1, 128),
    st.floats(1, 1e5),
)
def test_a_rate_is_reached_wherever_a_batch_reaches_it(
    base: float, each: float, bends: dict[int, float], most: int, rate: float
) -> None:
    costs = simulated.profile(
        decode_base_s=base,
        decode_sequence_s=each,
        decode_context_token_s=0.0,
        decode_bends=tuple(sorted(bends.items())),
    ).costs
    kind = WorkerKind(1, FormulaCosts(costs), FlatKv(1.0), 1e12)
    reached = [batch for batch in range(1, most + 1) if batch / costs.decode_s(batch, 0) >= rate]
    found = kind.batch_at(rate, 0.0, most)
    if found is None:
        assert not reached
    else:
        assert found <= min([*reached, most]) * (1 + 1e-9)
        assert found / costs.decode_s(found, 0) >= rate * (1 - 1e-9)


@pytest.mark.parametrize("bends", [(), ((4, 1e-3),)])
def test_steps_that_cost_nothing_can_be_planned_with(bends: tuple[tuple[int, float], ...]) -> None:
    costs = simulated.profile(
        decode_base_s=0.0, decode_sequence_s=0.0, decode_context_token_s=0.0, decode_bends=bends
    ).costs
    work = Workload(20.0, 20.0, 1.0, ((100, 30),))
    found = planned(question("llama-3.1-8b", costs=costs, workload=work))
    assert found is not None
    assert found.advice is not None
    assert found.advice.decode is not None
    assert found.advice.colocated is not None
    assert found.advice.decode.workers == found.advice.colocated.workers == 1
