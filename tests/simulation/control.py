"""The control plane alone, in virtual time: controllers that crash, freeze and are cut off, over a
Redis that forgets.

Real are the lease, the actuator, the autoscaler and the registry. Workers are their heartbeats.
Times are a few tenths of production's, in the same proportions, so that much happens in a short
history.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio
from simulation.fake_redis import NAME as REDIS
from simulation.fake_redis import FakeRedis, Store
from simulation.history import Act, judge_acts, judge_incarnations, judge_leaders
from simulation.network import Network
from simulation.stand_ins import in_place
from simulation.virtual_loop import Process, VirtualLoop, current_process

import autoscaler.actuator
import autoscaler.lease
import kvrelay.state.registry
from autoscaler.actuator import Actuator
from autoscaler.lease import Lease
from autoscaler.loop import Autoscaler
from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.errors import FailedPrecondition, Unavailable
from kvrelay.state.registry import Registry
from kvrelay.types import POOLS, PoolName, RouterLoad, WorkerInfo, WorkerLoad

SHARE = 0.4  # of production's times
RENEW_S, DEADLINE_S, EXPIRY_S, TAKEOVER_S = 0.2, 2.0, 2.0, 3.2
TIMEOUT_S = 0.8
HEARTBEAT_S, TTL_S = 0.4, 1.5
TICK_S, LOOK_S = 0.3, 0.1
DRIFT = 0.06  # how much faster or slower a host's clock runs
SKEW_S = 300.0  # how wrong a host's wall clock is
FAULTS_S = 14.0
SURGE = 1  # a worker that is to replace another
# A worker that was cut off is no longer counted on for so long; then it may have been replaced
UNSEEN_S = 6.0
POLICY = AutoscalingPolicy.model_validate(
    {
        "interval_s": 0.5,
        "decode": {
            "min_replicas": 1,
            "max_replicas": 4,
            "upscale_delay_s": 0.3,
            "downscale_delay_s": 1.0,
            "metrics": [{"name": "queue_depth", "target": 2.0}],
        },
    }
)


class Acts(list[Act]):
    """Each is judged as it takes effect."""

    def __init__(self, judge: Callable[[Act], None]) -> None:
        self._judge = judge

    def append(self, act: Act) -> None:
        super().append(act)
        self._judge(act)


@dataclass(frozen=True, slots=True)
class ControlResult:
    seed: int
    complaints: tuple[str, ...]
    faults: Counter[str]
    acts: Counter[str]
    leaders: int  # incarnations that led


@dataclass(eq=False)
class ControlWorker:
    worker_id: str
    pool: PoolName
    process: Process
    controller: Controller
    registered: bool = False
    draining: bool = False
    unseen_until: float = 0.0  # it was cut off from Redis


@dataclass(eq=False)
class Controller:
    """One incarnation, and `autoscaler.actuator.Launcher` of its workers."""

    name: str
    process: Process
    simulation: ControlSimulation
    lease: Lease | None = None
    workers: dict[str, ControlWorker] = field(default_factory=dict)

    async def start(self, pool: PoolName, worker_id: str) -> None:
        assert self.lease is not None
        claim = self.lease.claim()
        self.simulation.act(claim.owner, claim.term, "start")
        self.simulation.names.append(worker_id)
        process = self.simulation.process(worker_id)
        worker = self.workers[worker_id] = ControlWorker(worker_id, pool, process, self)
        process.spawn(self.simulation.run_worker(worker, claim))

    async def stop(self, worker_id: str) -> None:
        self.simulation.kill_worker(self.workers[worker_id])

    drain = stop

    async def turn(self, worker_id: str, pool: PoolName) -> None:
        raise AssertionError("no pool has more use for it")

    def alive(self) -> Mapping[str, PoolName]:
        return {name: one.pool for name, one in self.workers.items() if one.process.alive}

    async def ended(self) -> None:
        await asyncio.Event().wait()  # the actuator looks at intervals

    def pending(self) -> Mapping[str, str]:
        return {}


class ControlSimulation:
    def __init__(
        self, seed: int, *, fleet: bool, history: Callable[[str], None] | None = None
    ) -> None:
        """fleet: with workers, actuators and autoscalers; otherwise each controller has a lease and
        tries to write.
        """
        self.seed = seed
        rng = self.rng = random.Random(seed)
        self.fleet = fleet
        self.loop = VirtualLoop(random.Random(rng.random()))
        self.network = Network(self.loop, random.Random(rng.random()))
        self.network.history = history
        self.redis = FakeRedis(self.network)
        self.redis.store.acts = Acts(self._judge_act)
        # The lease waits for a replica, and so a primary may be left behind
        self.confirms = rng.random() < 0.5
        self.controllers: list[Controller] = []
        self.names: list[str] = []
        self.incarnations: list[tuple[str, int]] = []
        self.complaints: list[str] = []
        self.faults: Counter[str] = Counter()
        self.numbers = iter(range(1000))
        self.sizes: dict[PoolName, int] = {
            "prefill": rng.randint(0, 2),
            "decode": rng.randint(1, 3),
        }
        self.addresses: dict[str, ControlWorker] = {}
        self.operated = 0  # the largest prefill pool that an operator asked for
        self.load = 0  # requests that wait at each worker

    def run(self) -> ControlResult:
        with self._in_place():
            asyncio.set_event_loop(self.loop)
            try:
                self.loop.run_until_complete(self._main())
            finally:
                self.network.history = None
                self.loop.end()
                asyncio.set_event_loop(None)
        acts = self.redis.store.acts
        self.complaints += judge_acts(
            acts, forgotten=any(kind in self.faults for kind in FORGETTING)
        )
        self.complaints += judge_incarnations(self.incarnations)
        self.complaints += [
            f"E: {name} is a name twice" for name, n in Counter(self.names).items() if n > 1
        ]
        self.complaints += [f"nobody took an error: {one}" for one in self.loop.failures]
        complaints = tuple(dict.fromkeys(self.complaints))
        return ControlResult(
            self.seed,
            complaints,
            self.faults,
            Counter(act.what for act in acts),
            len({act.owner for act in acts}),
        )

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        places: tuple[tuple[Any, str, Any], ...] = (
            (redis.asyncio.Redis, "from_url", self.redis.client),
            (kvrelay.state.registry, "_TIMEOUT_S", TIMEOUT_S),
            (kvrelay.state.registry, "_unix_us", self._unix_us),
            (autoscaler.lease, "RENEW_S", RENEW_S),
            (autoscaler.lease, "DEADLINE_S", DEADLINE_S),
            (autoscaler.lease, "EXPIRY_S", EXPIRY_S),
            (autoscaler.lease, "TAKEOVER_S", TAKEOVER_S),
            (autoscaler.actuator, "GONE_S", autoscaler.actuator.GONE_S * SHARE),
            (autoscaler.actuator, "drain_worker", self._drain_worker),
        )
        with in_place(places):
            yield

    def _unix_us(self) -> int:
        return round(1e6 * (1e9 + current_process().clock_offset + self.loop.time()))

    # Processes

    def process(self, name: str) -> Process:
        process = Process(self.loop, name, clock_offset=self.rng.uniform(0, SKEW_S))
        rate = 1 + self.rng.uniform(-DRIFT, DRIFT)
        process.now = lambda: process.clock_offset + rate * self.loop.time()  # type: ignore[method-assign]
        return process

    def start_controller(self) -> None:
        name = f"controller-{next(self.numbers)}"
        controller = Controller(name, self.process(name), self)
        self.controllers.append(controller)
        controller.process.spawn(self._run_controller(controller))

    async def _run_controller(self, controller: Controller) -> None:
        registry = await self._connected()
        process = controller.process
        tag = f"{self.rng.getrandbits(32):08x}"
        lease = controller.lease = Lease(registry, f"{controller.name}-{tag}", process)
        if self.fleet:
            process.spawn(lease.run())
            actuator = Actuator(
                registry,
                controller,
                self.sizes,
                lease=lease,
                clock=process,
                drain_timeout_s=2.0,
                interval_s=TICK_S,
            )
            process.spawn(actuator.run())
            process.spawn(Autoscaler(registry, POLICY, lease, process).run())
        else:
            process.spawn(self._renew(lease))
            process.spawn(self._write(registry, lease))

    async def _renew(self, lease: Lease) -> None:
        """As `Lease.run`, which also tells others."""
        while True:
            with suppress(Unavailable):
                await lease.renew()
            await asyncio.sleep(2 * RENEW_S)

    async def _write(self, registry: Registry, lease: Lease) -> None:
        """What `Autoscaler` does, again and again."""
        while True:
            with suppress(Unavailable):
                async with lease.in_time():
                    claim = lease.claim()
                    await asyncio.sleep(self.rng.random() * TICK_S)  # it thinks
                    await registry.restore_desired({"decode": 1}, claim)
            await asyncio.sleep(2 * TICK_S)

    async def _connected(self) -> Registry:
        while True:
            try:
                return await Registry.connect("redis://x", confirm_replicas=int(self.confirms))
            except Unavailable:
                await asyncio.sleep(0.2)

    def kill_controller(self, controller: Controller) -> None:
        """With its workers, as Ray does."""
        controller.process.kill()
        for worker in controller.workers.values():
            self.kill_worker(worker)

    def kill_worker(self, worker: ControlWorker) -> None:
        worker.process.kill()

    async def run_worker(self, worker: ControlWorker, claim: Any) -> None:
        """As `kvrelay.worker.host` does: the model is loaded, then it registers and sends
        heartbeats.
        """
        await asyncio.sleep(self.rng.choice((0.1, 0.5, 2.0)))
        try:
            registry = await Registry.connect("redis://x")
            epoch = await registry.next_epoch(0, claim)
        except (Unavailable, FailedPrecondition):
            self.kill_worker(worker)
            return
        self.incarnations.append((worker.worker_id, epoch))
        address = f"127.0.0.1:{20_000 + len(self.incarnations)}"
        self.addresses[address] = worker
        info = WorkerInfo(
            worker.worker_id,
            worker.pool,
            epoch,
            "ready",
            address,
            "m",
            "l",
            16,
            4,
            "h",
            96,
            pid=len(self.incarnations),
            started_by=claim.owner,
            term=claim.term,
        )
        while True:
            state = "draining" if worker.draining else "ready"
            load = WorkerLoad(waiting=self.load)
            with suppress(Unavailable):
                await registry.publish_worker(
                    dataclasses.replace(info, state=state, load=load), TTL_S
                )  # type: ignore[arg-type]
                worker.registered = True
            await asyncio.sleep(HEARTBEAT_S)

    async def _drain_worker(self, address: str, grace_s: float, credentials: object) -> None:
        """In place of the call."""
        name = current_process().name
        (controller,) = (one for one in self.controllers if one.name == name)
        assert controller.lease is not None
        claim = controller.lease.claim()
        await asyncio.sleep(self.network.latency(name, address))
        worker = self.addresses[address]
        if not worker.process.alive:
            raise Unavailable("nobody listens")
        self.act(claim.owner, claim.term, "drain")
        worker.draining = True

    async def _router(self) -> None:
        registry = await self._connected()
        while True:
            with suppress(Unavailable):
                await registry.publish_router(RouterLoad("router"), TTL_S)
            await asyncio.sleep(HEARTBEAT_S)

    # The history

    async def _main(self) -> None:
        rng = self.rng
        for _ in range(rng.choice((2, 2, 3))):
            self.start_controller()
        if self.fleet:
            self.process("router").spawn(self._router())
        watching = self.loop.create_task(self._watch())
        # Most often somebody leads when it begins.
        await asyncio.sleep(
            (TAKEOVER_S + 1.5 if self.fleet or rng.random() < 0.8 else 0.0) + rng.random()
        )
        kinds = [kind for kind in FAULTS if self.fleet or kind not in OF_WORKERS]
        faults = rng.choices(
            kinds, [2 if "controller" in kind or "loses" in kind else 1 for kind in kinds], k=4
        )
        wreaking = [
            self.loop.create_task(self._wreak(kind, rng.random() * FAULTS_S / 2)) for kind in faults
        ]
        await asyncio.wait(wreaking)
        for task in wreaking:
            task.result()
        self._heal()
        # The lease ends, is taken, and the wait is over; then workers start, and others are
        # drained.
        await asyncio.sleep(
            (DEADLINE_S + EXPIRY_S + TAKEOVER_S) * (1 + DRIFT) + (8.0 if self.fleet else 0.5)
        )
        watching.cancel()
        self._judge_the_end()

    async def _wreak(self, kind: str, after: float) -> None:
        await asyncio.sleep(after)
        self.faults[kind] += 1
        self.network.say(f"FAULT {kind}")
        await FAULTS[kind](self)
        self.network.say(f"OVER {kind}")

    def _heal(self) -> None:
        self.redis.state = "ok"
        self.redis.left_behind.clear()
        self.load = self.rng.choice((0, 9))
        self.redis.store.replicas = 1
        for source, target in list(self.network._cuts):
            self.network.heal(source, target)
        for controller in self.controllers:
            if controller.process.alive and controller.process.frozen_since is not None:
                controller.process.thaw()
        while len(self.living()) < 2:
            self.start_controller()

    def living(self) -> list[Controller]:
        return [one for one in self.controllers if one.process.alive]

    def sizes_wanted(self) -> None:
        """An operator says how large the prefill pool is to be."""

        size = self.rng.randint(0, 2)
        self.operated = max(self.operated, size)

        async def command() -> None:
            with suppress(Unavailable):
                await (await Registry.connect("redis://x")).set_desired({"prefill": size})

        self.process("operator").spawn(command())

    def cut_off(self, name: str) -> None:
        for worker in self._workers(name):
            worker.unseen_until = math.inf

    def back(self, name: str) -> None:
        for worker in self._workers(name):
            worker.unseen_until = self.loop.time() + UNSEEN_S

    def _workers(self, name: str) -> list[ControlWorker]:
        """Those that have that name, or whose controller has: what happens to it keeps it from
        ending them.
        """
        return [
            worker
            for controller in self.controllers
            for worker in controller.workers.values()
            if name in (worker.worker_id, controller.name)
        ]

    # Judges

    def act(self, owner: str, term: int, what: str) -> None:
        self.redis.store.acts.append(Act(self.loop.time(), owner, term, what))

    def _judge_act(self, act: Act) -> None:
        who = f"{act.owner} in term {act.term}: {act.what}"
        self.network.say(f"ACT {who}")
        others = [
            one.name
            for one in self.leaders()
            if one.lease is not None and one.lease.owner != act.owner
        ]
        if others:
            self.complaints.append(f"E: {who} at {act.time:.3f} while {others[0]} leads")
        self._judge_now()

    async def _watch(self) -> None:
        while True:
            self._judge_now()
            await asyncio.sleep(LOOK_S)

    def leaders(self) -> list[Controller]:
        return [one for one in self.living() if one.lease is not None and one.lease.leads]

    def _judge_now(self) -> None:
        now = self.loop.time()
        self.complaints += judge_leaders(now, [one.name for one in self.leaders()])
        if self.fleet:
            self._judge_fleet(now)

    def serving(self, pool: PoolName, now: float) -> list[str]:
        """Registered workers that may be given work, and that nobody has had to give up for being
        cut off.
        """
        return [
            worker.worker_id
            for controller in self.living()
            for worker in controller.workers.values()
            if worker.pool == pool
            and worker.process.alive
            and worker.registered
            and not worker.draining
            and now >= worker.unseen_until
        ]

    def _judge_fleet(self, now: float) -> None:
        for pool in POOLS:
            most = 4 if pool == "decode" else max(self.sizes[pool], self.operated)
            serving = self.serving(pool, now)
            if len(serving) > most + SURGE:
                self.complaints.append(
                    f"F: {len(serving)} {pool} workers serve at {now:.3f}, wanted are {most}"
                )

    def _judge_the_end(self) -> None:
        leaders = self.leaders()
        if len(leaders) != 1:
            self.complaints.append(f"L: {len(leaders)} controllers lead at the end")
        if self.fleet:
            now = self.loop.time()
            wanted = {pool: self._wanted(pool) for pool in POOLS}
            found = {pool: len(self.serving(pool, now)) for pool in POOLS}
            if wanted != found:
                self.complaints.append(f"F: at the end {found} serve, wanted are {wanted}")

    def _wanted(self, pool: PoolName) -> int:
        raw = self.redis.store.values.get(b"kvrelay:desired", {}).get(pool.encode())
        return 0 if raw is None else int(json.loads(raw)["value"]["replicas"])


# Faults: each begins, lasts, and is over


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
            await asyncio.sleep(LOOK_S)
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
