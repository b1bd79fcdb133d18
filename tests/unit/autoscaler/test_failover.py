"""Two controllers over real Redis servers that fail over and lose the last writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
from support.actuator_fleet import Fleet
from support.redis_servers import RedisServer, data_server, sentinel
from support.tcp_proxy import TcpProxy, proxy_to

import autoscaler.lease
from autoscaler.actuator import Actuator
from autoscaler.lease import Lease
from autoscaler.polling import poll_regularly
from kvrelay.errors import FailedPrecondition, Unavailable
from kvrelay.process.telemetry import get_logger
from kvrelay.state.embedded_redis import find_redis_server
from kvrelay.state.registry import Registry
from kvrelay.types.workers import PoolName

SIZES: dict[PoolName, int] = {"prefill": 1, "decode": 2}
WANTED = sum(SIZES.values())

pytestmark = [
    pytest.mark.timeout(300),
    # redis-py does not wait for connections that were reset to be closed.
    pytest.mark.filterwarnings("ignore:.*StreamWriter:pytest.PytestUnraisableExceptionWarning"),
]


def _redis_is_missing() -> str:
    try:
        find_redis_server()
    except Unavailable as error:
        return error.message
    return ""


if reason := _redis_is_missing():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the proportions of production."""
    for name, seconds in (
        ("RENEW_S", 0.1),
        ("DEADLINE_S", 2.0),
        ("EXPIRY_S", 2.0),
        ("TAKEOVER_S", 3.2),
    ):
        monkeypatch.setattr(autoscaler.lease, name, seconds)
    monkeypatch.setattr("kvrelay.state.redis_connection.TIMEOUT_S", 0.8)


@dataclass
class Controller:
    """As `kvrelay controller` runs it, with workers of this process."""

    lease: Lease
    fleet: Fleet
    actuator: Actuator

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.lease.run())
            tasks.create_task(self.actuator.run())
            tasks.create_task(poll_regularly(self._beat, 0.1, get_logger("test")))

    async def _beat(self) -> None:
        fleet = self.fleet
        for worker_id, pool in list(fleet.pools.items()):
            try:
                if worker_id not in fleet.workers:
                    await fleet._serve(worker_id, pool)
                if worker_id in fleet.workers:
                    await fleet.registry.publish_worker(fleet.workers[worker_id].info, ttl_s=2.0)
            except FailedPrecondition:  # another controller led before the worker came up
                await fleet.die(worker_id)


@asynccontextmanager
async def controller(owner: str, url: str, workers_url: str = "") -> AsyncIterator[Controller]:
    """Until it is left. `workers_url`: how its workers reach Redis, if it is another way."""
    async with (
        await Registry.connect(url) as registry,
        await Registry.connect(workers_url or url) as theirs,
    ):
        lease = Lease(registry, owner)
        fleet = Fleet(theirs, lease=lease)
        actuator = Actuator(registry, fleet, SIZES, lease=lease, interval_s=0.1)
        made = Controller(lease, fleet, actuator)
        running = asyncio.create_task(made.run())
        try:
            yield made
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for worker_id in list(fleet.pools):
                await fleet.die(worker_id)


class Judge:
    """Looks again and again, while something is waited for."""

    def __init__(self, *controllers: Controller) -> None:
        self.controllers = controllers
        self.most_workers = 0

    def look(self) -> None:
        assert sum(one.lease.leads for one in self.controllers) <= 1, "two controllers lead"
        workers = [name for one in self.controllers for name in one.fleet.pools]
        assert len(workers) == len(set(workers)), f"a name twice: {workers}"
        assert len(workers) <= WANTED, f"wanted {WANTED}, started {workers}"

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(120):
            while not condition():
                self.look()
                await asyncio.sleep(0.01)
        self.look()


def complete(made: Controller) -> bool:
    return made.lease.leads and len(made.fleet.workers) == WANTED


async def switch(proxy: TcpProxy, address: str) -> None:
    """From now on its clients get there."""
    proxy.target = asyncio.get_running_loop().create_future()
    proxy.target.set_result(address)
    proxy.reset()


@pytest.mark.long
async def test_a_failover_that_loses_the_lease_makes_no_second_fleet() -> None:
    async with (
        data_server() as primary,
        proxy_to(primary.address) as replication,
        data_server(replication.address) as replica,
        proxy_to(primary.address) as way_a,
        proxy_to(primary.address) as way_b,
        proxy_to(primary.address) as way_w,
    ):
        await primary.is_replicated()
        replication.part()  # what is written from now on will be lost
        workers = f"redis://{way_w.address}"
        async with controller("a-1-aa", f"redis://{way_a.address}", workers) as first:
            await Judge(first).until(lambda: complete(first))
            async with controller("b-2-bb", f"redis://{way_b.address}", workers) as second:
                judge = Judge(first, second)
                await judge.until(lambda: second.lease.succeeded)
                assert second.lease.state == "standby"
                # The old leader is cut off at the same time, and does not learn of the failover.
                way_a.part()
                await replica.call("REPLICAOF", "NO", "ONE")
                assert await replica.call("EXISTS", "kvrelay:leader") == 0, "the lease is lost"
                for way in (way_b, way_w):
                    await switch(way, replica.address)
                await judge.until(lambda: second.lease.leads)
                assert second.lease.claim().term > 1, (
                    "workers remember the term that Redis has lost"
                )
                workers = second.actuator._workers.by_id
                await judge.until(lambda: sum(one.foreign for one in workers.values()) == WANTED)
                assert second.fleet.pools == {}
                way_a.heal()
                await switch(way_a, replica.address)
                await judge.until(lambda: first.lease.succeeded)
                assert first.lease.state == "standby"
                assert len(first.fleet.workers) == WANTED, "its workers go on"
                # One of them dies, and the leader replaces it.
                await first.fleet.die("decode-aa-0")
                await judge.until(lambda: "decode-bb-0" in second.fleet.workers)


@pytest.mark.long
async def test_the_second_controller_stands_by_and_takes_over() -> None:
    async with data_server() as server:
        url = f"redis://{server.address}"
        async with controller("b-2-bb", url) as second:
            async with controller("a-1-aa", url) as first:
                judge = Judge(first, second)
                await judge.until(lambda: complete(first) or complete(second))
                leads, waits = (first, second) if first.lease.leads else (second, first)
                await judge.until(lambda: waits.lease.succeeded)
                assert waits.fleet.pools == {}
                states = {
                    one.controller_id: one.state
                    for one in await waits.lease._registry.controllers()
                }
                assert states == {leads.lease.owner: "leading", waits.lease.owner: "standby"}
            # The first one has ended, with its workers if it had any.
            await Judge(second).until(lambda: complete(second))


@pytest.mark.long
async def test_sentinel_fails_over_under_two_controllers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with data_server() as primary, data_server(primary.address) as replica:
        await primary.is_replicated()
        async with sentinel("kvrelay", primary) as watch:
            await _knows_replica(watch)
            url = f"redis+sentinel://{watch.address}/kvrelay"
            async with controller("a-1-aa", url) as first, controller("b-2-bb", url) as second:
                judge = Judge(first, second)
                await judge.until(lambda: complete(first) or complete(second))
                primary.process.kill()
                address = await _promoted(watch, primary)
                assert address == str(replica.port)
                # All over the new primary: the lease, the workers' heartbeats, and the actuators.
                await _eventually(lambda: _has_all(first.lease._registry))
                assert await replica.info("role") == "master"
                await judge.until(lambda: first.lease.leads or second.lease.leads)
                owner = first if first.fleet.pools else second
                gone = min(owner.fleet.pools)
                await owner.fleet.die(gone)
                await judge.until(
                    lambda: len(first.fleet.workers) + len(second.fleet.workers) == WANTED
                )


async def _knows_replica(watch: RedisServer) -> None:
    async def known() -> bool:
        return bool(await watch.call("SENTINEL", "SLAVES", "kvrelay"))

    await _eventually(known)


async def _promoted(watch: RedisServer, old: RedisServer) -> str:
    """The port of the new primary."""

    async def other() -> bool:
        return await port() != str(old.port)

    async def port() -> str:
        _, number = await watch.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "kvrelay")  # type: ignore[misc]
        return bytes(number).decode()  # type: ignore[has-type]

    await _eventually(other)
    return await port()


async def _has_all(registry: Registry) -> bool:
    with suppress(Unavailable):
        states = sorted(one.state for one in await registry.controllers())
        return len(await registry.workers()) == WANTED and states == ["leading", "standby"]
    return False


async def _eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(120):
        while not await condition():
            await asyncio.sleep(0.05)
