"""Faults of the control plane's simulation. Each begins, lasts, and is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from simulation.fake_redis import NAME as REDIS
from simulation.fake_redis import Store

if TYPE_CHECKING:
    from simulation.control import ControlSimulation

POLL_S = 0.1


def _seconds(sim: ControlSimulation, most: float) -> float:
    """Short ones are likelier."""
    return most * sim.rng.random() ** 1.2


async def roll_back(sim: ControlSimulation) -> None:
    """A failover to a replica that had not got the last writes. The old primary may live on with
    some clients, if the controllers ask for confirmation. The new one's host may have another wall
    clock: what was to expire does at once.
    """
    store = sim.redis.store
    replica = store.fork()
    store.replicas = 0
    await asyncio.sleep(_seconds(sim, 6.0))
    _fail_over(sim, store, replica)
    await _rejoin(sim, store)


async def forget_successor(sim: ControlSimulation) -> None:
    """The failover loses all that a leader's successor wrote, so Redis has the lease of the one
    before, who is away until then; the successor may die with the primary. By chance that happens
    in one of thousands of histories.
    """
    if not sim.leaders():
        return
    leader = sim.leaders()[0]
    store = sim.redis.store
    replica = store.fork()
    frozen = sim.rng.random() < 0.5
    ways = (leader.name, REDIS), (REDIS, leader.name)
    if frozen:
        leader.process.freeze()
    else:
        for way in ways:
            sim.network.cut(*way)
        sim.cut_off(leader.name)
    store.replicas = 0
    async with _at_most(10.0):
        while all(one is leader for one in sim.leaders()):
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(sim.rng.random())
    _fail_over(sim, store, replica)
    dies = [one for one in sim.leaders() if one is not leader and sim.rng.random() < 0.5]
    for successor in dies:
        sim.kill_controller(successor)
    await asyncio.sleep(_seconds(sim, 1.0))
    if frozen:
        if leader.process.alive:
            leader.process.thaw()
    else:
        for way in ways:
            sim.network.heal(*way)
        sim.back(leader.name)
    await _rejoin(sim, store)
    for _ in dies:
        sim.start_controller()


@asynccontextmanager
async def _at_most(seconds: float) -> AsyncIterator[None]:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            yield


def _fail_over(sim: ControlSimulation, store: Store, replica: Store) -> None:
    if sim.redis.store is not store:
        return  # another failover came before
    if sim.confirms and sim.rng.random() < 0.7:
        names = [one.name for one in sim.living()] + list(sim.names)
        for name in sim.rng.sample(names, sim.rng.randint(0, len(names))):
            sim.redis.left_behind[name] = store
            sim.cut_off(name)
    replica.acts, store.acts = store.acts, []  # what an old primary still accepts has no effect
    replica.replicas = 1
    if sim.rng.random() < 0.3:
        replica.expiry = dict.fromkeys(replica.expiry, 0.0)
    sim.redis.store = replica
    sim.network.say("FAILOVER")


async def _rejoin(sim: ControlSimulation, store: Store) -> None:
    """Those that still talk to the old primary find the new one."""
    await asyncio.sleep(_seconds(sim, 8.0))
    for name in [name for name, old in sim.redis.left_behind.items() if old is store]:
        del sim.redis.left_behind[name]
        sim.back(name)


async def flush(sim: ControlSimulation) -> None:
    sim.redis.store.flush()


async def _state(sim: ControlSimulation, state: str) -> None:
    sim.redis.state = state
    await asyncio.sleep(_seconds(sim, 6.0))
    sim.redis.state = "ok"


async def down(sim: ControlSimulation) -> None:
    await _state(sim, "down")


async def stalled(sim: ControlSimulation) -> None:
    await _state(sim, "stalled")


async def read_only(sim: ControlSimulation) -> None:
    await _state(sim, "read-only")


async def flaky(sim: ControlSimulation) -> None:
    await _state(sim, "flaky")


async def stale(sim: ControlSimulation) -> None:
    sim.redis.past = sim.redis.store.fork(), sim.loop.time()
    await asyncio.sleep(_seconds(sim, 3.0))
    await _state(sim, "stale")


async def cut_controller(sim: ControlSimulation) -> None:
    """One way, commands are carried out and their answers are lost."""
    if sim.living():
        await _cut(sim, sim.rng.choice(sim.living()).name)


async def cut_worker(sim: ControlSimulation) -> None:
    if sim.names:
        await _cut(sim, sim.rng.choice(sim.names))


async def _cut(sim: ControlSimulation, name: str) -> None:
    there, back = (name, REDIS), (REDIS, name)
    ways = sim.rng.choice(([there], [back], [there, back]))
    for way in ways:
        sim.network.cut(*way)
    sim.cut_off(name)
    await asyncio.sleep(_seconds(sim, 9.0))
    for way in ways:
        sim.network.heal(*way)
    sim.back(name)


async def freeze_controller(sim: ControlSimulation) -> None:
    if not sim.living():
        return
    process = sim.rng.choice(sim.living()).process
    process.freeze()
    await asyncio.sleep(_seconds(sim, 12.0))
    if process.alive:
        process.thaw()


async def kill_controller(sim: ControlSimulation) -> None:
    if not sim.living():
        return
    sim.kill_controller(sim.rng.choice(sim.living()))
    await asyncio.sleep(_seconds(sim, 4.0))
    sim.start_controller()


async def add_controller(sim: ControlSimulation) -> None:
    sim.start_controller()


async def kill_worker(sim: ControlSimulation) -> None:
    workers = [
        worker for one in sim.living() for worker in one.workers.values() if worker.process.alive
    ]
    if workers:
        sim.kill_worker(sim.rng.choice(workers))


async def operate(sim: ControlSimulation) -> None:
    sim.sizes_wanted()
    await asyncio.sleep(_seconds(sim, 3.0))
    sim.load = sim.rng.choice((0, 1, 5, 9))


FAULTS: dict[str, Callable[[ControlSimulation], Any]] = {
    "Redis loses its last writes": roll_back,
    "Redis loses its last writes again": roll_back,
    "Redis loses a leader's successor": forget_successor,
    "Redis is flushed": flush,
    "Redis is gone": down,
    "Redis stalls": stalled,
    "Redis is read-only": read_only,
    "Redis gets commands twice": flaky,
    "Redis is stale": stale,
    "a controller is cut off": cut_controller,
    "another controller is cut off": cut_controller,
    "a worker is cut off": cut_worker,
    "a controller is frozen": freeze_controller,
    "a controller is killed": kill_controller,
    "a controller joins": add_controller,
    "a worker is killed": kill_worker,
    "an operator scales": operate,
}
FORGETTING = [kind for kind in FAULTS if "Redis loses" in kind or "flushed" in kind]
OF_WORKERS = {"a worker is cut off", "a worker is killed", "an operator scales"}
