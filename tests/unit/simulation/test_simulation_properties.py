"""What holds for every simulation: conservation, bounds, determinism, and the theory of queues."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import simulated

from kvrelay.config.config_file import load_policy
from kvrelay.loadtest.report.report_file import report_from_json, report_to_json
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.slo import Slo
from kvrelay.loadtest.workload import PlannedRequest
from kvrelay.simulation.decode import SimulatedDecode
from kvrelay.simulation.scenario import Delays, Scenario
from kvrelay.simulation.simulation import Simulation

QUEUE_DEPTH = load_policy(
    Path(__file__).parents[3] / "configs" / "autoscaling" / "queue-depth.yaml"
)
FREE = {name: 0.0 for name in simulated.COSTS if name != "kind"}
SCENARIOS = st.builds(
    lambda prefill, decode, local, cache, batch, memory, slo: simulated.scenario(
        prefill,
        decode,
        config={
            "router": {"local_below_tokens": local},
            "kv": {"prefix_cache": cache, "memory": f"{memory}KiB"},
            "decode": {"max_batch": batch},
            "slo": slo,
        },
    ),
    prefill=st.integers(0, 3),
    decode=st.integers(1, 3),
    local=st.sampled_from([0, 64, 300]),
    cache=st.booleans(),
    batch=st.integers(1, 12),
    # 704 tokens at least, so that the longest request fits and batches compete for blocks.
    memory=st.sampled_from([704, 1024, 4096, 65536]),
    slo=st.sampled_from([None, {"ttft_ms": 200.0, "itl_ms": 30.0}]),
)
LOADS = st.builds(
    lambda rate, count, seed, shared: list(
        simulated.poisson(rate, count, seed=seed, shared=shared)
    ),
    rate=st.sampled_from([2.0, 10.0, 60.0]),
    count=st.integers(1, 30),
    seed=st.integers(0, 2**20),
    shared=st.sampled_from([0, 100, 200]),
)


def check_conserved(report: Report, plan: list[PlannedRequest]) -> None:
    """Each request has one end, with all of its tokens, in order of time."""
    assert [row.index for row in report.rows] == list(range(len(plan)))
    for row, planned in zip(report.rows, plan, strict=True):
        assert row.ok, row.message
        assert planned.token_ids is not None
        assert row.output_tokens == planned.output_tokens
        assert row.prompt_tokens == len(planned.token_ids)
        assert 0 <= row.cached_tokens < row.prompt_tokens
        assert len(row.itl_s) == planned.output_tokens - 1
        assert min(row.itl_s, default=0.0) >= 0
        assert row.ttft_s is not None
        assert row.e2e_s == pytest.approx(row.ttft_s + sum(row.itl_s))


def check_bounds(report: Report, cluster: Scenario) -> None:
    """No request is faster than its own steps, without any other request."""
    costs = cluster.pools["decode"][0].costs
    chunk = max(cluster.config.prefill.chunk_tokens, cluster.config.decode.chunk_tokens)
    for row in report.rows:
        uncached = row.prompt_tokens - row.cached_tokens
        assert row.ttft_s is not None
        assert row.ttft_s >= costs.prompt_s(uncached, chunk, row.cached_tokens) - 1e-9
        # A disaggregated answer's first gap contains the hand-off.
        least = costs.decode_s(1, row.prompt_tokens)
        assert min(row.itl_s, default=math.inf) >= least - 1e-9


def check_emptied(simulation: Simulation) -> None:
    """No worker holds a sequence or a block after the last request."""
    for cluster in simulation.clusters:
        for worker in cluster.workers.values():
            worker.cache.check_integrity()
            assert worker.empty
            assert worker.cache.pool.num_held == 0


@settings(max_examples=25, deadline=None)
@given(SCENARIOS, LOADS)
def test_every_request_ends_once_with_its_tokens_within_its_bounds(
    cluster: Scenario, plan: list[PlannedRequest]
) -> None:
    simulation = Simulation(cluster, plan, {})
    report = simulation.run()
    while simulation.agenda.run_next():
        pass
    check_conserved(report, plan)
    check_bounds(report, cluster)
    check_emptied(simulation)


@settings(max_examples=15, deadline=None)
@given(SCENARIOS, LOADS)
def test_runs_of_steps_equal_single_steps_of_the_scheduler(
    cluster: Scenario, plan: list[PlannedRequest]
) -> None:
    """The oracle: each decode step comes from the production scheduler."""
    # What the router knows, and when, differs between the two. So its choices must not depend on
    # the tokens of running answers, and a batch must not run out of blocks.
    router = cluster.config.router.model_copy(update={"policy": "round_robin"})
    kv = cluster.config.kv.model_copy(update={"memory": 2**26})
    config = cluster.config.model_copy(update={"router": router, "kv": kv, "slo": None})
    cluster = replace(cluster, config=config)
    with pytest.MonkeyPatch.context() as patch:
        fast = simulated.run(cluster, plan)
        patch.setattr(SimulatedDecode, "_has_room", lambda _: False)
        slow = simulated.run(cluster, plan)
    for one, other in zip(fast.rows, slow.rows, strict=True):
        assert one.ttft_s == pytest.approx(other.ttft_s, abs=1e-9)
        assert one.itl_s == pytest.approx(other.itl_s, abs=1e-9)
        assert (one.path, one.cached_tokens) == (other.path, other.cached_tokens)


@settings(max_examples=10, deadline=None)
@given(SCENARIOS, LOADS)
def test_equal_arguments_give_equal_reports(cluster: Scenario, plan: list[PlannedRequest]) -> None:
    assert simulated.run(cluster, plan) == simulated.run(cluster, plan)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_worker_with_equal_prompts_is_an_m_d_1_queue(load: float) -> None:
    """The mean wait of M/D/1 is load x service / 2 (1 - load): Pollaczek and Khinchine."""
    costs = {
        "prefill_base_s": 0.0,
        "prefill_token_s": 1e-3,
        "prefill_token_context_s": 0.0,
        "handoff_base_s": 0.0,
        "handoff_byte_s": 0.0,
    }
    service_s, count = 0.1, 6000
    cluster = simulated.scenario(
        0,
        1,
        simulated.profile(**costs),
        config={
            "kv": {"prefix_cache": False},
            "slo": None,
            # One prompt for each step.
            "decode": {"chunk_tokens": 100, "max_batch": 1024},
            "router": {"max_queue": 10000, "default_deadline_s": 10000.0},
        },
        delays=Delays(0.0, 0.0, 0.0),
    )
    plan = simulated.poisson(load / service_s, count, prompt=(100, 100), answer=(1, 1), seed=3)
    report = simulated.run(cluster, plan)
    waits = [row.ttft_s - service_s for row in report.rows if row.ttft_s is not None]
    assert len(waits) == count
    expected = load * service_s / (2 * (1 - load))
    # Waits are correlated; the tolerance is about three standard errors of this many.
    assert sum(waits) / count == pytest.approx(expected, rel=0.05 + 0.15 * load)


def test_the_router_finds_the_worker_that_has_the_prefix() -> None:
    """Three shared prefixes in a random order, on three prefill workers."""
    random = Random(0)
    shared = [tuple(random.choices(range(simulated.VOCAB), k=1024)) for _ in range(3)]
    groups = [random.randrange(3) for _ in range(60)]
    plan = [
        PlannedRequest(
            2.0 * number, None, (*shared[group], *[7 * number % 900 + 1] * 20), 4, number
        )
        for number, group in enumerate(groups)
    ]
    rows = simulated.run(simulated.scenario(3, 1), plan).rows
    for number, row in enumerate(sorted(rows, key=lambda one: one.scheduled_s)):
        seen = groups[number] in groups[:number]
        assert row.cached_tokens >= (1024 if seen else 0)


def test_more_workers_serve_no_less() -> None:
    def goodput(workers: int) -> float:
        plan = simulated.poisson(40.0, 400, answer=(20, 60), seed=5)
        slos = (Slo("ttft", 150.0), Slo("tpot", 20.0))
        return simulated.run(simulated.scenario(workers, workers), plan, slos=slos).good_share

    shares = [goodput(workers) for workers in (1, 2, 4, 8)]
    assert all(after >= before - 0.01 for before, after in pairwise(shares))
    assert shares[-1] > 0.98
    assert shares[-1] > shares[0]


def test_a_killed_worker_costs_time_and_no_request() -> None:
    plan = list(simulated.poisson(8.0, 120, answer=(20, 60), seed=1))
    calm = simulated.run(simulated.scenario(1, 2), plan)
    killed = simulated.run(
        simulated.scenario(1, 2, failures=[("decode-0", 4.0), ("prefill-0", 8.0)]), plan
    )
    check_conserved(killed, plan)
    e2e = [max(row.e2e_s or 0.0 for row in one.rows) for one in (calm, killed)]
    assert e2e[1] > e2e[0]
    retried = [row for row in killed.rows if row.ledger and len(row.ledger.attempts) > 1]
    assert retried
    assert killed.options["worker_seconds"] < 3 * killed.options["simulated_seconds"]
    assert killed.timeline is not None
    sizes = [one.pools["decode"].workers for one in killed.timeline.samples]
    assert 1 in sizes
    assert sizes[-1] == 2


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_batches_that_outgrow_their_blocks_are_preempted(seed: int) -> None:
    config = {"kv": {"memory": "1024KiB", "block_size": 16}, "router": {"preemption": False}}
    plan = list(simulated.poisson(50.0, 40, prompt=(150, 200), answer=(100, 300), seed=seed))
    simulation = Simulation(simulated.scenario(1, 1, config=config), plan, {})
    report = simulation.run()
    while simulation.agenda.run_next():
        pass
    check_conserved(report, plan)
    check_emptied(simulation)
    worker = simulation.clusters[0].workers["decode-0"]
    assert worker.load().preemptions > 0


@pytest.mark.sweep(6)
@pytest.mark.parametrize("seed", range(6))
def test_two_pools_that_are_too_small_both_grow(seed: int) -> None:
    """Requests then wait for a batch slot and for a prefill worker by turns."""
    random = Random(seed)
    # The share of the requests that each pool can serve.
    prefill, decode = random.uniform(0.3, 0.75), random.uniform(0.3, 0.75)
    rate, prompt, answer, slots = 20.0, 1000, 100, 16
    worker = simulated.profile(
        **FREE
        | {
            "prefill_token_s": 1 / (rate * prefill * prompt),
            "decode_sequence_s": 1 / (rate * decode * answer),
            "start_s": 5.0,
        }
    )
    cluster = simulated.scenario(
        1, 1, worker, policy=QUEUE_DEPTH.model_dump(), config={"decode": {"max_batch": slots}}
    )
    plan = simulated.poisson(
        rate, int(40 * rate), prompt=(prompt, prompt), answer=(answer, answer), seed=seed
    )
    report = simulated.run(cluster, plan)
    assert report.timeline is not None
    grown = {
        one.pool for one in report.timeline.decisions if one.at_s < 40 and one.after > one.before
    }
    assert grown == {"prefill", "decode"}


def test_a_policy_grows_and_shrinks_the_pools() -> None:
    rules = {
        "min_replicas": 1,
        "max_replicas": 4,
        "metrics": [{"name": "queue_depth", "target": 2.0}],
        "upscale_delay_s": 1.0,
        "downscale_delay_s": 5.0,
    }
    busy = list(simulated.poisson(60.0, 600, prompt=(400, 600), answer=(5, 20), seed=2))
    last = busy[-1].at
    calm = [replace(one, at=last + 3 * one.at) for one in simulated.poisson(1.0, 60, seed=4)]
    cluster = simulated.scenario(1, 2, policy={"prefill": rules})
    report = simulated.run(cluster, [*busy, *calm])
    check_conserved(report, [*busy, *calm])
    assert report.timeline is not None
    sizes = [one.after for one in report.timeline.decisions]
    assert max(sizes) > 1
    assert sizes[-1] == 1
    assert all(one.pool == "prefill" for one in report.timeline.decisions)


def test_routers_share_workers_and_requests() -> None:
    plan = list(simulated.poisson(20.0, 100, seed=6))
    report = simulated.run(simulated.scenario(2, 4, routers=2), plan)
    check_conserved(report, plan)


def test_large_runs_keep_some_rows_and_all_rates() -> None:
    plan = list(simulated.poisson(20.0, 300, answer=(10, 10), seed=6))
    every = simulated.run(simulated.scenario(1, 2), plan)
    some = simulated.run(simulated.scenario(1, 2), plan, max_rows=50)
    assert (len(some.rows), some.row_every) == (38, 8)
    assert some.rates()["requests"] == pytest.approx(every.rates()["requests"], rel=0.05)
    assert some.rows[1] == every.rows[8]
    assert report_from_json(json.loads(json.dumps(report_to_json(some)))) == some


def test_the_router_measures_single_steps() -> None:
    """Equal workers with unlike batches stay healthy, and a slow worker among them is found."""
    slow = simulated.profile(decode_base_s=0.2)
    equal = simulated.scenario(1, 4, config={"router": {"policy": "round_robin"}})
    unlike = replace(equal, pools={**equal.pools, "decode": (*equal.pools["decode"][:3], slow)})
    plan = list(simulated.poisson(4.0, 150, prompt=(100, 100), answer=(100, 300), seed=8))
    found = {}
    for name, cluster in (("equal", equal), ("unlike", unlike)):
        simulation = Simulation(cluster, plan, {})
        dispatcher = simulation.clusters[0].router.dispatcher
        sick: set[str] = set()
        for second in range(10, 40):
            simulation.agenda.at(
                second,
                lambda dispatcher=dispatcher, sick=sick: sick.update(  # type: ignore[misc]
                    one.worker_id for one in dispatcher.sick
                ),
            )
        check_conserved(simulation.run(), plan)
        found[name] = sick
    assert found == {"equal": set(), "unlike": {"decode-3"}}


def test_steps_without_cost_take_no_time() -> None:
    free = simulated.profile(**FREE)
    cluster = simulated.scenario(1, 2, free, delays=Delays(0.0, 0.0, 0.0))
    plan = list(simulated.poisson(10.0, 40))
    report = simulated.run(cluster, plan)
    check_conserved(report, plan)
    assert all(row.e2e_s == pytest.approx(0.0, abs=0.02) for row in report.rows)


def test_long_pauses_cost_few_actions() -> None:
    plan = [replace(one, at=1e5 * one.at) for one in simulated.poisson(1.0, 20)]
    simulation = Simulation(simulated.scenario(1, 1), plan, {})
    check_conserved(simulation.run(), plan)
    assert simulation.agenda.now > 1e5
    assert simulation.agenda.actions_run < 200 * len(plan)


def test_a_pool_takes_a_spare_worker_of_the_other_pool() -> None:
    bounds = {"min_replicas": 1, "max_replicas": 4, "upscale_delay_s": 1.0}
    policy = {
        "rebalance": True,
        "prefill": {**bounds, "metrics": [{"name": "queue_depth", "target": 4.0}]},
        "decode": {**bounds, "metrics": [{"name": "queue_depth", "target": 2.0}]},
    }
    # A start takes longer than the whole load, so only a role change helps.
    worker = simulated.profile(start_s=500.0)
    cluster = simulated.scenario(
        3, 1, worker, policy=policy, config={"decode": {"max_batch": 4}, "slo": None}
    )
    plan = list(simulated.poisson(8.0, 150, prompt=(100, 200), answer=(100, 200), seed=9))
    report = simulated.run(cluster, plan)
    check_conserved(report, plan)
    assert report.timeline is not None
    pools = [(one.pool, one.after - one.before) for one in report.timeline.decisions]
    assert ("prefill", -1) in pools
    assert max(one.pools["decode"].workers for one in report.timeline.samples) > 1


def test_the_load_of_a_decode_worker_equals_that_of_single_steps() -> None:
    """Its utilisation, from which the policy decides, does not depend on runs of steps."""

    def shares() -> list[float]:
        plan = simulated.poisson(6.0, 80, prompt=(100, 100), answer=(100, 150), seed=2)
        config = {"router": {"policy": "round_robin"}, "slo": None}
        report = simulated.run(simulated.scenario(1, 2, config=config), plan)
        assert report.timeline is not None
        return [one.pools["decode"].busy_share for one in report.timeline.samples]

    fast = shares()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedDecode, "_has_room", lambda _: False)
        slow = shares()
    assert max(fast) > 0.1
    assert fast == pytest.approx(slow, abs=0.01)


@pytest.mark.parametrize("at_s", [1.0, 1.3, 2.05])
def test_a_client_keeps_the_tokens_of_a_worker_that_dies(at_s: float) -> None:
    plan = [PlannedRequest(0.0, None, tuple(range(300)), 400, 7)]

    def times(failures: list[tuple[str, float]]) -> list[float]:
        cluster = simulated.scenario(1, 1, simulated.profile(start_s=1.0), failures=failures)
        (row,) = simulated.run(cluster, plan).rows
        assert row.ok
        assert row.ttft_s is not None
        return list(accumulate([row.ttft_s, *row.itl_s]))

    calm, killed = times([]), times([("decode-0", at_s)])
    # What has arrived at the router is still on its way to the client.
    before = sum(at <= at_s + Delays().message_s for at in calm)
    assert before > 50
    assert killed[:before] == pytest.approx(calm[:before], abs=1e-9)
    assert killed[before] > at_s + 1.0
    assert len(killed) == 400
