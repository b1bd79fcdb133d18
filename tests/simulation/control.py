"""The control plane alone, in virtual time: controllers that crash, freeze and are cut off, over a
Redis that forgets.

Real are the lease, the actuator, the autoscaler and the registry. Workers are their heartbeats.
Times are a few tenths of production's, in the same proportions, so that much happens in a short
history.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from simulation.control_faults import FAULTS, FORGETTING, OF_WORKERS
from simulation.control_judge import Acts, ControlJudge
from simulation.control_process import Controller, ControlWorker
from simulation.fake_redis import FakeRedis
from simulation.history import Act, judge_acts, judge_incarnations
from simulation.network import Network
from simulation.stand_ins import in_place
from simulation.virtual_loop import Process, VirtualLoop, current_process

import autoscaler.lease
import autoscaler.worker_drain
import autoscaler.worker_watch
import kvrelay.state.redis_connection
import kvrelay.state.registry
from autoscaler.actuator import Actuator
from autoscaler.lease import Lease
from autoscaler.loop import Autoscaler
from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.errors import FailedPrecondition, Unavailable
from kvrelay.state.registry import Registry
from kvrelay.types.control_plane import RouterLoad
from kvrelay.types.workers import PoolName, WorkerInfo, WorkerLoad

SHARE = 0.4  # of production's times
RENEW_S, DEADLINE_S, EXPIRY_S, TAKEOVER_S = 0.2, 2.0, 2.0, 3.2
TIMEOUT_S = 0.8
HEARTBEAT_S, TTL_S = 0.4, 1.5
TICK_S = 0.3
DRIFT = 0.06  # how much faster or slower a host's clock runs
SKEW_S = 300.0  # how wrong a host's wall clock is
FAULTS_S = 14.0
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


@dataclass(frozen=True, slots=True)
class ControlResult:
    seed: int
    complaints: tuple[str, ...]
    faults: Counter[str]
    acts: Counter[str]
    leaders: int  # incarnations that led


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
        self.judge = ControlJudge(self, POLICY.decode.max_replicas)
        self.redis.store.acts = Acts(self.judge.act)
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
            (kvrelay.state.redis_connection, "TIMEOUT_S", TIMEOUT_S),
            (kvrelay.state.registry, "_unix_us", self._unix_us),
            (autoscaler.lease, "RENEW_S", RENEW_S),
            (autoscaler.lease, "DEADLINE_S", DEADLINE_S),
            (autoscaler.lease, "EXPIRY_S", EXPIRY_S),
            (autoscaler.lease, "TAKEOVER_S", TAKEOVER_S),
            (autoscaler.worker_watch, "GONE_S", autoscaler.worker_watch.GONE_S * SHARE),
            (autoscaler.worker_drain, "drain_worker", self._drain_worker),
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
        """As `kvrelay.worker.runtime.host` does: the model is loaded, then it registers and sends
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
        watching = self.loop.create_task(self.judge.watch())
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
        self.judge.end()

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

    def leaders(self) -> list[Controller]:
        return [one for one in self.living() if one.lease is not None and one.lease.leads]

    def act(self, owner: str, term: int, what: str) -> None:
        self.redis.store.acts.append(Act(self.loop.time(), owner, term, what))

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
