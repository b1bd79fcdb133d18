"""What can happen to a simulated cluster. Each fault says whether it happened; what waits for its
moment is a tamper.

To add one: write a function here, name it in FAULTS with a weight, and name what it counts in
test_simulation.py.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

from simulation import tampers
from simulation.chaos import Chaos
from simulation.cluster import AFTER_S, URL
from simulation.fake_redis import NAME as REDIS
from simulation.history import UPGRADES
from simulation.network import CLIENT_KEEPALIVE_S

from kvrelay.errors import KvRelayError
from kvrelay.state.registry import Registry
from kvrelay.types.workers import POOLS, PoolName

# From which on a silence may lose a worker: two may follow each other
SILENCE_S = CLIENT_KEEPALIVE_S / 2


# Processes


async def kill_prefill(chaos: Chaos) -> None:
    chaos.kill(chaos.pick("prefill"), "kill a prefill worker")


async def kill_decode(chaos: Chaos) -> None:
    chaos.kill(chaos.pick("decode"), "kill a decode worker")


async def freeze_worker(chaos: Chaos) -> None:
    member = chaos.pick()
    if member is None or member.process.frozen_since is not None:
        return
    seconds = chaos.seconds(0.2, 7.0)
    lost = seconds >= SILENCE_S
    long = " until it is given up" if seconds >= CLIENT_KEEPALIVE_S else ""
    chaos.cluster.note(f"freeze a worker{long}", seconds, loses_worker=lost)
    chaos.cluster.network.say(f"FAULT {member.worker_id} is frozen")
    chaos.cluster.network.freeze(member.process)
    await asyncio.sleep(seconds)
    chaos.cluster.network.say(f"FAULT {member.worker_id} is thawed")
    member.process.thaw()


async def freeze_router(chaos: Chaos) -> None:
    router = chaos.cluster.router
    if router is None or not router.process.alive or router.process.frozen_since is not None:
        return
    seconds = chaos.seconds(0.2, 4.0)
    chaos.cluster.note("freeze the router", seconds, stops_router=True)
    chaos.cluster.network.freeze(router.process)
    await asyncio.sleep(seconds)
    router.process.thaw()


async def kill_router(chaos: Chaos) -> None:
    router = chaos.cluster.router
    if router is None or not router.process.alive:
        return
    seconds = chaos.seconds(0.1, 1.0)
    chaos.cluster.note("kill the router", math.inf, stops_router=True)
    number = len(chaos.cluster.faults) - 1
    chaos.cluster.kill(router.process)
    chaos.router_died()
    await asyncio.sleep(seconds)
    chaos.cluster.start_router()
    while chaos.cluster.router is router:  # which waits for Redis
        await asyncio.sleep(0.05)
    over = chaos.cluster.loop.time() + AFTER_S
    chaos.cluster.faults[number] = replace(chaos.cluster.faults[number], end=over)


async def freeze_controller(chaos: Chaos) -> None:
    """For longer than its lease of the lead."""
    name = chaos.rng.choice(sorted(chaos.cluster.controllers))
    process, seconds = chaos.cluster.controllers[name].process, chaos.rng.uniform(4.0, 12.0)
    if process.alive and process.frozen_since is None:
        chaos.cluster.note("freeze a controller", seconds)
        chaos.cluster.network.freeze(process)
        await asyncio.sleep(seconds)
        process.thaw()


async def kill_controller(chaos: Chaos) -> None:
    """With the workers that it has started. It is started again."""
    name, cluster = chaos.rng.choice(sorted(chaos.cluster.controllers)), chaos.cluster
    if cluster.controllers[name].process.alive:
        seconds = chaos.seconds(0.5, 4.0)
        cluster.note("kill a controller", loses_worker=True)
        cluster.kill_controller(name)
        await asyncio.sleep(seconds)
        cluster.start_controller(name)


async def terminate_worker(chaos: Chaos) -> None:
    """SIGTERM, from who runs its machine; a second one if it takes too long for him."""
    member = chaos.pick()
    if member is not None and not member.stop.drain.is_set():
        seconds = chaos.seconds(0.3, 4.0)
        chaos.cluster.note("terminate a worker", seconds, loses_worker=True)
        member.process.soon(0, member.stop)
        await asyncio.sleep(seconds)
        if member.process.alive:
            chaos.cluster.note("terminate a worker at once", loses_worker=True)
            member.process.soon(0, member.stop)


async def slow_worker(chaos: Chaos) -> None:
    member = chaos.pick()
    if member is not None:
        seconds = chaos.seconds(0.5, 4.0)
        chaos.cluster.note("slow a worker down", seconds)
        member.process.slowness = chaos.rng.choice((5.0, 20.0))
        await asyncio.sleep(seconds)
        member.process.slowness = 1.0


# Links


async def cut_from_router(chaos: Chaos) -> None:
    member = chaos.pick()
    if member is not None:
        await _cut(chaos, "router", member.worker_id, "a worker from the router")


async def cut_between_workers(chaos: Chaos) -> None:
    prefill, decode = chaos.pick("prefill"), chaos.pick("decode")
    if prefill is not None and decode is not None:
        await _cut(chaos, prefill.worker_id, decode.worker_id, "prefill from decode")


async def cut_from_redis(chaos: Chaos) -> None:
    names = [one.worker_id for one in chaos.cluster.living()] + [
        "router",
        *chaos.cluster.controllers,
    ]
    await _cut(chaos, chaos.rng.choice(names), REDIS, "from Redis")


async def _cut(chaos: Chaos, one: str, other: str, kind: str) -> None:
    ways = chaos.rng.choice(([(one, other)], [(other, one)], [(one, other), (other, one)]))
    seconds = chaos.seconds(0.2, 6.0)
    lost = seconds >= SILENCE_S and "router" in (one, other)
    chaos.cluster.note(
        f"cut {kind}, {'one way' if len(ways) == 1 else 'both ways'}", seconds, loses_worker=lost
    )
    chaos.cluster.network.say(f"FAULT cut {ways}")
    for way in ways:
        chaos.cluster.network.cut(*way)
    await asyncio.sleep(seconds)
    chaos.cluster.network.say(f"FAULT heals {ways}")
    for way in ways:
        chaos.cluster.network.heal(*way)


async def slow_link(chaos: Chaos) -> None:
    prefill, decode = chaos.pick("prefill"), chaos.pick("decode")
    if prefill is None or decode is None:
        return
    one = chaos.rng.choice(("router", prefill.worker_id))
    pair = frozenset((one, decode.worker_id))
    seconds = chaos.seconds(0.3, 3.0)
    chaos.cluster.note("slow a link", seconds)
    chaos.cluster.network.slow[pair] = chaos.rng.choice((0.02, 0.2))
    await asyncio.sleep(seconds)
    chaos.cluster.network.slow.pop(pair, None)


async def reset_connection(chaos: Chaos) -> None:
    router = chaos.cluster.router
    mine = [
        one
        for one in chaos.cluster.network.connections
        if router and one.client is router.process and one.usable
    ]
    if mine:
        chaos.cluster.note("reset a session", loses_worker=True)
        chaos.rng.choice(mine).break_side(router.process, "Connection reset by peer")


# The registry and the operator


async def redis_down(chaos: Chaos) -> None:
    await _redis(chaos, "down", "Redis is gone")


async def redis_stalled(chaos: Chaos) -> None:
    await _redis(chaos, "stalled", "Redis stalls")


async def redis_read_only(chaos: Chaos) -> None:
    await _redis(chaos, "read-only", "Redis is read-only")


async def redis_stale(chaos: Chaos) -> None:
    redis = chaos.cluster.redis
    redis.past = copy.deepcopy(redis.store), chaos.cluster.loop.time()
    await _redis(chaos, "stale", "Redis is stale")


async def _redis(chaos: Chaos, state: str, kind: str) -> None:
    seconds = chaos.seconds(0.5, 6.0)
    chaos.cluster.note(kind, seconds)
    chaos.cluster.redis.state = state
    await asyncio.sleep(seconds)
    chaos.cluster.redis.state = "ok"


async def redis_flushed(chaos: Chaos) -> None:
    chaos.cluster.note("Redis is flushed")
    chaos.cluster.redis.store.flush()


async def redis_rolled_back(chaos: Chaos) -> None:
    """A failover to a replica that had not got the last writes."""
    redis, seconds = chaos.cluster.redis, chaos.seconds(0.0, 5.0)
    replica = redis.store.fork()
    replica.acts = redis.store.acts
    await asyncio.sleep(seconds)
    chaos.cluster.note("Redis loses its last writes")
    redis.store = replica


async def drain(chaos: Chaos) -> None:
    member = chaos.pick()
    if member is not None and len(chaos.cluster.living(member.pool)) > 1:
        await _operate(
            chaos, "drain a worker", lambda registry: registry.request_drain(member.worker_id)
        )


async def restart(chaos: Chaos) -> None:
    names = [one.worker_id for one in chaos.cluster.living() if one.worker is not None]
    await _operate(chaos, "restart the workers", lambda registry: registry.request_restart(names))


async def upgrade(chaos: Chaos) -> None:
    """Other weights lie where workers load them from, and an operator restarts all workers; perhaps
    back and forth.
    """
    for _ in range(chaos.rng.choice((1, 2, 3))):
        kind = UPGRADES[chaos.cluster.version]
        chaos.cluster.version = 1 - chaos.cluster.version
        chaos.cluster.note(kind)
        await restart(chaos)
        await asyncio.sleep(chaos.rng.uniform(0.3, 4.0))


async def scale(chaos: Chaos) -> None:
    sizes: dict[PoolName, int] = {
        "prefill": chaos.rng.randint(0, 3),
        "decode": chaos.rng.randint(1, 3),
    }
    await _operate(chaos, "scale the pools", lambda registry: registry.set_desired(sizes))


async def swap(chaos: Chaos) -> None:
    """One worker less here and one more there: with `rebalance` it changes over."""
    sizes = {pool: len(chaos.cluster.living(pool)) for pool in POOLS}
    giver, taker = chaos.rng.choice((("prefill", "decode"), ("decode", "prefill")))
    if sizes[giver] > (giver == "decode"):
        wanted = {giver: sizes[giver] - 1, taker: min(3, sizes[taker] + 1)}
        await _operate(chaos, "swap a worker", lambda registry: registry.set_desired(wanted))


async def _operate(chaos: Chaos, kind: str, call: Callable[[Registry], Awaitable[None]]) -> None:
    async def command() -> None:
        try:
            await call(await Registry.connect(URL))
            chaos.cluster.note(kind, 4.0, loses_worker=True)
        except KvRelayError:
            pass  # it did not happen

    await chaos.cluster.process("operator").spawn(command())


FAULTS: dict[str, tuple[Callable[[Chaos], Awaitable[None]], int]] = {
    "kill_prefill": (kill_prefill, 3),
    "kill_decode": (kill_decode, 3),
    "kill_at_token": (tampers.kill_at_token, 3),
    "kill_sender_in_push": (tampers.kill_sender_in_push, 3),
    "kill_receiver_in_push": (tampers.kill_receiver_in_push, 3),
    "kill_receiver_at_commit": (tampers.kill_receiver_at_commit, 3),
    "kill_router": (kill_router, 2),
    "freeze_worker": (freeze_worker, 4),
    "freeze_router": (freeze_router, 2),
    "slow_worker": (slow_worker, 2),
    "cut_from_router": (cut_from_router, 4),
    "cut_between_workers": (cut_between_workers, 4),
    "cut_from_redis": (cut_from_redis, 2),
    "slow_link": (slow_link, 2),
    "reset_connection": (reset_connection, 3),
    "flip_bit": (tampers.flip_bit, 4),
    "truncate_frame": (tampers.truncate_frame, 2),
    "double_frame": (tampers.double_frame, 2),
    "lose_frame": (tampers.lose_frame, 2),
    "swap_frames": (tampers.swap_frames, 2),
    "lose_receipt": (tampers.lose_receipt, 4),
    "repeat_command": (tampers.repeat_command, 3),
    "repeat_event": (tampers.repeat_event, 3),
    "lose_update": (tampers.lose_update, 3),
    "repeat_update": (tampers.repeat_update, 2),
    "swap_updates": (tampers.swap_updates, 2),
    "garble_update": (tampers.garble_update, 2),
    "redis_down": (redis_down, 2),
    "redis_stalled": (redis_stalled, 2),
    "redis_read_only": (redis_read_only, 1),
    "redis_stale": (redis_stale, 2),
    "redis_flushed": (redis_flushed, 2),
    "redis_rolled_back": (redis_rolled_back, 3),
    "drain": (drain, 2),
    "scale": (scale, 2),
    "swap": (swap, 3),
    "restart": (restart, 1),
    "upgrade": (upgrade, 4),
    "terminate_worker": (terminate_worker, 2),
    "freeze_controller": (freeze_controller, 2),
    "kill_controller": (kill_controller, 1),
    "freeze_in_push": (tampers.freeze_in_push, 5),
}
