"""A worker process of a fleet, and what it says."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from faults import worker_process
from faults.history import WorkerSample
from support.tcp_proxy import TcpProxy

from kvrelay.process.child import bound_to_parent
from kvrelay.security.credentials import Credentials
from kvrelay.security.grpc_tls import worker_channel
from kvrelay.types.workers import PoolName
from kvrelay.wire.cluster import worker_status_from_proto
from kvrelay.wire.worker import WorkerServiceStub
from kvrelay.wire.worker import pb as worker_pb


@dataclass(frozen=True, slots=True)
class Reached:
    """A point of the protocol that a request came to; `said` is what else the worker had to
    tell.
    """

    request_id: str
    attempt: int
    point: str
    said: str = ""


@dataclass(eq=False)
class FleetWorker:
    """`routers` and `handoffs` are the proxies that these see in its place."""

    worker_id: str
    pool: PoolName
    routers: TcpProxy
    handoffs: TcpProxy
    credentials: Credentials | None = None  # of who asks it directly
    pid: int = 0
    status: int | None = None  # of waitpid, once it has ended
    reached: list[Reached] = field(default_factory=list)
    # What vLLM holds, since the worker was last asked.
    in_vllm: dict[str, int] | None = None
    address: str = ""
    channel: grpc.aio.Channel | None = None

    @property
    def alive(self) -> bool:
        return self.status is None

    @property
    def serves(self) -> bool:
        """Raises AssertionError if it ended instead."""
        assert self.alive, (
            f"{self.worker_id} ended with {self.status}; its log is beside the router's"
        )
        return self.channel is not None

    @property
    def frozen(self) -> bool:
        """Whether the kernel says that it is stopped."""
        return is_stopped(self.pid)

    def was_at(self, request_id: str, point: str) -> bool:
        return any((one.request_id, one.point) == (request_id, point) for one in self.reached)

    def said(self, request_id: str, point: str) -> str:
        """What it had to tell when the request came to that point."""
        return next(
            (
                one.said
                for one in self.reached
                if (one.request_id, one.point) == (request_id, point)
            ),
            "",
        )

    async def sample(self) -> WorkerSample:
        """Asked directly, past the proxies. Raises grpc.aio.AioRpcError if it does not answer."""
        assert self.channel is not None, "not started"
        answer = await WorkerServiceStub(self.channel).GetWorkerStatus(
            worker_pb.GetWorkerStatusRequest(), timeout=5.0
        )
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
            state=one.state,
            leases=load.leases,
        )

    async def hear(self, said: dict[str, Any]) -> None:
        """A line of worker_process.py."""
        if "address" in said:
            self.address = said["address"]
            self.channel = worker_channel(self.address, self.credentials)
            for way in (self.routers, self.handoffs):
                way.target.set_result(self.address)
        elif "ended" in said:
            self.status = said["ended"]
            if self.channel is not None:
                await self.channel.close()
        elif "in_vllm" in said:
            self.in_vllm = said["in_vllm"]
        elif "point" in said:
            self.reached.append(
                Reached(said["request_id"], said["attempt"], said["point"], said.get("said", ""))
            )
        else:
            self.pid = said["pid"]


class Forks:
    """The process that workers are forked from. Use as an async context manager."""

    def __init__(self) -> None:
        self.news = asyncio.Condition()  # whenever a worker has said something
        self._workers: list[FleetWorker] = []
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Forks:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = await asyncio.create_subprocess_exec(
            *bound_to_parent(sys.executable, worker_process.__file__ or ""),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        self._reading = asyncio.create_task(self._read(self._process))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        assert self._reading is not None
        self._process.kill()
        await self._process.wait()
        await self._reading

    def order(self, worker: FleetWorker, order: dict[str, object]) -> None:
        """Asks for the worker's process; see worker_process.py."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._workers.append(worker)
        number = len(self._workers) - 1
        self._process.stdin.write(json.dumps({"number": number, **order}).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            said = json.loads(line)
            if "number" in said:
                await self._workers[said["number"]].hear(said)
            async with self.news:
                self.news.notify_all()


def is_stopped(pid: int) -> bool:
    """Whether the kernel says so of the process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
