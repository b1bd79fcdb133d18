"""More is asked for than can be served: goodput, fairness and retry delays, in virtual time."""

from __future__ import annotations

from random import Random

import pytest
from support.router_cluster import STEP_S, VirtualCluster

from kvrelay.errors import ResourceExhausted
from kvrelay.tenants import Tenant
from kvrelay.types.requests import SamplingParams
from router.core.request import Request

SLOTS = 8
TOKENS = 20
CAPACITY = 2 * SLOTS / (TOKENS * STEP_S)  # requests a second of two decode workers
DEADLINE_S = 4.0
PROMPT = (1, 2, 3)


def offer(
    cluster: VirtualCluster, seconds: float, rates: dict[Tenant, float], seed: int = 1
) -> None:
    """Poisson arrivals of each tenant."""
    random = Random(seed)
    due = {tenant: cluster.now + random.expovariate(rate) for tenant, rate in rates.items()}
    until = cluster.now + seconds
    while cluster.now < until:
        for tenant, rate in rates.items():
            while due[tenant] <= cluster.now:
                name = f"{tenant.name}{len(cluster.records)}"
                tokens = random.randint(TOKENS // 2, TOKENS * 3 // 2)
                sampling = SamplingParams(max_tokens=tokens, seed=len(cluster.records))
                deadline = cluster.now + DEADLINE_S
                cluster.submit(
                    Request(name, PROMPT, sampling, cluster.now, deadline, tenant=tenant)
                )
                due[tenant] += random.expovariate(rate)
        cluster.step()


def goodput(cluster: VirtualCluster, since: float) -> float:
    """Whole answers by their deadline, per second."""
    whole = [one for one in cluster.records.values() if one.whole and one.request.arrival >= since]
    assert all(one.ended_at <= one.request.deadline + STEP_S for one in whole)
    return len(whole) / (cluster.now - since)


@pytest.mark.parametrize("load", [1.0, 2.0, 3.0])
@pytest.mark.sweep(3)
def test_goodput_stays_where_it_is(load: float) -> None:
    cluster = VirtualCluster(0, 2, SLOTS)
    offer(cluster, 20.0, {Tenant(): load * CAPACITY})
    since = cluster.now
    offer(cluster, 40.0, {Tenant(): load * CAPACITY})
    assert goodput(cluster, since) > 0.9 * CAPACITY * min(1.0, load)
    late = [one for one in cluster.records.values() if one.end is not None and not one.whole]
    worked_for = [one for one in late if one.tokens]
    assert len(worked_for) < 0.05 * len(cluster.records), "almost nothing is computed in vain"


def test_who_would_be_too_late_is_told_at_once_and_when_to_come_back() -> None:
    cluster = VirtualCluster(0, 2, SLOTS)
    offer(cluster, 20.0, {Tenant(): 3 * CAPACITY})
    errors = list(cluster.refused.values())
    assert len(errors) > 0.4 * len(cluster.records)
    assert all(isinstance(one, ResourceExhausted) for one in errors)
    delays = [one.retry_after_s or 0.0 for one in errors[-100:]]
    assert all(0.3 < one < 2 * DEADLINE_S for one in delays)
    assert len(set(delays)) > 90, "they do not come back in step"
    assert "its deadline is in 4.0 s" in errors[-1].message
    assert cluster.dispatcher.admission.rejected["deadline"] >= len(errors)


def test_without_a_queue_nobody_is_refused_for_a_short_deadline() -> None:
    cluster = VirtualCluster(0, 2, SLOTS)
    offer(cluster, 10.0, {Tenant(): 0.3 * CAPACITY})
    cluster.settle()
    sampling = SamplingParams(max_tokens=TOKENS, seed=1)
    cluster.submit(Request("short", PROMPT, sampling, cluster.now, cluster.now + 0.2))
    assert not cluster.refused
    assert cluster.dispatcher.running == 1


def test_tenants_get_their_weighted_share_of_a_full_cluster() -> None:
    cluster = VirtualCluster(0, 2, SLOTS)
    small, large = Tenant("small"), Tenant("large", weight=3.0)
    offer(cluster, 15.0, {small: 2 * CAPACITY, large: 2 * CAPACITY})
    since = cluster.now
    offer(cluster, 40.0, {small: 2 * CAPACITY, large: 2 * CAPACITY})
    tokens = {"small": 0, "large": 0}
    for one in cluster.records.values():
        tokens[one.request.tenant.name] += sum(at > since for at in one.token_at)
    assert 2.5 < tokens["large"] / tokens["small"] < 3.5


def test_a_flood_of_one_tenant_does_not_reach_another() -> None:
    cluster = VirtualCluster(0, 2, SLOTS, max_queue=32)
    flood, quiet = Tenant("flood"), Tenant("quiet")
    offer(cluster, 40.0, {flood: 8 * CAPACITY, quiet: 0.3 * CAPACITY})
    cluster.settle()
    asked = [one for one in cluster.records.values() if one.request.tenant == quiet]
    assert len(asked) > 100
    assert all(one.whole for one in asked)


def test_a_rate_is_not_that_of_other_workers() -> None:
    cluster = VirtualCluster(0, 2, SLOTS)
    offer(cluster, 10.0, {Tenant(): 2 * CAPACITY})
    assert cluster.dispatcher._throughput.per_second == pytest.approx(CAPACITY, rel=0.3)
    cluster.start("d2", "decode")
    assert cluster.dispatcher._throughput.per_second is None
    offer(cluster, 10.0, {Tenant(): 3 * CAPACITY})
    cluster.kill("d2")
    assert cluster.dispatcher._throughput.per_second is None
