"""Actuators of two controllers on one registry: one acts, and counts the workers of the other
one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from support.actuator_fleet import Fleet

import autoscaler.lease
from autoscaler.actuator import Actuator
from autoscaler.lease import Lease
from autoscaler.worker_watch import GONE_S
from kvrelay.clock import ManualClock
from kvrelay.errors import FailedPrecondition
from kvrelay.state.registry import Registry
from kvrelay.types.workers import PoolName

SIZES: dict[PoolName, int] = {"decode": 2}
INTERVAL_S = 0.5  # the actuator's own


@dataclass
class Controller:
    lease: Lease
    fleet: Fleet
    actuator: Actuator

    @classmethod
    def of(cls, registry: Registry, owner: str) -> Controller:
        clock = ManualClock()
        lease = Lease(registry, owner, clock)
        fleet = Fleet(registry, lease=lease)
        return cls(lease, fleet, Actuator(registry, fleet, SIZES, lease=lease, clock=clock))

    async def tick(self, times: int = 1) -> list[str]:
        for _ in range(times):
            await self.lease.renew()
            await self.actuator.tick()
            await self.fleet.beat()
        return sorted(self.fleet.pools)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler.lease, "TAKEOVER_S", 0.0)


@pytest.fixture
async def pair(registry: Registry) -> AsyncIterator[tuple[Controller, Controller]]:
    made = Controller.of(registry, "a-1-aa"), Controller.of(registry, "b-2-bb")
    yield made
    for one in made:
        for worker_id in list(one.fleet.pools):
            await one.fleet.die(worker_id)


async def test_who_does_not_lead_starts_nothing(pair: tuple[Controller, Controller]) -> None:
    first, second = pair
    assert await first.tick(2) == ["decode-aa-0", "decode-aa-1"]
    assert await second.tick(3) == []


async def test_a_new_leader_adopts_what_runs_and_replaces_what_is_gone(
    registry: Registry, pair: tuple[Controller, Controller]
) -> None:
    first, second = pair
    await first.tick(2)
    await first.lease.release()
    assert await second.tick(5) == [], "no second fleet"
    assert await first.tick() == ["decode-aa-0", "decode-aa-1"], "its workers go on"
    await first.fleet.die("decode-aa-0")
    await registry._call("DEL", "kvrelay:worker:decode-aa-0")
    assert await second.tick(round(GONE_S / INTERVAL_S) - 1) == [], (
        "Redis may have lost its entry only"
    )
    assert await second.tick(2) == ["decode-bb-0"]


async def test_a_new_leader_has_the_workers_of_others_drained_and_their_owner_ends_them(
    registry: Registry, pair: tuple[Controller, Controller]
) -> None:
    first, second = pair
    await first.tick(2)
    await first.lease.release()
    await second.tick()
    await registry.set_desired({"decode": 1})
    await second.tick(2)
    drained = [
        name for name, worker in first.fleet.workers.items() if worker.info.state == "draining"
    ]
    assert len(drained) == 1
    await first.tick(2)
    assert (len(first.fleet.pools), first.fleet.stopped) == (1, drained)
    await first.fleet.beat()
    assert await second.tick(3) == []


async def test_starts_that_a_new_leader_does_not_know_of_are_cancelled(
    pair: tuple[Controller, Controller],
) -> None:
    first, second = pair
    await first.lease.renew()
    await first.actuator.tick()
    assert sorted(first.fleet.pools) == ["decode-aa-0", "decode-aa-1"], "they load"
    await first.lease.release()
    await second.lease.renew()
    with pytest.raises(FailedPrecondition, match="another controller leads now"):
        await first.fleet.beat()
    await second.lease.renew()
    assert await second.tick() == ["decode-bb-0", "decode-bb-1"]
    await first.lease.renew()
    await first.actuator.tick()
    assert first.fleet.pools == {}


async def test_a_leader_that_is_back_ends_what_another_started(
    registry: Registry, pair: tuple[Controller, Controller]
) -> None:
    """Both started a fleet, whatever came between."""
    first, second = pair
    await first.tick(2)
    for number in (0, 1):
        await registry._call("DEL", f"kvrelay:worker:decode-aa-{number}")
    await first.lease.release()
    assert await second.tick(2) == ["decode-bb-0", "decode-bb-1"]
    for _ in range(4):
        await first.tick()
        await second.tick()
    serving = [one.worker_id for one in await registry.workers() if one.state == "ready"]
    assert serving == ["decode-bb-0", "decode-bb-1"], "its own stay"
    assert first.fleet.pools == {}
