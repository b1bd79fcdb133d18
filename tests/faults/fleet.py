"""Real processes for the rows of the matrix: a redis-server, a router, workers, and a proxy before
each worker's endpoints.

Workers are forked by `worker_process.py`, not started by Ray: they come in a second and tell which
points of the protocol they reach. Everything in them but these points is what Ray's actors run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from faults.checkers import Invariant, check
from faults.client import Asking
from faults.fleet_router import WAIT_S, FleetRouter
from faults.fleet_worker import FleetWorker, Forks
from faults.history import Case, Evidence, FaultRecord, RequestHistory
from faults.vllm_pool import NOTHING_HELD
from faults.worker_process import ENGINE_VARIABLE
from support.tcp_proxy import proxy_to

from kvrelay.config.schema import ClusterConfig
from kvrelay.launch.child_command import ChildCommand
from kvrelay.launch.endpoints import Endpoints
from kvrelay.models import resolve_model
from kvrelay.security.credentials import Credentials
from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry
from kvrelay.types.workers import POOLS, PoolName
from kvrelay.wire import inference as wire
from router.frontend.model_card import ModelCard

CONFIG: dict[str, Any] = {
    "model": {"path": "demo", "dtype": "float32", "max_model_len": 2400},
    # 76 blocks; the same prompts come with a fault and without
    "kv": {"memory": "12MiB", "prefix_cache": False},
    "prefill": {"replicas": 2, "chunk_tokens": 128},
    "decode": {"replicas": 2},
    # So that the path does not depend on how busy the machine is
    "slo": None,
    # Of requests that name none, see `Fleet.ask`. Long enough for some tokens on a busy machine.
    "router": {"default_deadline_s": 10},
    "transfer": {"lease_s": 4, "transport": "grpc"},  # over a network that can be cut
    "listen": dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0"),
}
# The engine of all workers: native, or vllm in an environment that has it (see `make test-vllm`).
ENGINE = os.environ.get(ENGINE_VARIABLE, "native")
if ENGINE == "vllm":
    for section in ("prefill", "decode"):
        CONFIG[section] |= {"engine": "vllm", "engine_args": {"enforce_eager": True}}
    # 80 blocks for hand-offs, 239 for sequences
    CONFIG["kv"]["memory"] = "50MiB"
# Tokens; prefill workers say that it is as many as the model allows, which the router believes
PREFILL_MAX_LEN = 2048
_READY = re.compile(r"^kvrelay ready grpc=(\S+) http=(\S+) admin=(\S+)$")


class Fleet:
    """Use `running_fleet`."""

    def __init__(
        self,
        config: ClusterConfig,
        redis: EmbeddedRedis,
        registry: Registry,
        forks: Forks,
        folder: Path,
        exits: AsyncExitStack,
    ) -> None:
        self.config = config
        self.redis = redis
        self.registry = registry
        self.folder = folder
        self.model = resolve_model(config.model.path)
        self.max_model_len = ModelCard.load(self.model, config.model).info.max_model_len
        self.workers: dict[str, FleetWorker] = {}
        self.routers: list[FleetRouter] = []
        self._credentials = Credentials.internal(config.security, "router")
        self._exits = exits
        self._forks = forks
        self._numbers = {"prefill": 0, "decode": 0, "request": 0}
        self._answers: dict[str, tuple[int, ...]] = {}

    # Workers

    async def add(
        self, pool: PoolName, worker_id: str | None = None, **oddity: object
    ) -> FleetWorker:
        """Returns as soon as it is asked for. `oddity` is what is unusual about it, see
        worker_process.py.
        """
        if worker_id is None:
            worker_id = await self.registry.next_name(pool, self._numbers[pool])
        self._numbers[pool] = int(worker_id.rpartition("-")[2]) + 1
        ways = [await self._exits.enter_async_context(proxy_to()) for _ in range(2)]
        self.workers[worker_id] = worker = FleetWorker(worker_id, pool, *ways, self._credentials)
        config = self.config.model_dump(mode="json")
        if pool == "prefill":
            config["model"]["max_model_len"] = min(PREFILL_MAX_LEN, self.max_model_len)
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
        self._forks.order(worker, order | oddity)
        return worker

    def pool(self, pool: PoolName) -> list[FleetWorker]:
        """Those that live, oldest first."""
        return [one for one in self.workers.values() if one.pool == pool and one.alive]

    @property
    def alive(self) -> list[FleetWorker]:
        return [one for one in self.workers.values() if one.alive]

    async def complete(self) -> None:
        """As many workers as configured, and every router may give work to each of them."""
        for pool in POOLS:
            for _ in range(self.config.pool(pool).replicas - len(self.pool(pool))):
                await self.add(pool)
        for worker in self.alive:
            await self.until(lambda: worker.serves, f"{worker.worker_id} serves")  # noqa: B023
        for router in self.routers:
            for worker in self.alive if router.alive else ():
                await self.found(worker, router)
            if router.alive:
                await router.registered({one.worker_id for one in self.alive})

    async def replace(self, worker: FleetWorker, **oddity: object) -> FleetWorker:
        """By one that is unusual; returns once it may be given work."""
        os.kill(worker.pid, signal.SIGKILL)
        await self.until(lambda: not worker.alive, f"{worker.worker_id} is dead")
        other = await self.add(worker.pool, **oddity)
        await self.complete()
        return other

    async def found(self, worker: FleetWorker, router: FleetRouter | None = None) -> None:
        """Until the router talks to it."""
        finding = router or self.router
        await self.until(
            lambda: finding.finds(worker.worker_id), f"the router finds {worker.worker_id}"
        )

    async def until(self, holds: Callable[[], object], what: str, seconds: float = WAIT_S) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not holds():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(
                f"{what}: still not so after {seconds:g} s; logs are in {self.folder}"
            ) from None

    async def reached(self, request_id: str, point: str) -> FleetWorker:
        """The worker where the request is at that point, as soon as one says so."""

        def where() -> FleetWorker | None:
            for worker in self.workers.values():
                if worker.was_at(request_id, point):
                    return worker
            return None

        async with self._forks.news:
            try:
                async with asyncio.timeout(WAIT_S):
                    await self._forks.news.wait_for(where)
            except TimeoutError:
                raise AssertionError(f"{request_id} did not come to {point}") from None
        found = where()
        assert found is not None
        return found

    # Routers

    async def add_router(self, **router: object) -> FleetRouter:
        """Returns once it serves, with as many workers as configured. Keyword arguments are keys of
        `router`.
        """
        config = self.config.model_copy(
            update={"router": self.config.router.model_copy(update=router)}
        )
        path = self.folder / f"router-{len(self.routers)}.yaml"
        path.write_text(json.dumps(config.model_dump(mode="json")))
        log = path.with_suffix(".log")
        child = await ChildCommand.start(
            "router", "--config", str(path), log_file=self._exits.enter_context(log.open("wb"))
        )
        self._exits.push_async_callback(child.stop, 10.0)
        async with asyncio.timeout(WAIT_S):
            match = _READY.match(await child.line())
        assert match is not None
        endpoints = Endpoints(*match.groups())
        channels = [
            await self._exits.enter_async_context(self.client_channel(endpoint))
            for endpoint in (endpoints.grpc, endpoints.admin)
        ]
        self.routers.append(FleetRouter(child, endpoints, *channels, log))
        return self.routers[-1]

    def client_channel(self, address: str, *others: tuple[str, int]) -> grpc.aio.Channel:
        """To a endpoint at HOST:PORT, with a connection of its own. `others` are options of
        gRPC.
        """
        options = [("grpc.use_local_subchannel_pool", 1), *others]
        tls = self.config.security.tls
        if tls is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(
            address, grpc.ssl_channel_credentials(Path(tls.ca).read_bytes()), options
        )

    @property
    def router(self) -> FleetRouter:
        """The first that lives."""
        return next(one for one in self.routers if one.alive)

    async def registered(self) -> None:
        """Until the router reads in all living workers' entries that they are ready."""
        await self.router.registered({one.worker_id for one in self.alive})

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
        router_deadline: bool = False,
        **sampling: Any,
    ) -> Asking:
        """A request of a case; its points are in its name. Greedy and 48 tokens, if `sampling` says
        nothing else.

        It goes to the first router that lives, or to `routers`, one after the other. With
        `router_deadline` the client names no deadline, so that the router's own is the only one.
        """
        self._numbers["request"] += 1
        number = self._numbers["request"]
        timeout: float | None = 120.0 if deadline_s is None else deadline_s
        if router_deadline:
            deadline_s, timeout = self.config.router.default_deadline_s, None
        head, mark, points = name.partition("!")
        options = _options(sampling)
        history = RequestHistory(
            f"{head}-{number}{mark}{points}", self._answers.get(_key(prompt, options)), deadline_s
        )
        (case.bystanders if bystander else case.requests).append(history)
        request = wire.GenerateRequest(
            request_id=history.request_id, token_ids=prompt, sampling=options
        )
        channels = [one.channel for one in routers or (self.router,)]
        return Asking(history, request, *channels, timeout=timeout)

    async def learn(self, *prompts: tuple[int, ...], **sampling: Any) -> None:
        """Runs them without a fault, once a session; `ask` expects these answers."""
        await self.complete()
        options = _options(sampling)
        unknown = [one for one in prompts if _key(one, options) not in self._answers]
        case = Case(self.config.transfer.lease_s)
        for asked, prompt in [
            (self.ask(case, "learn", prompt, **sampling), prompt) for prompt in unknown
        ]:
            history = await asked.ended()
            assert history.end.status in ("length", "stop"), history.end
            self._answers[_key(prompt, options)] = history.token_ids

    # Cases

    @asynccontextmanager
    async def case(self, *invariants: Invariant) -> AsyncIterator[Case]:
        """Checks the invariants when all requests have ended and all workers are at rest."""
        await self.complete()
        case = Case(self.config.transfer.lease_s)
        case.before = [await one.sample() for one in self.alive]
        try:
            yield case
        except BaseException:
            # Whoever a point stopped would not serve the cases that follow.
            for worker in self.alive:
                if worker.frozen:
                    os.kill(worker.pid, signal.SIGKILL)
            raise
        finally:
            for worker in self.workers.values():
                worker.routers.heal()
                worker.handoffs.heal()
                if worker.alive and worker.channel is not None:
                    self.let_go(worker)
        await self.until(lambda: all(one.ends for one in case.everyone), "all requests have ended")
        await self._rest(case)
        check(case, *invariants)
        if ENGINE == "vllm":
            for worker in self.alive:
                if worker.channel is not None:
                    await self.left_in_vllm(worker)

    async def _rest(self, case: Case) -> None:
        """Looks until all workers are at rest, or for much longer than a lease lasts."""
        until = time.monotonic() + WAIT_S
        # Workers that are starting hold nothing.
        waiting = [one for one in self.alive if one.channel is not None]
        while waiting and time.monotonic() < until:
            samples = [await one.sample() for one in waiting]
            case.after += samples
            waiting = [
                worker
                for worker, sample in zip(waiting, samples, strict=True)
                if not sample.at_rest
            ]
            if waiting:
                await asyncio.sleep(0.005)

    async def at_rest(self, worker: FleetWorker) -> None:
        """Until it holds nothing."""
        async with asyncio.timeout(WAIT_S):
            while not (await worker.sample()).at_rest:
                await asyncio.sleep(0.005)

    async def left_in_vllm(self, worker: FleetWorker) -> None:
        """Asks vLLM itself, past what the worker reports: it holds no block and no request."""
        worker.in_vllm = None
        os.kill(worker.pid, signal.SIGUSR2)
        answered = f"{worker.worker_id} answers for vLLM"
        await self.until(lambda: worker.in_vllm is not None or not worker.alive, answered)
        # A worker that drains may have ended meanwhile.
        held = worker.in_vllm or NOTHING_HELD
        assert held == NOTHING_HELD, (worker.worker_id, held)

    # Faults

    async def kill(self, case: Case, *workers: FleetWorker) -> None:
        """SIGKILL."""
        fault = record(case, "SIGKILL", *workers)
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        for worker in workers:
            await self.until(lambda: not worker.alive, f"{worker.worker_id} is dead")  # noqa: B023
            if worker.status == signal.SIGKILL:
                fault.evidence.append(
                    Evidence(
                        time.monotonic(), f"wait status of {worker.worker_id}: {worker.status}"
                    )
                )

    async def stopped(self, case: Case, worker: FleetWorker) -> None:
        """Until the kernel says that the worker has stopped itself, as a point told it to."""
        fault = record(case, "SIGSTOP")
        await self.until(lambda: worker.frozen, f"{worker.worker_id} is stopped")
        fault.evidence.append(Evidence(time.monotonic(), f"/proc/{worker.pid}/stat says T"))

    def let_go(self, worker: FleetWorker) -> None:
        """Of what is held there."""
        os.kill(worker.pid, signal.SIGUSR1)

    def thaw(self, worker: FleetWorker) -> None:
        os.kill(worker.pid, signal.SIGCONT)


def record(case: Case, name: str, *victims: FleetWorker) -> FaultRecord:
    fault = FaultRecord(name, frozenset(one.worker_id for one in victims))
    case.faults.append(fault)
    return fault


def _options(sampling: dict[str, Any]) -> wire.SamplingOptions:
    return wire.SamplingOptions(
        **{"temperature": 0.0, "max_tokens": 48, "ignore_eos": True, "seed": 3, **sampling}
    )


def _key(prompt: tuple[int, ...], options: wire.SamplingOptions) -> str:
    return f"{prompt} {options}"


@asynccontextmanager
async def running_fleet(
    forks: Forks | None = None, **sections: dict[str, Any]
) -> AsyncIterator[Fleet]:
    """With CONFIG, but for some keys of some sections. Fleets may share the process that workers
    are forked from.
    """
    merged = {
        **CONFIG,
        **{name: {**CONFIG.get(name, {}), **keys} for name, keys in sections.items()},
    }
    async with AsyncExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-fleet-")))
        redis = await exits.enter_async_context(EmbeddedRedis())
        registry = await exits.enter_async_context(await Registry.connect(redis.url))
        config = ClusterConfig.model_validate({**merged, "redis": {"url": redis.url}})
        forks = forks or await exits.enter_async_context(Forks())
        fleet = Fleet(config, redis, registry, forks, folder, exits)
        starting = asyncio.create_task(fleet.complete())
        await fleet.add_router()
        await starting
        yield fleet
