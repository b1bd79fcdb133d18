"""Sessions: one bidirectional stream per router, commands in, events out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from kvrelay.errors import InvalidArgument, KvRelayError, Unavailable
from kvrelay.messages import Command, Event
from kvrelay.stop_request import DRAIN_GRACE_S
from kvrelay.telemetry import get_logger
from kvrelay.types import WorkerInfo
from kvrelay.wire import status
from kvrelay.wire.cluster import WorkerStatus, worker_status_to_proto
from kvrelay.wire.worker import Hello, Welcome, WorkerServiceServicer, command_from_proto, event_to_proto, pb

log = get_logger(__name__)


class RouterSession:
    """The way back to one router. Events are delivered in order, or the session ends."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.error: KvRelayError | None = None  # why it ended, if the worker is not leaving in order
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()

    def send(self, event: Event) -> None:
        self._events.put_nowait(event)

    def end(self, error: KvRelayError | None = None) -> None:
        self.error = self.error or error
        self._events.put_nowait(None)

    async def events(self) -> AsyncIterator[Event]:
        while (event := await self._events.get()) is not None:
            yield event


class CommandHandler(Protocol):
    """A worker as its sessions see it."""

    def handle(self, command: Command, session: RouterSession) -> None: ...

    def session_ended(self, session: RouterSession) -> None: ...

    def drain(self, grace_s: float) -> None: ...

    def info(self) -> WorkerInfo: ...

    @property
    def lending_key(self) -> bytes: ...


class WorkerService(WorkerServiceServicer):
    """Serves `kvrelay.v1.WorkerService` for one worker."""

    def __init__(self, worker: CommandHandler) -> None:
        self._worker = worker
        self._sessions: set[RouterSession] = set()
        self._closed = False

    def close(self, error: KvRelayError | None = None) -> None:
        """Ends all sessions, each after its last event, and takes no more: their routers turn to other workers.

        Without an error that says nothing against the worker nor what it ran.
        """
        self._closed = True
        for session in self._sessions:
            session.end(error)

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.SessionResponse]:
        try:
            session = RouterSession(await self._hello(request_iterator))
            if self._closed:
                raise Unavailable("the worker is about to end")
        except KvRelayError as error:
            await status.abort(context, error)
        self._sessions.add(session)
        reader = asyncio.create_task(self._read(request_iterator, session))
        try:
            info = self._worker.info()
            yield event_to_proto(Welcome(info.worker_id, info.epoch, self._worker.lending_key))
            async for event in session.events():
                yield event_to_proto(event)
            if session.error is not None:
                await status.abort(context, session.error)
        finally:
            reader.cancel()
            self._sessions.discard(session)
            self._worker.session_ended(session)

    async def _hello(self, requests: AsyncIterator[pb.SessionRequest]) -> str:
        async for message in requests:
            hello = command_from_proto(message)
            if isinstance(hello, Hello):
                return hello.router_id
            break
        raise InvalidArgument("a session begins with hello", field="command")

    async def _read(self, requests: AsyncIterator[pb.SessionRequest], session: RouterSession) -> None:
        try:
            async for message in requests:
                command = command_from_proto(message)
                if isinstance(command, Hello):
                    raise InvalidArgument("hello comes once", field="command")
                self._worker.handle(command, session)
        except KvRelayError as error:
            log.warning("session broken", router=session.router_id, error=str(error))
            session.end(error)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            log.warning("session broken", router=session.router_id, error=str(error))
        finally:
            session.end()

    async def GetWorkerStatus(
        self, request: pb.GetWorkerStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetWorkerStatusResponse:
        return pb.GetWorkerStatusResponse(status=worker_status_to_proto(WorkerStatus.of(self._worker.info())))

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        grace_s = request.grace_seconds if request.HasField("grace_seconds") else DRAIN_GRACE_S
        if not grace_s >= 0:
            await status.abort(
                context, InvalidArgument(f"grace_seconds is {grace_s}; allowed is 0 or more", field="grace_seconds")
            )
        self._worker.drain(grace_s)
        return pb.DrainResponse()
