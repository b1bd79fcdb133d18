"""The metric slo: the sizes of `kvrelay plan` for the load to come, corrected by what workers
measure.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.poisson import poisson

from autoscaler.look_ahead import LookAhead
from autoscaler.pool_sizes import decide_pools
from autoscaler.scaling_policy import Foreseen, PoolSnapshot, PoolState, decide, least_size
from autoscaler.snapshot import snapshot
from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.planning.profile import Profile
from kvrelay.planning.sizing.demand import Demand, LatencySlo
from kvrelay.planning.sizing.disaggregated import PoolSize, decode_pool, prefill_pool
from kvrelay.planning.sizing.worker_kind import FlatKv, FormulaCosts, WorkerKind
from kvrelay.planning.step_cost_model import StepCostModel
from kvrelay.planning.workload import Workload
from kvrelay.types.control_plane import RequestShape, RouterLoad
from kvrelay.types.workers import POOLS, PoolName, WorkerInfo, WorkerLoad

COSTS = StepCostModel(
    prefill_base_s=0.002,
    prefill_token_s=2e-4,
    prefill_token_context_s=1e-8,
    decode_base_s=0.01,
    decode_sequence_s=0.001,
    decode_context_token_s=1e-7,
    handoff_base_s=1e-4,
    handoff_byte_s=1e-10,
    start_s=10.0,
    role_change_s=0.5,
    kind="measured",
)
PROFILE = Profile(COSTS, kv_token_bytes=1000, max_model_len=8192, vocab_size=32_000)
CHUNK, SLOTS, BLOCK, BLOCKS = 512, 32, 16, 4000
SHAPES = (RequestShape(400, 0, 50), RequestShape(1600, 0, 150)) * 10


def policy(**changes: Any) -> AutoscalingPolicy:
    rules = {
        pool: {"max_replicas": 50, "metrics": [{"name": "slo", key: limit}]}
        for pool, key, limit in (("prefill", "ttft_ms", 1000.0), ("decode", "itl_ms", 40.0))
    }
    return AutoscalingPolicy.model_validate({"profile": "profile.json", **rules, **changes})


def worker(pool: PoolName, number: int, busy: float) -> WorkerInfo:
    return WorkerInfo(
        f"{pool}-{number}",
        pool,
        1,
        "ready",
        "127.0.0.1:1",
        "demo",
        "00",
        BLOCK,
        BLOCK * PROFILE.kv_token_bytes,
        "host",
        8192,
        WorkerLoad(busy_share=busy, blocks_total=BLOCKS),
    )


class Load:
    """A load of `rate` requests per second that workers find `factor` times as heavy as the
    profile says.
    """

    def __init__(self, rate: float, factor: float = 1.0, sizes: tuple[int, int] = (4, 4)) -> None:
        self.ahead = LookAhead(policy(), PROFILE, CHUNK, SLOTS)
        self.rate, self.factor, self.sizes = rate, factor, sizes
        self.now, self.admitted = 0.0, 0.0

    def after(self, seconds: float, trend: float = 0.0) -> dict[PoolName, Foreseen]:
        found: dict[PoolName, Foreseen] = {}
        end = self.now + seconds
        while self.now < end:
            self.now += 1
            self.rate += trend
            self.admitted += self.rate
            router = RouterLoad("router-0", begun=int(self.admitted), recent=SHAPES)
            found = dict(self.ahead.foresee(self.workers(), [router], self.now))
        return found

    def workers(self) -> list[WorkerInfo]:
        demands = [demand(pool, self.rate) for pool in POOLS]
        loads = [
            self.factor * self.ahead._load(pool, one, KIND)
            for pool, one in zip(POOLS, demands, strict=True)
        ]
        return [
            worker(pool, number, min(1.0, load / size))
            for pool, load, size in zip(POOLS, loads, self.sizes, strict=True)
            for number in range(size)
        ]


KIND = WorkerKind(
    1,
    FormulaCosts(COSTS),
    FlatKv(float(PROFILE.kv_token_bytes)),
    float(BLOCKS * BLOCK * PROFILE.kv_token_bytes),
)


def demand(pool: PoolName, rate: float) -> Demand:
    lengths = tuple(sorted((one.prompt_tokens, one.output_tokens) for one in SHAPES))
    slo = LatencySlo(1.0, 1e6) if pool == "prefill" else LatencySlo(1e6, 0.04)
    return Demand(Workload(rate, rate, 1.0, lengths), slo, CHUNK)


def planned(rate: float) -> dict[PoolName, int]:
    """What `kvrelay plan` gives, or more where requests at random need it."""
    prefill = prefill_pool(demand("prefill", rate), KIND)
    decode = decode_pool(demand("decode", rate), KIND, SLOTS)
    assert isinstance(prefill, PoolSize)
    assert isinstance(decode, PoolSize)
    ahead = LookAhead(policy(), PROFILE, CHUNK, SLOTS)
    return {
        pool: max(size.workers, least_size(ahead._load(pool, demand(pool, rate), KIND)))
        for pool, size in zip(POOLS, (prefill, decode), strict=True)
    }


@pytest.mark.parametrize("rate", [2.0, 10.0, 40.0])
def test_an_even_load_gets_the_planned_sizes(rate: float) -> None:
    found = Load(rate, sizes=(40, 40)).after(120)
    near = (planned(0.98 * rate), planned(1.02 * rate))
    for pool in POOLS:
        assert near[0][pool] <= found[pool].size <= near[1][pool]
        assert f"{rate:g} requests/s" in found[pool].reason


def test_batches_that_are_slower_than_smaller_ones_make_no_load() -> None:
    """A worker generates most tokens at 8 sequences, and an eighth of them at 64."""
    bent = replace(COSTS, decode_sequence_s=0.0, decode_bends=((8, 0.01),))
    kind = replace(KIND, costs=FormulaCosts(bent))
    ahead = LookAhead(policy(), replace(PROFILE, costs=bent), CHUNK, 64)
    asked = demand("decode", 5.0)
    tokens_per_s = 5.0 * asked.workload.decoded
    mean, _ = asked.workload.context()
    fastest = max(batch / bent.decode_s(batch, batch * mean) for batch in range(1, 65))
    assert ahead._load("decode", asked, kind) == pytest.approx(tokens_per_s / fastest)


def test_a_rising_load_gets_the_sizes_of_the_time_when_a_worker_serves() -> None:
    load = Load(2.0, sizes=(40, 40))
    load.after(60)
    found = load.after(60, trend=0.5)
    # 10 s of start, 5 s of upscale_delay_s, 1 s of interval_s.
    now, then = planned(load.rate), planned(load.rate + 16 * 0.5)
    for pool in POOLS:
        assert now[pool] < found[pool].size <= then[pool] + 1


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_profile_that_is_off_is_corrected(factor: float) -> None:
    found = Load(10.0, factor, sizes=(40, 40)).after(300)
    near = (planned(0.93 * factor * 10), planned(1.07 * factor * 10))
    for pool in POOLS:
        assert near[0][pool] <= found[pool].size <= near[1][pool]
        assert f"measured load {factor:.1g}" in found[pool].reason.replace("1.9", "2")


def test_an_overloaded_pool_does_not_hide_its_load() -> None:
    """A pool that is busy all the time measures less load than there is."""
    found = Load(20.0, sizes=(1, 1)).after(120)
    assert found["prefill"].size >= planned(20.0)["prefill"]
    assert found["decode"].size >= planned(20.0)["decode"]


def test_a_pool_that_does_no_work_is_not_grown() -> None:
    """Decode workers may compute all the prompts."""
    load = Load(40.0, factor=0.001, sizes=(9, 9))
    found = load.after(120)
    assert found["prefill"].size == found["decode"].size == 1


def test_a_prefill_pool_without_requests_may_be_empty() -> None:
    assert Load(0.0).after(60)["prefill"].size == 0


def test_an_slo_that_no_size_keeps_is_told_and_the_load_still_served() -> None:
    tight = policy(
        prefill={"max_replicas": 50, "metrics": [{"name": "slo", "ttft_ms": 1.0}]},
        decode={"max_replicas": 50, "metrics": [{"name": "slo", "itl_ms": 1.0}]},
    )
    load = Load(10.0, sizes=(40, 40))
    load.ahead = LookAhead(tight, PROFILE, CHUNK, SLOTS)
    found = load.after(60)
    assert "longer than the TTFT of 1 ms" in found["prefill"].reason
    assert "above the ITL of 1 ms" in found["decode"].reason
    for pool in POOLS:
        assert found[pool].size >= load.ahead._load(pool, demand(pool, 10.0), KIND)


def test_nothing_is_foreseen_without_lengths_or_a_rate() -> None:
    ahead = LookAhead(policy(), PROFILE, CHUNK, SLOTS)
    for now in range(60):
        few = RouterLoad("router-0", begun=now, recent=SHAPES[:7])
        assert ahead.foresee([], [few], float(now)) == {}
    assert LookAhead(policy(), PROFILE, CHUNK, SLOTS).foresee([], [], 0.0) == {}


def test_a_policy_for_one_pool_leaves_the_other_alone() -> None:
    load = Load(10.0)
    load.ahead = LookAhead(policy(decode={"max_replicas": 4}), PROFILE, CHUNK, SLOTS)
    assert load.after(60).keys() == {"prefill"}


def test_the_pool_follows_what_is_foreseen() -> None:
    rules = policy().prefill
    assert rules is not None
    rules = rules.model_copy(update={"upscale_delay_s": 0.0, "max_step_up": 50})
    decided, _ = decide(PoolSnapshot(1, 1, {}, 0.5, Foreseen(3, "why")), rules, None, 0.0)
    assert (decided.desired, decided.reason) == (3, "why")
    unknown, _ = decide(PoolSnapshot(1, 1, {}, 0.5, None), rules, None, 0.0)
    assert unknown.desired == 1
    # An unknown metric may be large.
    rules = rules.model_copy(
        update={"metrics": (*rules.metrics, rules.metrics[0].model_validate(QUEUE))}
    )
    kept, _ = decide(PoolSnapshot(4, 4, {"queue_depth": 0.0}, 0.0, None), rules, None, 0.0)
    assert (kept.desired, "not known: slo" in kept.reason) == (4, True)


@pytest.mark.parametrize("rate", [0.5, 5.0, 40.0])
@pytest.mark.long
def test_requests_at_random_times_seldom_change_a_size(rate: float) -> None:
    rng, load, requests = random.Random(1), Load(rate), 0
    rules = policy()
    for pool in POOLS:
        patient = rules.pool(pool).model_copy(update={"downscale_delay_s": 60.0})  # type: ignore[union-attr]
        rules = rules.model_copy(update={pool: patient})
    states: dict[PoolName, PoolState] = {}
    sizes: dict[PoolName, int] = dict.fromkeys(POOLS, 2)
    changes = 0
    for now in range(3600):
        requests += poisson(rng, rate)
        router = RouterLoad("router-0", begun=requests, recent=SHAPES)
        load.sizes = (sizes["prefill"], sizes["decode"])
        workers = load.workers()
        foreseen = load.ahead.foresee(workers, [router], float(now))
        seen = {
            pool: snapshot(pool, sizes[pool], workers, [router], foreseen.get(pool))
            for pool in POOLS
        }
        verdicts = decide_pools(seen, rules, states, float(now))
        states = {pool: state for pool, (_, state) in verdicts.items()}
        after = {pool: decision.desired for pool, (decision, _) in verdicts.items()}
        changes, sizes = changes + (now > 600 and after != sizes), after
    # A burst may grow a pool, which shrinks again.
    assert changes <= 4
    assert all(0 <= sizes[pool] - planned(rate)[pool] <= 2 for pool in POOLS)


QUEUE = {"name": "queue_depth", "target": 2.0}
NUMBERS = st.one_of(st.integers(0, 10_000), st.sampled_from([0, 1, 2**31, 2**53, 2**63 - 1]))
LIMITS = st.one_of(
    st.floats(1, 10_000), st.floats(0, 1.7e308, exclude_min=True), st.sampled_from([5e-324, 1e-9])
)
SHARES = st.one_of(st.floats(0, 1), st.floats(0, 1e308))


@given(
    counts=st.lists(NUMBERS, min_size=1, max_size=5),
    shapes=st.lists(st.builds(RequestShape, NUMBERS, NUMBERS, NUMBERS), min_size=8, max_size=64),
    loads=st.lists(st.tuples(st.sampled_from(POOLS), SHARES, NUMBERS), max_size=4),
    limits=st.tuples(LIMITS, LIMITS),
)
def test_whatever_policy_and_registry_hold_gives_a_size(
    counts: list[int],
    shapes: list[RequestShape],
    loads: list[tuple[PoolName, float, int]],
    limits: tuple[float, float],
) -> None:
    """Redis is untrusted."""
    rules = policy(
        prefill={"metrics": [{"name": "slo", "ttft_ms": limits[0]}]},
        decode={"metrics": [{"name": "slo", "itl_ms": limits[1]}]},
    )
    ahead = LookAhead(rules, PROFILE, CHUNK, SLOTS)
    workers = [
        replace(worker(pool, n, busy), load=WorkerLoad(busy_share=busy, blocks_total=blocks))
        for n, (pool, busy, blocks) in enumerate(loads)
    ]
    for number in range(20):
        router = RouterLoad("r", begun=counts[number % len(counts)], recent=tuple(shapes))
        for pool, found in ahead.foresee(workers, [router], 3.0 * number).items():
            assert found.size >= (pool == "decode")
            assert len(found.reason) < 512
            assert not math.isnan(found.size)
