"""A whole kvrelay cluster in one virtual-time event loop: production code from the router's driver
down to the blocks.

What stands in for the outside: gRPC (`network`, `calls`), Redis (`fake_redis`), the model
(`toy_engine`), the launcher of processes (here) and time (`virtual_loop`).
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import redis.asyncio
import xxhash
from simulation.channel import Channel
from simulation.controller import Controller, Member
from simulation.fake_redis import FakeRedis
from simulation.history import UPGRADES, Fault, judge_index
from simulation.network import Network
from simulation.server import Server
from simulation.stand_ins import in_place
from simulation.toy_engine import MODEL, ToyRunner
from simulation.virtual_loop import Process, VirtualLoop, current_process

import kvrelay.state.registry
import router.core.model_versions
from autoscaler.actuator import Actuator
from autoscaler.lease import Lease
from autoscaler.loop import Autoscaler
from decode_worker.decode_stage import DecodeStage
from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.kvcache.block_hashes import HASH_BYTES
from kvrelay.engine.kvcache.block_pool import IntegrityError
from kvrelay.errors import FailedPrecondition, Unavailable
from kvrelay.process.stop_request import StopRequest
from kvrelay.state.registry import Registry
from kvrelay.types.block_keys import block_key
from kvrelay.types.control_plane import Claim
from kvrelay.types.workers import POOLS, PoolName, Role, StandbyWorker
from kvrelay.worker.context import Identity
from kvrelay.worker.runtime.host import host_worker, worker_builder
from kvrelay.worker.runtime.settings import WorkerSettings
from kvrelay.worker.worker import Worker
from prefill_worker.prefill_stage import PrefillStage
from router.observability.heartbeat import Heartbeat
from router.observability.metrics import Metrics
from router.runtime.driver import Driver

HOST_ID = "host"
URL = "redis://127.0.0.1:6379"
GONE_S = 4.0  # for a version of the model to come back
AFTER_S = 1.5  # how long a fault may go on to show after it is over


@dataclass
class RouterMember:
    process: Process
    driver: Driver


@dataclass
class Cluster:
    """Owns the processes. `members` are the workers there ever were, by name."""

    rng: random.Random
    config: ClusterConfig
    policy: AutoscalingPolicy
    num_blocks: Mapping[PoolName, int]
    sizes: Mapping[PoolName, int]
    hash_bytes: int = HASH_BYTES  # of block hashes; 2 of 16 make collisions
    members: dict[str, Member] = field(default_factory=dict)
    incarnations: list[tuple[str, int]] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    router: RouterMember | None = None
    faults: list[Fault] = field(default_factory=list)  # that happened, in their order
    version: int = 0  # of the model that lies where workers load it from

    def __post_init__(self) -> None:
        self.loop = VirtualLoop(random.Random(self.rng.random()))
        self.network = Network(self.loop, random.Random(self.rng.random()))
        self.redis = FakeRedis(self.network)
        self._routers = 0
        self.controllers: dict[str, Controller] = {}
        self._worker_ended = asyncio.Event()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The outside's stand-ins, where production code reaches for it."""
        places = (
            (
                grpc.aio,
                "insecure_channel",
                lambda address, *_, **__: Channel(self.network, address),
            ),
            (grpc.aio, "server", lambda **_: Server(self.network)),
            (redis.asyncio.Redis, "from_url", self.redis.client),
            # It is part of messages, and so of the trace; as what follows is
            (os, "getpid", lambda: 1),
            (secrets, "token_bytes", self.rng.randbytes),
            (
                kvrelay.state.registry,
                "_unix_us",
                lambda: round(1e6 * (1e9 + current_process().now())),
            ),
            (router.core.model_versions, "GONE_S", GONE_S),
        )
        with in_place(places):
            yield

    def note(
        self,
        kind: str,
        seconds: float = 0.0,
        *,
        loses_worker: bool = False,
        stops_router: bool = False,
    ) -> None:
        """A fault happens now and goes on for that long."""
        now = self.loop.time()
        self.network.faults[kind] += 1
        self.network.say(f"FAULT {kind} for {seconds:.3f} s")
        self.faults.append(Fault(kind, now, now + seconds + AFTER_S, loses_worker, stops_router))

    def process(self, name: str) -> Process:
        return Process(self.loop, name, clock_offset=self.rng.uniform(0, 1e4))

    def kill(self, process: Process) -> None:
        if process.alive:
            process.kill()
            self.network.killed(process)
            for member in self.members.values():
                if member.process is process:
                    member.ended.set()
                    self._worker_ended.set()

    @property
    def upgraded(self) -> bool:
        """Whether there has been another version of the model than the first."""
        return any(one.kind in UPGRADES for one in self.faults)

    # The router

    def start_router(self) -> None:
        self._routers += 1
        process = self.process("router")
        process.spawn(self._run_router(process, f"router-{self._routers}"))

    async def _run_router(self, process: Process, router_id: str) -> None:
        registry = await self._connected()
        metrics = Metrics(MODEL)
        driver = Driver(
            self.config, registry, router_id, process, metrics, hash_bytes=self.hash_bytes
        )
        heartbeat = Heartbeat(router_id, driver, metrics, registry, process)
        self.router = RouterMember(process, driver)
        process.spawn(heartbeat.run())
        await driver.run()

    async def _connected(self) -> Registry:
        while True:
            try:
                return await Registry.connect(URL)
            except Unavailable:
                await asyncio.sleep(0.2)  # its supervisor starts it again

    # The controllers

    def start_controllers(self) -> None:
        """Two with equal rights; one of them leads."""
        for name in ("controller-0", "controller-1"):
            self.start_controller(name)

    def start_controller(self, name: str) -> None:
        controller = self.controllers[name] = Controller(self, self.process(name))
        controller.process.spawn(self._run_controller(controller))

    async def _run_controller(self, controller: Controller) -> None:
        registry, process = await self._connected(), controller.process
        lease = controller.lease = Lease(
            registry, f"{process.name}-{self.rng.getrandbits(32):08x}", process
        )
        process.spawn(lease.run())
        actuator = Actuator(
            registry,
            controller,
            self.sizes,
            lease=lease,
            clock=process,
            rebalance=self.policy.rebalance,
            standby=self.policy.standby,
            drain_timeout_s=3.0,
        )
        process.spawn(actuator.run())
        process.spawn(Autoscaler(registry, self.policy, lease, process).run())

    def kill_controller(self, name: str) -> None:
        """With its workers, as Ray does."""
        controller = self.controllers[name]
        self.kill(controller.process)
        for member in controller.members.values():
            self.kill(member.process)

    def start_worker(self, role: Role, worker_id: str, claim: Claim) -> Member:
        if worker_id in self.members:
            self.complaints.append(f"E: {worker_id} is started a second time")
        process = self.process(worker_id)
        member = self.members[worker_id] = Member(
            worker_id, role, process, claim=claim, version=self.version
        )
        process.soon(self.rng.uniform(0.05, 0.4), lambda: process.spawn(self._run_worker(member)))
        return member

    async def until_ended(self, member: Member, seconds: float) -> None:
        if member.process.alive:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await member.ended.wait()
        self.kill(member.process)

    def leaders(self) -> list[str]:
        living = [
            one for one in self.controllers.values() if one.process.alive and one.lease is not None
        ]
        return [one.process.name for one in living if one.lease is not None and one.lease.leads]

    async def worker_ended(self) -> None:
        await self._worker_ended.wait()
        self._worker_ended.clear()

    # Workers

    def living(self, pool: Role | None = None) -> list[Member]:
        return [
            one
            for one in self.members.values()
            if one.process.alive and (pool is None or one.pool == pool)
        ]

    async def _run_worker(self, member: Member) -> None:
        while await (self._stand_by(member) if member.pool == "standby" else self._serve(member)):
            assert member.turns_to is not None
            member.pool, member.turns_to, member.stop = member.turns_to, None, StopRequest()
        member.ended.set()
        self.kill(member.process)

    async def _stand_by(self, member: Member) -> bool:
        """As kvrelay.worker.runtime.standby does; whether it joins a pool."""
        entry = StandbyWorker(member.worker_id, "ready", HOST_ID, 1, 0, 0)
        with suppress(Unavailable):
            async with await Registry.connect(URL) as registry:
                while not member.stop.drain.is_set():
                    with suppress(Unavailable):
                        await registry.publish_standby(entry)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            await member.stop.drain.wait()
        return member.turns_to is not None

    async def _serve(self, member: Member) -> bool:
        """Until the role is over; whether there is a next one."""
        assert member.pool != "standby"
        settings = WorkerSettings(
            member.worker_id,
            member.pool,
            "",
            URL,
            self.config,
            last_epoch=member.last_epoch,
            claim=member.claim,
        )
        nonce = xxhash.xxh3_64_intdigest(member.worker_id.encode()) >> 1
        runner: Any = ToyRunner(
            self.num_blocks[member.pool],
            nonce,
            lambda: self.die(member),
            lambda: self.check_salts(member),
            member.version,
        )
        stage = DecodeStage if member.pool == "decode" else PrefillStage
        build = worker_builder(settings, stage, runner, member.process, hash_bytes=self.hash_bytes)

        def remember(identity: Identity, credentials: Any) -> Worker:
            self.incarnations.append((identity.worker_id, identity.epoch))
            member.salts.clear()
            member.worker = build(identity, credentials)
            return member.worker

        try:
            member.last_epoch = await host_worker(settings, HOST_ID, remember, member.stop)
        except (Unavailable, FailedPrecondition):
            pass  # no registry at the start, or a successor
        except Exception as error:  # noqa: BLE001  it is judged
            self.complaints.append(f"{member.worker_id} ended with {error!r}")
        else:
            return member.turns_to is not None
        return False

    def die(self, member: Member) -> None:
        """A poisoned request takes its worker with it."""
        self.note("a request killed its worker", loses_worker=True)
        self.kill(member.process)
        raise SystemExit("poisoned")

    # What has to hold

    def check_books(self) -> None:
        """B at each moment: every block is in one state, and no lease writes to another's."""
        for member in self.living():
            worker = member.worker
            if worker is None:
                continue
            try:
                worker.context.cache.check_integrity()
                worker.stage.inbound.leases.check_integrity()
            except (IntegrityError, AssertionError) as error:
                self.complaints.append(
                    f"B: {member.worker_id} at {self.loop.time():.3f}: {error!r}"
                )

    def check_salts(self, member: Member) -> None:
        """X before each step: a block is read by sequences of the salt only that had it first since
        it was free.

        Equal tokens have equal KV whoever asked for them, so the tokens of the answers do not tell.
        """
        if member.worker is None:
            return
        pool = member.worker.context.cache.pool
        for sequence in member.worker.stage.sequences():
            for block in sequence.blocks:
                salt = member.salts.setdefault((block, pool.generation(block)), sequence.spec.salt)
                text = f"X: {sequence.spec.request_id} has KV of another salt on {member.worker_id}"
                if salt != sequence.spec.salt and text not in self.complaints:
                    self.complaints.append(text)

    def collisions(self) -> int:
        """Blocks of the right hash and other content that living or dead workers have found."""
        return sum(
            one.worker.context.cache.pool.collisions
            for one in self.members.values()
            if one.worker is not None
        )

    def check_empty(self) -> None:
        """B at the end: free + cached = total, and nobody remembers a request."""
        for member in self.living():
            worker = member.worker
            if worker is None:
                continue
            stage: Any = worker.stage
            held = {
                "blocks": worker.context.cache.pool.num_held,
                "sessions": len(worker.context.sessions),
                "sequences": len(stage.scheduler),
                "pushes": stage.inbound.receiver.under_way,
                "leases": len(stage.inbound.leases),
            }
            if isinstance(stage, DecodeStage):
                held |= {"reserved": len(stage._reserved), "decoding": len(stage._decoding)}
            else:
                held |= {"relays": len(stage._relays), "letting go": stage._letting_go}
            left = {name: number for name, number in held.items() if number}
            if left:
                self.complaints.append(f"B: {member.worker_id} still holds {left}")

    def check_index(self) -> None:
        """I at the end: the router knows the blocks that each worker holds, no more and no less."""
        if self.router is None or not self.router.process.alive:
            return
        dispatcher = self.router.driver.dispatcher
        for info in dispatcher.workers:
            member = self.members.get(info.worker_id)
            replica = dispatcher.index.replica(info.worker_id)
            if member is None or member.worker is None or replica is None:
                continue
            complaint = judge_index(
                replica.keys, map(block_key, member.worker.context.cache.pool.named_hashes)
            )
            self.complaints += [f"I: of {info.worker_id} the router {one}" for one in complaint]

    def preemptions(self) -> int:
        return sum(
            one.worker.stage.scheduler.preemptions
            for one in self.members.values()
            if one.worker is not None and isinstance(one.worker.stage, DecodeStage)
        )

    def serving(self) -> dict[PoolName, int]:
        return {pool: len(self.living(pool)) for pool in POOLS}
