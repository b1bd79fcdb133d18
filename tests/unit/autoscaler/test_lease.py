"""The controllers' lease, with a real Redis and clocks that move when told to."""

from __future__ import annotations

import asyncio

import pytest

from autoscaler.lease import DEADLINE_S, EXPIRY_S, RENEW_S, TAKEOVER_S, Lease
from kvrelay.clock import ManualClock
from kvrelay.errors import Unavailable
from kvrelay.state.redis_connection import TIMEOUT_S
from kvrelay.state.registry import Registry
from kvrelay.types.control_plane import ControllerInfo


class Host:
    """A controller's lease, and its host's clock."""

    def __init__(self, registry: Registry, owner: str, *, sole: bool = False) -> None:
        self.clock = ManualClock(1000.0 * len(owner))
        self.lease = Lease(registry, owner, self.clock, sole=sole)


@pytest.fixture
def first(registry: Registry) -> Host:
    return Host(registry, "a-1")


@pytest.fixture
def second(registry: Registry) -> Host:
    return Host(registry, "bb-22")


async def go_on(seconds: float, *hosts: Host, but: Host | None = None) -> None:
    """Time passes everywhere; all but one renew."""
    for _ in range(round(seconds / RENEW_S)):
        for host in hosts:
            host.clock.advance(RENEW_S)
            if host is not but:
                await host.lease.renew()
        assert sum(host.lease.leads for host in hosts) <= 1


def test_a_leader_has_stopped_before_another_begins() -> None:
    """Also one whose last renewal took its time to get to Redis."""
    assert TAKEOVER_S > DEADLINE_S + TIMEOUT_S


async def test_who_takes_the_lease_waits_before_it_acts(first: Host) -> None:
    await first.lease.renew()
    await go_on(TAKEOVER_S - RENEW_S, first)
    assert (first.lease.state, first.lease.leads) == ("claiming", False)
    with pytest.raises(Unavailable, match="is not the leader"):
        first.lease.claim()
    await go_on(RENEW_S, first)
    assert first.lease.state == "leading"
    assert first.lease.claim().owner == "a-1"


async def test_a_sole_controller_waits_for_nobody(registry: Registry) -> None:
    before = Host(registry, "a-1")
    await before.lease.renew()
    sole = Host(registry, "b-2", sole=True)
    await sole.lease.renew()
    assert sole.lease.leads
    assert sole.lease.claim().term == 2


async def test_a_leader_that_cannot_renew_stops_in_time_and_another_takes_over(
    first: Host, second: Host
) -> None:
    await go_on(TAKEOVER_S + RENEW_S, first, second)
    assert first.lease.leads
    assert second.lease.state == "standby"
    await go_on(DEADLINE_S, first, second, but=first)
    assert not first.lease.leads
    await go_on(EXPIRY_S + TAKEOVER_S + 2 * RENEW_S, first, second, but=first)
    assert second.lease.leads
    await go_on(RENEW_S, first, second)
    assert first.lease.succeeded
    assert second.lease.claim().term > 1


async def test_a_lease_that_is_renewed_is_not_taken_however_wrong_clocks_are(
    first: Host, second: Host
) -> None:
    await go_on(TAKEOVER_S + RENEW_S, first, second)
    for _ in range(20):
        second.clock.advance(300.0)  # it slept, or its clock was set
        await go_on(2 * RENEW_S, first, second)
    assert first.lease.leads
    assert second.lease.state == "standby"


async def test_a_leader_keeps_the_lead_when_redis_forgets_it(
    registry: Registry, first: Host, second: Host
) -> None:
    await go_on(TAKEOVER_S + RENEW_S, first, second)
    for _ in range(5):
        await registry._call("FLUSHALL")
        await go_on(2 * RENEW_S, first, second)
        assert first.lease.leads


async def test_a_newcomer_begins_to_wait_again_when_its_lease_was_lost(
    registry: Registry, first: Host
) -> None:
    await first.lease.renew()
    await go_on(TAKEOVER_S - RENEW_S, first)
    await registry._call("FLUSHALL")
    await go_on(TAKEOVER_S - RENEW_S, first)
    assert not first.lease.leads
    await go_on(2 * RENEW_S, first)
    assert first.lease.leads


async def test_two_that_claim_after_a_loss_do_not_both_lead(
    registry: Registry, first: Host, second: Host
) -> None:
    """Each was told that the lease is its own; Redis has forgotten that of the first one."""
    await first.lease.renew()
    await registry._call("FLUSHALL")
    await second.lease.renew()
    await go_on(2 * TAKEOVER_S, first, second)
    assert (first.lease.leads, second.lease.leads) == (False, True)


async def test_a_leader_that_stopped_leads_again_in_a_later_term(
    registry: Registry, first: Host
) -> None:
    """What it began before must not pass for what it does now."""
    await go_on(TAKEOVER_S + RENEW_S, first)
    old = first.lease.claim()
    first.clock.advance(DEADLINE_S)
    await first.lease.renew()
    assert first.lease.state == "claiming"
    assert not await registry.restore_desired({"decode": 3}, old)
    await go_on(TAKEOVER_S + RENEW_S, first)
    assert first.lease.claim().term > old.term
    assert not await registry.restore_desired({"decode": 3}, old)
    assert await registry.restore_desired({"decode": 3}, first.lease.claim())


async def test_no_claim_outlives_its_lead_though_redis_forgets_the_successor(
    registry: Registry, first: Host, second: Host
) -> None:
    """A failover loses all that the second leader wrote; Redis has the first one's lease again."""
    await go_on(TAKEOVER_S + RENEW_S, first, second)
    before = first.lease.claim()
    record = await registry._call("HGETALL", "kvrelay:leader")
    await go_on(EXPIRY_S + TAKEOVER_S + 2 * RENEW_S, first, second, but=first)
    lost = second.lease.claim()
    await registry._call("FLUSHALL")
    await registry._call(
        "HSET", "kvrelay:leader", *(word.decode() for pair in record.items() for word in pair)
    )

    await go_on(TAKEOVER_S + 2 * RENEW_S, second, first)
    assert (first.lease.leads, second.lease.state) == (True, "standby")
    for claim in (before, lost):
        assert not await registry.restore_desired({"decode": 3}, claim)


async def test_a_deposed_leader_leads_again_in_a_later_term(
    registry: Registry, first: Host, second: Host
) -> None:
    """Redis was flushed and a newcomer took the same term; a failover brings back what was there
    before the flush.
    """
    await go_on(TAKEOVER_S + RENEW_S, first)
    before = first.lease.claim()
    record = await registry._call("HGETALL", "kvrelay:leader")
    await registry._call("FLUSHALL")
    await second.lease.renew()
    await first.lease.renew()
    assert (second.lease.state, first.lease.state) == ("claiming", "standby")
    await registry._call(
        "HSET", "kvrelay:leader", *(word.decode() for pair in record.items() for word in pair)
    )

    await go_on(TAKEOVER_S + 2 * RENEW_S, first, second)
    assert first.lease.claim().term > before.term
    assert not await registry.restore_desired({"decode": 3}, before)


async def test_what_is_under_way_ends_with_the_lease(registry: Registry) -> None:
    clock = ManualClock()
    lease = Lease(registry, "a-1", clock, sole=True)
    await lease.renew()
    clock.advance(DEADLINE_S - 0.01)
    with pytest.raises(Unavailable, match="expired"):
        async with lease.in_time():
            await asyncio.Event().wait()
    clock.advance(0.02)
    with pytest.raises(Unavailable, match="is not the leader"):
        async with lease.in_time():
            pytest.fail("it must not begin")


async def test_it_is_given_back_at_the_end(registry: Registry) -> None:
    lease = Lease(registry, "a-1", sole=True)
    running = asyncio.create_task(lease.run())
    async with asyncio.timeout(60):
        while await registry.controllers() != (ControllerInfo("a-1", "leading", 1),):
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not lease.leads
    assert await registry.controllers() == ()
    assert (await registry.renew_lease("b-2", 0)).owner == "b-2"
