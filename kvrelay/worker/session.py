"""Sessions: one bidirectional stream per router, commands in, events out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from kvrelay.errors import Internal, InvalidArgument, KvRelayError, Unavailable
from kvrelay.messages import Abort, Command, Event, Failed
from kvrelay.process.stop_request import DRAIN_GRACE_S
from kvrelay.process.telemetry import get_logger
from kvrelay.protocol import ours, printable
from kvrelay.types import WorkerInfo
from kvrelay.wire import status
from kvrelay.wire.cluster import WorkerStatus, worker_status_to_proto
from kvrelay.wire.worker import (
    Hello,
    Welcome,
    WorkerServiceServicer,
    command_from_proto,
    command_key,
    event_to_proto,
    pb,
)

_TOLD_KEPT = 256  # oddities of peers that are logged once

log = get_logger(__name__)


class RouterSession:
    """The way back to one router. Events are delivered in order, or the session ends."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        # Why it ended, if the worker is not leaving in order
        self.error: KvRelayError | None = None
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
        self._told: set[tuple[str, str]] = set()

    def close(self, error: KvRelayError | None = None) -> None:
        """Ends all sessions, each after its last event, and takes no more: their routers turn to
        other workers.

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
        """The router's id. Raises InvalidArgument, and FailedPrecondition for a protocol that does
        not fit.
        """
        async for message in requests:
            hello = command_from_proto(message)
            if isinstance(hello, Hello):
                try:
                    ours().check(hello.protocol, f"router {hello.router_id}")
                except KvRelayError as error:
                    self._tell_once("router_refused", hello.router_id, reason=error.message)
                    raise
                return hello.router_id
            break
        raise InvalidArgument("a session begins with hello", field="command")

    async def _read(
        self, requests: AsyncIterator[pb.SessionRequest], session: RouterSession
    ) -> None:
        """Until the router's last command. What is wrong with one of them is that command's
        alone.
        """
        try:
            async for message in requests:
                try:
                    command = command_from_proto(message)
                    if command is None or isinstance(command, Hello):
                        self._tell_once(
                            "command_ignored", session.router_id, known=command is not None
                        )
                    else:
                        self._worker.handle(command, session)
                except KvRelayError as error:
                    self._refuse(message, session, error)
                except Exception as error:  # whatever values a peer can send
                    log.exception("command_failed", router=printable(session.router_id))
                    self._refuse(message, session, Internal(f"the command failed: {error!r:.200}"))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            log.warning("session_broken", router=session.router_id, error=str(error))
        finally:
            session.end()

    def _refuse(
        self, message: pb.SessionRequest, session: RouterSession, error: KvRelayError
    ) -> None:
        """Fails the sequence that the command is about, if it is about one."""
        key = command_key(message)
        self._tell_once("command_refused", session.router_id, reason=error.message)
        if key is not None and message.WhichOneof("command") != "abort":
            self._worker.handle(Abort(*key), session)
            session.send(Failed(*key, error.code, error.message))

    def _tell_once(self, event: str, router_id: str, **fields: object) -> None:
        """Logs a peer's oddity when it is first seen: it may come with each message."""
        told = (event, router_id)
        if told not in self._told:
            if len(self._told) >= _TOLD_KEPT:
                self._told.clear()
            self._told.add(told)
            log.warning(event, router=printable(router_id), **fields)

    async def GetWorkerStatus(
        self, request: pb.GetWorkerStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetWorkerStatusResponse:
        return pb.GetWorkerStatusResponse(
            status=worker_status_to_proto(WorkerStatus.of(self._worker.info()))
        )

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainResponse:
        grace_s = request.grace_seconds if request.HasField("grace_seconds") else DRAIN_GRACE_S
        if not grace_s >= 0:
            await status.abort(
                context,
                InvalidArgument(
                    f"grace_seconds is {grace_s}; allowed is 0 or more", field="grace_seconds"
                ),
            )
        self._worker.drain(grace_s)
        return pb.DrainResponse()
