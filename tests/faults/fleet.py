"""Real processes for the rows of the matrix: a redis-server, a router, workers, and a proxy before each worker's doors.

Workers are forked by `worker_process.py`, not started by Ray: they come in a second and tell which points of the
protocol they reach. Everything in them but these points is what Ray's actors run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from faults import worker_process
from faults.checkers import check
from faults.client import Asking
from faults.history import Case, Evidence, FaultRecord, RequestHistory, WorkerSample
from tcp_proxy import TcpProxy, proxy_to

from kvrelay.child import bound_to_parent
from kvrelay.config import ClusterConfig
from kvrelay.embedded_redis import EmbeddedRedis
from kvrelay.local_cluster import Child, Endpoints
from kvrelay.models import resolve_model
from kvrelay.types import PoolName
from kvrelay.wire import inference as wire
from kvrelay.wire.cluster import (
    ClusterServiceStub,
    ClusterStatus,
    cluster_status_from_proto,
    worker_status_from_proto,
)
from kvrelay.wire.cluster import pb as cluster_pb
from kvrelay.wire.worker import WorkerServiceStub
from kvrelay.wire.worker import pb as worker_pb
from router.model_card import ModelCard

CONFIG: dict[str, Any] = {
    "model": {"path": "demo", "dtype": "float32", "max_model_len": 2400},
    "kv": {"memory": "12MiB", "prefix_cache": False},  # 76 blocks; the same prompts come with a fault and without
    "prefill": {"replicas": 2, "chunk_tokens": 128},
    "decode": {"replicas": 2},
    "transfer": {"lease_s": 4, "transport": "grpc"},  # over a network that can be cut
    "listen": dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0"),
}
PREFILL_MAX_LEN = 2048  # tokens; prefill workers say that it is as many as the model allows, which the router believes
WAIT_S = 40.0
_READY = re.compile(r"^kvrelay ready grpc=(\S+) http=(\S+) admin=(\S+)$")


@dataclass(eq=False)
class FleetWorker:
    """A worker process. `routers` and `handoffs` are the proxies that these see in its place."""

    worker_id: str
    pool: PoolName
    routers: TcpProxy
    handoffs: TcpProxy
    pid: int = 0
    status: int | None = None  # of waitpid, once it has ended
    reached: list[tuple[str, int, str]] = field(default_factory=list)  # request id, attempt, point
    channel: grpc.aio.Channel | None = None

    @property
    def alive(self) -> bool:
        return self.status is None

    @property
    def serves(self) -> bool:
        """Raises AssertionError if it ended instead."""
        assert self.alive, f"{self.worker_id} ended with {self.status}; its log is beside the router's"
        return self.channel is not None

    @property
    def frozen(self) -> bool:
        """Whether the kernel says that it is stopped."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    async def sample(self) -> WorkerSample:
        """Asked directly, past the proxies. Raises grpc.aio.AioRpcError if it does not answer."""
        assert self.channel is not None, "not started"
        answer = await WorkerServiceStub(self.channel).GetWorkerStatus(worker_pb.GetWorkerStatusRequest(), timeout=5.0)
        one = worker_status_from_proto(answer.status)
        load = one.load
        return WorkerSample(
            at=time.monotonic(),
            worker_id=one.worker_id,
            pid=one.pid,
            epoch=one.epoch,
            busy=load.running + load.waiting + load.leases,
            blocks_total=load.blocks_total,
            blocks_held=load.blocks_held,
            blocks_cached=load.blocks_cached,
            integrity_error=load.integrity_error,
            preemptions=load.preemptions,
        )


@dataclass(frozen=True, eq=False)
class FleetRouter:
    child: Child
    endpoints: Endpoints
    channel: grpc.aio.Channel  # of a client
    admin: grpc.aio.Channel
    log: Path

    @property
    def alive(self) -> bool:
        return self.child.process.returncode is None

    def finds(self, worker: FleetWorker) -> bool:
        """Whether the last that it logged of the worker is that it was found."""
        news = [line for line in self.log.read_text().splitlines() if f'"{worker.worker_id}"' in line]
        told = [line for line in news if '"worker found"' in line or '"worker lost"' in line]
        return bool(told) and '"worker found"' in told[-1]


class Fleet:
    """Use `running_fleet`."""

    def __init__(self, config: ClusterConfig, redis: EmbeddedRedis, folder: Path, exits: AsyncExitStack) -> None:
        self.config = config
        self.redis = redis
        self.folder = folder
        self.model = resolve_model(config.model.path)
        self.max_model_len = ModelCard.load(self.model, config.model).info.max_model_len
        self.workers: dict[str, FleetWorker] = {}
        self.routers: list[FleetRouter] = []
        self._exits = exits
        self._forks: asyncio.subprocess.Process | None = None
        self._numbers = {"prefill": 0, "decode": 0, "request": 0}
        self._news = asyncio.Condition()
        self._answers: dict[str, tuple[int, ...]] = {}

    # Workers

    async def begin(self) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_WAIT_POLICY": "PASSIVE"}
        self._forks = await asyncio.create_subprocess_exec(
            *bound_to_parent(sys.executable, worker_process.__file__ or ""),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        reading = asyncio.create_task(self._read(self._forks))

        async def end() -> None:
            assert self._forks is not None
            self._forks.kill()
            await self._forks.wait()
            await reading

        self._exits.push_async_callback(end)

    async def add(self, pool: PoolName) -> FleetWorker:
        """Returns as soon as it is asked for."""
        worker_id = f"{pool}-{self._numbers[pool]}"
        self._numbers[pool] += 1
        ways = [await self._exits.enter_async_context(proxy_to()) for _ in range(2)]
        self.workers[worker_id] = worker = FleetWorker(worker_id, pool, *ways)
        config = self.config.model_dump(mode="json")
        if pool == "prefill":
            config["model"]["max_model_len"] = PREFILL_MAX_LEN
        order = {
            "worker_id": worker_id,
            "pool": pool,
            "model": self.model,
            "redis": self.redis.url,
            "config": config,
            "announce": worker.routers.address,
            "handoff": worker.handoffs.address,
            "max_model_len": self.max_model_len,
            "log": str(self.folder / f"{worker_id}.log"),
        }
        assert self._forks is not None
        assert self._forks.stdin is not None
        self._forks.stdin.write(json.dumps(order).encode() + b"\n")
        return worker

    def pool(self, pool: PoolName) -> list[FleetWorker]:
        """Those that live, oldest first."""
        return [one for one in self.workers.values() if one.pool == pool and one.alive]

    @property
    def alive(self) -> list[FleetWorker]:
        return [one for one in self.workers.values() if one.alive]

    async def complete(self) -> None:
        """As many workers as configured, and every router talks to each of them."""
        for pool, size in (("prefill", self.config.prefill.replicas), ("decode", self.config.decode.replicas)):
            for _ in range(size - len(self.pool(pool))):  # type: ignore[arg-type]
                await self.add(pool)  # type: ignore[arg-type]
        for worker in self.alive:
            await self.until(lambda: worker.serves, f"{worker.worker_id} serves")  # noqa: B023
        for router in self.routers:
            for worker in self.alive if router.alive else ():
                await self.until(lambda: router.finds(worker), f"the router finds {worker.worker_id}")  # noqa: B023

    async def until(self, holds: Any, what: str, seconds: float = WAIT_S) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not holds():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{what}: still not so after {seconds:g} s; logs are in {self.folder}") from None

    async def reached(self, request_id: str, point: str) -> FleetWorker:
        """The worker where the request is at that point, as soon as one says so."""

        def where() -> FleetWorker | None:
            for worker in self.workers.values():
                if any((one[0], one[2]) == (request_id, point) for one in worker.reached):
                    return worker
            return None

        async with self._news:
            try:
                async with asyncio.timeout(WAIT_S):
                    await self._news.wait_for(where)
            except TimeoutError:
                raise AssertionError(f"{request_id} did not come to {point}") from None
        found = where()
        assert found is not None
        return found

    async def _read(self, forks: asyncio.subprocess.Process) -> None:
        assert forks.stdout is not None
        async for line in forks.stdout:
            said = json.loads(line)
            worker = self.workers.get(said.get("worker_id", ""))
            if worker is None:
                continue
            if "address" in said:
                worker.channel = grpc.aio.insecure_channel(said["address"])
                for way in (worker.routers, worker.handoffs):
                    way.target.set_result(said["address"])
            elif "ended" in said:
                worker.status = said["ended"]
                if worker.channel is not None:
                    await worker.channel.close()
            elif "point" in said:
                worker.reached.append((said["request_id"], said["attempt"], said["point"]))
            else:
                worker.pid = said["pid"]
            async with self._news:
                self._news.notify_all()

    # Routers

    async def add_router(self, **router: object) -> FleetRouter:
        """Returns once it serves, with as many workers as configured. Keyword arguments are keys of `router`."""
        config = self.config.model_copy(update={"router": self.config.router.model_copy(update=router)})
        path = self.folder / f"router-{len(self.routers)}.yaml"
        path.write_text(json.dumps(config.model_dump(mode="json")))
        log = path.with_suffix(".log")
        child = await Child.start("router", "--config", str(path), log_file=self._exits.enter_context(log.open("wb")))
        self._exits.push_async_callback(child.stop, 10.0)
        async with asyncio.timeout(WAIT_S):
            match = _READY.match(await child.line())
        assert match is not None
        endpoints = Endpoints(*match.groups())
        doors = [
            await self._exits.enter_async_context(grpc.aio.insecure_channel(door))
            for door in (endpoints.grpc, endpoints.admin)
        ]
        self.routers.append(FleetRouter(child, endpoints, *doors, log))
        return self.routers[-1]

    @property
    def router(self) -> FleetRouter:
        """The first that lives."""
        return next(one for one in self.routers if one.alive)

    async def status(self) -> ClusterStatus:
        stub = ClusterServiceStub(self.router.admin)
        return cluster_status_from_proto(await stub.GetStatus(cluster_pb.GetStatusRequest()))

    async def waiting(self, count: int) -> None:
        """Until so many requests wait in the router's queue."""
        async with asyncio.timeout(WAIT_S):
            while (await self.status()).router.waiting < count:
                await asyncio.sleep(0.002)

    async def registry_is_away(self) -> None:
        """Until the router says so."""
        async with asyncio.timeout(WAIT_S):
            while (await self.status()).registry == "ok":
                await asyncio.sleep(0.05)

    async def registered(self) -> None:
        """Until the router reads all living workers' entries."""
        names = {one.worker_id for one in self.alive}
        async with asyncio.timeout(WAIT_S):
            while True:
                status = await self.status()
                known = {one.worker_id for pool in status.pools for one in pool.workers}
                if status.registry == "ok" and known >= names:
                    return
                await asyncio.sleep(0.05)

    async def preemptions(self) -> int:
        """Of all decode workers, asked directly."""
        return sum([(await one.sample()).preemptions for one in self.pool("decode")])

    # Requests

    def ask(
        self,
        case: Case,
        name: str,
        prompt: tuple[int, ...],
        *,
        bystander: bool = False,
        routers: tuple[FleetRouter, ...] = (),
        deadline_s: float | None = None,
        **sampling: Any,
    ) -> Asking:
        """A request of a case; its points are in its name. Greedy and 48 tokens, if `sampling` says nothing else.

        It goes to the first router that lives, or to `routers`, one after the other.
        """
        self._numbers["request"] += 1
        number = self._numbers["request"]
        head, mark, points = name.partition("!")
        options = _options(sampling)
        history = RequestHistory(f"{head}-{number}{mark}{points}", self._answers.get(_key(prompt, options)), deadline_s)
        (case.bystanders if bystander else case.requests).append(history)
        request = wire.GenerateRequest(request_id=history.request_id, token_ids=prompt, sampling=options)
        channels = [one.channel for one in routers or (self.router,)]
        return Asking(history, request, *channels, timeout=120.0 if deadline_s is None else deadline_s)

    async def learn(self, *prompts: tuple[int, ...], **sampling: Any) -> None:
        """Runs them without a fault, once a session; `ask` expects these answers."""
        await self.complete()
        options = _options(sampling)
        unknown = [one for one in prompts if _key(one, options) not in self._answers]
        case = Case(self.config.transfer.lease_s)
        for asked, prompt in [(self.ask(case, "learn", prompt, **sampling), prompt) for prompt in unknown]:
            history = await asked.ended()
            assert history.end.status in ("length", "stop"), history.end
            self._answers[_key(prompt, options)] = history.token_ids

    # Cases

    @asynccontextmanager
    async def case(self, letters: str) -> AsyncIterator[Case]:
        """Checks the letters when all requests have ended and all workers are at rest."""
        await self.complete()
        case = Case(self.config.transfer.lease_s)
        case.before = [await one.sample() for one in self.alive]
        yield case
        await self.until(lambda: all(one.ends for one in case.everyone), "all requests have ended")
        await self._rest(case)
        check(case, letters)

    async def _rest(self, case: Case) -> None:
        """Looks until all workers are at rest, or for as long as leases may last."""
        until = time.monotonic() + max(case.lease_s, 4.0) + 2.0
        waiting = self.alive
        while waiting and time.monotonic() < until:
            samples = [await one.sample() for one in waiting]
            case.after += samples
            waiting = [worker for worker, sample in zip(waiting, samples, strict=True) if not sample.at_rest]
            if waiting:
                await asyncio.sleep(0.005)

    # Faults

    async def kill(self, case: Case, *workers: FleetWorker) -> None:
        """SIGKILL."""
        fault = record(case, "SIGKILL", *workers)
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        for worker in workers:
            await self.until(lambda: not worker.alive, f"{worker.worker_id} is dead")  # noqa: B023
            if worker.status == signal.SIGKILL:
                fault.evidence.append(Evidence(time.monotonic(), f"wait status of {worker.worker_id}: {worker.status}"))

    async def stopped(self, case: Case, worker: FleetWorker) -> None:
        """Until the kernel says that the worker has stopped itself, as a point told it to."""
        fault = record(case, "SIGSTOP")
        await self.until(lambda: worker.frozen, f"{worker.worker_id} is stopped")
        fault.evidence.append(Evidence(time.monotonic(), f"/proc/{worker.pid}/stat says T"))

    def thaw(self, worker: FleetWorker) -> None:
        os.kill(worker.pid, signal.SIGCONT)


def record(case: Case, name: str, *victims: FleetWorker) -> FaultRecord:
    fault = FaultRecord(name, frozenset(one.worker_id for one in victims))
    case.faults.append(fault)
    return fault


def _options(sampling: dict[str, Any]) -> wire.SamplingOptions:
    return wire.SamplingOptions(**{"temperature": 0.0, "max_tokens": 48, "ignore_eos": True, "seed": 3, **sampling})


def _key(prompt: tuple[int, ...], options: wire.SamplingOptions) -> str:
    return f"{prompt} {options}"


@asynccontextmanager
async def running_fleet(**sections: dict[str, Any]) -> AsyncIterator[Fleet]:
    """With CONFIG, but for some keys of some sections."""
    merged = {**CONFIG, **{name: {**CONFIG.get(name, {}), **keys} for name, keys in sections.items()}}
    async with AsyncExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-fleet-")))
        redis = await exits.enter_async_context(EmbeddedRedis())
        config = ClusterConfig.model_validate({**merged, "redis": {"url": redis.url}})
        fleet = Fleet(config, redis, folder, exits)
        await fleet.begin()
        starting = asyncio.create_task(fleet.complete())
        await fleet.add_router()
        await starting
        yield fleet
