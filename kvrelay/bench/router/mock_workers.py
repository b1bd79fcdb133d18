"""Workers without an engine that implement the session protocol and emit tokens at a fixed
pace.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from kvrelay.types.requests import Handoff, PrefillTimings, SequenceSpec
from kvrelay.types.workers import PoolName, WorkerInfo
from kvrelay.wire.worker import (
    Welcome,
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
    command_from_proto,
    event_to_proto,
    pb,
)
from kvrelay.worker_messages import (
    Abort,
    Event,
    HandedOff,
    HandoffTarget,
    Prefill,
    Reserve,
    Reserved,
    RunLocal,
    SequenceTokens,
    TokenBatch,
)

_MODEL = "bench"
_BLOCK_SIZE = 16


@dataclass(slots=True)
class _Sequence:
    spec: SequenceSpec
    produced: int
    # Of the router that asked for it.
    outgoing: asyncio.Queue[Event]
    committed: bool = False


class AtOnceWorker(WorkerServiceServicer):
    """One worker of either pool. A prefill worker answers immediately.

    `token` is the token that each sequence emits in every step. `said` receives, for each request,
    the time.perf_counter time at which each token was emitted.
    """

    def __init__(
        self,
        worker_id: str,
        pool: PoolName,
        token: int,
        said: defaultdict[str, list[float]],
        peers: dict[str, AtOnceWorker],
    ) -> None:
        self._server = grpc.aio.server(
            options=[("grpc.http2.min_ping_interval_without_data_ms", 500)]
        )
        add_WorkerServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.info = WorkerInfo(
            worker_id=worker_id,
            pool=pool,
            epoch=1,
            state="ready",
            address=f"127.0.0.1:{port}",
            model_id=_MODEL,
            layout_hash=_MODEL,
            block_size=_BLOCK_SIZE,
            block_bytes=1,
            host_id=_MODEL,
            max_model_len=2**20,
        )
        self._token = token
        self._said = said
        self._peers = peers
        self._sequences: dict[tuple[str, int], _Sequence] = {}
        self._leases = 0
        peers[worker_id] = self

    async def start(self) -> None:
        """Starts the gRPC server."""
        await self._server.start()

    async def stop(self) -> None:
        """Stops the gRPC server without a grace period."""
        await self._server.stop(None)

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.SessionResponse]:
        """Serves one router session: welcomes the router, then sends events until the call ends."""
        await anext(request_iterator)
        yield event_to_proto(Welcome(self.info.worker_id, self.info.epoch))
        outgoing: asyncio.Queue[Event] = asyncio.Queue()
        reader = asyncio.create_task(self._obey(request_iterator, outgoing))
        try:
            while True:
                yield event_to_proto(await outgoing.get())
        finally:
            reader.cancel()

    def step(self) -> None:
        """Takes a step."""
        batches: defaultdict[asyncio.Queue[Event], list[SequenceTokens]] = defaultdict(list)
        for key, one in list(self._sequences.items()):
            if one.committed:
                batches[one.outgoing].append(token := self._next(one))
                if token.finish_reason is not None:
                    del self._sequences[key]
        for outgoing, tokens in batches.items():
            outgoing.put_nowait(TokenBatch(tuple(tokens)))

    def _next(self, sequence: _Sequence, timings: PrefillTimings | None = None) -> SequenceTokens:
        index = sequence.produced
        sequence.produced += 1
        spec = sequence.spec
        self._said[spec.request_id].append(time.perf_counter())
        last = sequence.produced >= spec.sampling.max_tokens
        return SequenceTokens(
            *spec.key,
            index,
            (self._token,),
            finish_reason="length" if last else None,
            prefill=timings,
        )

    async def _obey(
        self, requests: AsyncIterator[pb.SessionRequest], outgoing: asyncio.Queue[Event]
    ) -> None:
        async for message in requests:
            match command_from_proto(message):
                case Reserve(spec):
                    self._sequences[spec.key] = _Sequence(spec, spec.num_emitted + 1, outgoing)
                    self._leases += 1
                    outgoing.put_nowait(Reserved(*spec.key, self._target()))
                case RunLocal(spec):
                    self._sequences[spec.key] = _Sequence(
                        spec, spec.num_emitted, outgoing, committed=True
                    )
                case Prefill(spec, target):
                    first = self._next(
                        _Sequence(spec, spec.num_emitted, outgoing), PrefillTimings(0.0, 0.0, 0, 1)
                    )
                    outgoing.put_nowait(TokenBatch((first,)))
                    if first.finish_reason is None:
                        self._peers[target.worker_id]._sequences[spec.key].committed = True
                        outgoing.put_nowait(
                            HandedOff(*spec.key, Handoff("none", 1, 1, 1, 0, 0.0, 0.0))
                        )
                case Abort(request_id, attempt):
                    self._sequences.pop((request_id, attempt), None)

    def _target(self) -> HandoffTarget:
        info = self.info
        return HandoffTarget(
            info.worker_id,
            info.address,
            info.epoch,
            self._leases,
            1,
            1,
            0,
            info.layout_hash,
            info.host_id,
        )


async def keep_pace(step: Callable[[], None], interval_s: float, offset_s: float) -> None:
    """Takes a step every `interval_s`, starting after `offset_s`, until cancelled. Late steps are
    made up for.
    """
    due = time.perf_counter() + offset_s
    while True:
        await asyncio.sleep(due - time.perf_counter())
        step()
        due += interval_s
