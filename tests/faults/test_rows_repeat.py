"""Each RPC's answer is lost, and the RPC comes again in the same words: row 14. What it does is
done once.

The methods are read from the services' descriptors, and a session's commands from its message: a
new one without a case here fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import pytest
from faults.checkers import Invariant
from faults.fleet import Fleet, record
from faults.fleet_worker import FleetWorker
from faults.history import Case, Evidence, FaultRecord
from faults.launcher import FleetLauncher
from faults.prompts import LONG, OTHER, PROMPT, tokens
from support.tcp_proxy import TcpProxy, proxy_to

from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.wire import cluster, inference, transfer, worker
from kvrelay.worker_messages import (
    Abort,
    Command,
    HandedOff,
    Prefill,
    Renew,
    Reserve,
    Reserved,
    RunLocal,
    TokenBatch,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

SHORT = tokens(60, 14)  # is not handed over
TELLS = 64  # bytes: an answer is longer than what HTTP/2 says by itself
MAX_TOKENS = 8
LEASE_S = 30.0

T = TypeVar("T")
Run = Callable[[FleetLauncher, Case, FaultRecord], Awaitable[None]]
CASES: dict[str, Run] = {}


def case_of(*names: str) -> Callable[[Run], Run]:
    def named(run: Run) -> Run:
        CASES.update(dict.fromkeys(names, run))
        return run

    return named


def all_methods() -> set[str]:
    """`Service.Method`, and for a session `WorkerService.Session.command`."""
    files = [one.pb.DESCRIPTOR for one in (cluster, inference, transfer, worker)]
    services = [service for file in files for service in file.services_by_name.values()]
    names = {f"{service.name}.{method.name}" for service in services for method in service.methods}
    commands = worker.pb.SessionRequest.DESCRIPTOR.oneofs_by_name["command"].fields
    names.remove("WorkerService.Session")
    return names | {f"WorkerService.Session.{command.name}" for command in commands}


async def test_row_14_each_method_has_a_case() -> None:
    # Nobody repeats a fetch: who has no answer computes. That it would be done once is seen in
    # test_handoff_faults.py. A second request for a snapshot brings a second snapshot; lost ones
    # are in tests/unit/worker/test_cache_feed.py. Adapters are named as they shall be, not counted.
    without = {
        "KvTransferService.Fetch",
        "WorkerService.Session.resync_cache",
        *(f"ClusterService.{one}Adapter" for one in ("Load", "Unload")),
        "ClusterService.ListAdapters",
    }
    assert CASES.keys() == all_methods() - without


@pytest.mark.parametrize("method", CASES)
@pytest.mark.sweep(3)
async def test_row_14_an_answer_is_lost_and_the_call_repeated(
    launcher: FleetLauncher, method: str
) -> None:
    fleet = launcher.fleet
    await fleet.learn(OTHER, SHORT, PROMPT, LONG)
    async with fleet.case(Invariant.TOKENS, Invariant.ANSWER, Invariant.BLOCKS) as case:
        fault = record(case, f"the answer of {method} is lost, and it comes again")
        await fleet.ask(case, "before", OTHER, bystander=True).ended()
        await CASES[method](launcher, case, fault)
    await launcher.are(prefill=2, decode=2)


@asynccontextmanager
async def losing(fleet: Fleet, address: str) -> AsyncIterator[tuple[TcpProxy, grpc.aio.Channel]]:
    """A connection on which nothing comes back."""
    async with proxy_to(address) as way, fleet.client_channel(way.address) as channel:
        await channel.channel_ready()
        way.loses.add("down")
        yield way, channel


async def repeated(
    fleet: Fleet,
    fault: FaultRecord,
    address: str,
    call: Callable[[grpc.aio.Channel], Awaitable[Any]],
    done: Callable[[], Awaitable[bool]] | None = None,
    over: Callable[[], Awaitable[bool]] | None = None,
) -> Any:
    """The second answer. The first is lost with its connection when it has come half of the way
    back, and `done`; the call comes again when the loss was noticed, as `over` says.
    """
    async with losing(fleet, address) as (way, channel):
        first = asyncio.ensure_future(call(channel))
        async with asyncio.timeout(30):
            while way.lost < TELLS or (done is not None and not await done()):
                await asyncio.sleep(0.01)
        way.reset()
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await first
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        fault.evidence.append(
            Evidence(time.monotonic(), f"{way.lost} bytes of an answer were lost")
        )
        async with asyncio.timeout(30):
            while over is not None and not await over():
                await asyncio.sleep(0.01)
    async with fleet.client_channel(address) as again:
        return await call(again)


# What only looks


@case_of("InferenceService.ListModels")
async def models(launcher: FleetLauncher, case: Case, fault: FaultRecord) -> None:
    router = launcher.fleet.router

    def call(channel: grpc.aio.Channel) -> Awaitable[Any]:
        return inference.InferenceServiceStub(channel).ListModels(inference.pb.ListModelsRequest())

    assert await repeated(launcher.fleet, fault, router.endpoints.grpc, call) == await call(
        router.channel
    )


@case_of("ClusterService.GetStatus", "ClusterService.WatchStatus")
async def status(launcher: FleetLauncher, case: Case, fault: FaultRecord) -> None:
    fleet = launcher.fleet

    def call(channel: grpc.aio.Channel) -> Awaitable[Any]:
        stub = cluster.ClusterServiceStub(channel)
        if "WatchStatus" in fault.name:
            return anext(aiter(stub.WatchStatus(cluster.pb.WatchStatusRequest())))
        return stub.GetStatus(cluster.pb.GetStatusRequest())

    seen = await repeated(fleet, fault, fleet.router.endpoints.admin, call)
    shown = {one.worker_id for pool in seen.pools for one in pool.workers}
    assert shown >= {one.worker_id for one in fleet.alive}, (
        "and those that earlier rows killed, for some seconds"
    )


@case_of("WorkerService.GetWorkerStatus")
async def worker_status(launcher: FleetLauncher, case: Case, fault: FaultRecord) -> None:
    looked_at = launcher.fleet.pool("decode")[0]

    def call(channel: grpc.aio.Channel) -> Awaitable[Any]:
        return worker.WorkerServiceStub(channel).GetWorkerStatus(worker.pb.GetWorkerStatusRequest())

    seen = await repeated(launcher.fleet, fault, looked_at.address, call)
    assert seen.status.worker_id == looked_at.worker_id


# What changes the pools: on a worker that has a stream, so that it is still there when the call
# comes again


async def busy_worker(launcher: FleetLauncher, case: Case) -> FleetWorker:
    asked = launcher.fleet.ask(case, "row-14!hold@joined", SHORT)
    return await launcher.fleet.reached(asked.history.request_id, "joined")


async def has_left(launcher: FleetLauncher, leaver: FleetWorker, case: Case, started: int) -> None:
    """Its stream has ended on it, and one came in its place."""
    fleet = launcher.fleet
    fleet.let_go(leaver)
    await fleet.until(lambda: not leaver.alive, f"{leaver.worker_id} has left")
    await fleet.until(lambda: case.requests[0].ends, "its stream has ended")
    await launcher.are(prefill=2, decode=2)
    assert len(case.requests[0].attempts) == 1
    assert launcher.started == started + 1


@case_of("WorkerService.Drain", "ClusterService.DrainWorker")
async def drain(launcher: FleetLauncher, case: Case, fault: FaultRecord) -> None:
    fleet, started = launcher.fleet, launcher.started
    leaver = await busy_worker(launcher, case)
    fault.victims |= {leaver.worker_id}
    direct = "WorkerService" in fault.name

    def call(channel: grpc.aio.Channel) -> Awaitable[Any]:
        if direct:
            return worker.WorkerServiceStub(channel).Drain(
                worker.pb.DrainRequest(grace_seconds=LEASE_S)
            )
        wish = cluster.pb.DrainWorkerRequest(worker_id=leaver.worker_id)
        return cluster.ClusterServiceStub(channel).DrainWorker(wish)

    async def done() -> bool:
        return (await leaver.sample()).state == "draining"

    address = leaver.address if direct else fleet.router.endpoints.admin
    await repeated(fleet, fault, address, call, done)
    await has_left(launcher, leaver, case, started)


@case_of("ClusterService.RestartWorkers")
async def restart(launcher: FleetLauncher, case: Case, fault: FaultRecord) -> None:
    fleet, started = launcher.fleet, launcher.started
    leaver = await busy_worker(launcher, case)
    fault.victims |= {leaver.worker_id}

    def call(channel: grpc.aio.Channel) -> Awaitable[Any]:
        wish = cluster.pb.RestartWorkersRequest(names=[leaver.worker_id])
        return cluster.ClusterServiceStub(channel).RestartWorkers(wish)

    async def done() -> bool:
        return leaver.worker_id in await fleet.registry.restarts()

    answer = await repeated(fleet, fault, fleet.router.endpoints.admin, call, done)
    assert list(answer.worker_ids) == [leaver.worker_id]
    await has_left(launcher, leaver, case, started)
    # The actuator forgets the request at a poll that no longer finds the worker.
    async with asyncio.timeout(30):
        while await fleet.registry.restarts():
            await asyncio.sleep(0.01)


@case_of("ClusterService.SetPoolSize")
async def resize(launcher: FleetLauncher, case: Case, fault: FaultRecord) -> None:
    fleet, started = launcher.fleet, launcher.started
    fault.victims |= {one.worker_id for one in fleet.pool("prefill")}

    def call(channel: grpc.aio.Channel) -> Awaitable[Any]:
        return cluster.ClusterServiceStub(channel).SetPoolSize(
            cluster.pb.SetPoolSizeRequest(prefill=3)
        )

    async def done() -> bool:
        return (await fleet.registry.desired())["prefill"] == 3

    assert (await repeated(fleet, fault, fleet.router.endpoints.admin, call, done)).prefill == 3
    await launcher.are(prefill=3)
    assert launcher.started == started + 1
    await launcher.resize(prefill=2)


# What serves requests


@case_of("InferenceService.Generate")
async def generate(launcher: FleetLauncher, case: Case, fault: FaultRecord) -> None:
    """The client has not one token when its connection breaks. It calls again when the router has
    noticed that.
    """
    fleet, router = launcher.fleet, launcher.fleet.router
    async with (
        losing(fleet, router.endpoints.grpc) as (way, channel),
        proxy_to(router.endpoints.grpc) as gate,
        fleet.client_channel(gate.address) as second,
    ):
        gate.passes["up"].clear()
        routers = tuple(replace(router, channel=one) for one in (channel, second))
        asked = fleet.ask(case, "row-14!tell@token:5", PROMPT, routers=routers)
        await fleet.reached(asked.history.request_id, "token:5")
        await fleet.until(lambda: way.lost >= TELLS, "tokens were lost")
        assert not asked.num_tokens
        way.reset()
        fault.evidence.append(
            Evidence(time.monotonic(), f"{way.lost} bytes of an answer were lost")
        )
        async with asyncio.timeout(30):
            while (await router.status()).router.running:
                await asyncio.sleep(0.01)
        gate.heal()
        history = await asked.ended()
    assert history.end.status == "length"


@case_of("KvTransferService.Push")
async def push(launcher: FleetLauncher, case: Case, fault: FaultRecord) -> None:
    """The receipt is lost, and the prefill worker asks for it again: the request is the decode
    worker's, once.
    """
    fleet = launcher.fleet
    asked = fleet.ask(case, "row-14!hold@committing!tell@committed", LONG)
    name = asked.history.request_id
    decode = await fleet.reached(name, "committing")
    decode.handoffs.loses.add("down")
    fleet.let_go(decode)
    await fleet.reached(name, "committed")
    await fleet.until(lambda: decode.handoffs.lost, "the receipt is lost")
    decode.handoffs.reset()
    decode.handoffs.heal()
    fault.evidence.append(
        Evidence(time.monotonic(), f"{decode.handoffs.lost} bytes of a receipt were lost")
    )
    history = await asked.ended()
    assert [(one.path, one.outcome) for one in history.attempts] == [("disaggregated", "finished")]


# A router's commands. Their answers come on the session that they came on, and are lost with it


def spec(name: str, token_ids: tuple[int, ...] = SHORT) -> SequenceSpec:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, seed=3, ignore_eos=True)
    return SequenceSpec(name, 0, token_ids, len(token_ids), params)


class Session:
    """A router's end of one."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = worker.WorkerServiceStub(channel).Session()

    async def say(self, *commands: Command | worker.Hello) -> Session:
        for command in commands:
            await self._call.write(worker.command_to_proto(command))
        return self

    def leave(self) -> None:
        self._call.cancel()

    async def hear(self, kind: type[T]) -> T:
        """The next event of that kind; those before are passed over."""
        while (message := await self._call.read()) is not grpc.aio.EOF:
            if isinstance(event := worker.event_from_proto(message), kind):
                return event
        raise AssertionError(f"the session ended without {kind.__name__}")

    async def answer(self) -> list[int]:
        """Indices of all tokens that come."""
        indices: list[int] = []
        while True:
            for one in (await self.hear(TokenBatch)).sequences:
                indices += range(one.index, one.index + len(one.token_ids))
                if one.finish_reason is not None:
                    return indices


HELLO = worker.Hello("the-test")


@case_of("WorkerService.Session.hello")
async def hello(launcher: FleetLauncher, case: Case, fault: FaultRecord) -> None:
    decode = launcher.fleet.pool("decode")[0]

    async def call(channel: grpc.aio.Channel) -> worker.Welcome:
        return await (await Session(channel).say(HELLO)).hear(worker.Welcome)

    welcome = await repeated(launcher.fleet, fault, decode.address, call)
    assert (welcome.worker_id, welcome.epoch) == (decode.worker_id, (await decode.sample()).epoch)


@case_of("WorkerService.Session.reserve")
async def reserve(launcher: FleetLauncher, case: Case, fault: FaultRecord) -> None:
    decode = launcher.fleet.pool("decode")[0]

    async def call(channel: grpc.aio.Channel) -> int:
        session = await Session(channel).say(
            HELLO, Reserve(spec("row-14-reserve"), LEASE_S, "nobody")
        )
        await session.hear(Reserved)
        return await leases()

    async def leases() -> int:
        return (await decode.sample()).leases

    async def done() -> bool:
        return await leases() == 1

    async def over() -> bool:
        return await leases() == 0

    assert await repeated(launcher.fleet, fault, decode.address, call, done, over) == 1


@case_of("WorkerService.Session.run_local")
async def run_local(launcher: FleetLauncher, case: Case, fault: FaultRecord) -> None:
    decode = launcher.fleet.pool("decode")[0]

    async def call(channel: grpc.aio.Channel) -> list[int]:
        return await (await Session(channel).say(HELLO, RunLocal(spec("row-14-local")))).answer()

    async def over() -> bool:
        return (await decode.sample()).at_rest

    assert await repeated(launcher.fleet, fault, decode.address, call, over=over) == list(
        range(MAX_TOKENS)
    )


@case_of("WorkerService.Session.prefill")
async def prefill(launcher: FleetLauncher, case: Case, fault: FaultRecord) -> None:
    """The second time the decode worker has the request already, and goes on with it as if nothing
    had come.
    """
    fleet, one = launcher.fleet, spec("row-14-prefill", OTHER)
    sender, decode = fleet.pool("prefill")[0], fleet.pool("decode")[0]
    assert decode.channel is not None
    keeper = await Session(decode.channel).say(HELLO, Reserve(one, LEASE_S, sender.worker_id))
    target = replace((await keeper.hear(Reserved)).target, transport="grpc")

    async def call(channel: grpc.aio.Channel) -> HandedOff:
        return await (await Session(channel).say(HELLO, Prefill(one, target))).hear(HandedOff)

    async def done() -> bool:
        return (await decode.sample()).leases == 0

    async def over() -> bool:
        return (await sender.sample()).at_rest

    handoff = (await repeated(fleet, fault, sender.address, call, done, over)).handoff
    assert handoff.blocks == target.num_blocks
    assert await keeper.answer() == list(range(1, MAX_TOKENS))


@case_of("WorkerService.Session.renew", "WorkerService.Session.abort")
async def renew_or_abort(launcher: FleetLauncher, case: Case, fault: FaultRecord) -> None:
    """These have no answer that could be lost. They come twice on one session."""
    decode = launcher.fleet.pool("decode")[0]
    assert decode.channel is not None
    session = await Session(decode.channel).say(
        HELLO, Reserve(spec("row-14-twice"), LEASE_S, "nobody")
    )
    lease_id = (await session.hear(Reserved)).target.lease_id
    aborts = "abort" in fault.name
    command = Abort("row-14-twice", 0) if aborts else Renew((lease_id,), LEASE_S)
    await session.say(command, command, Reserve(spec("row-14-after"), LEASE_S, "nobody"))
    await session.hear(Reserved)  # so both were taken
    fault.evidence.append(Evidence(time.monotonic(), f"{command} was sent twice"))
    assert (await decode.sample()).leases == (1 if aborts else 2)
    session.leave()
