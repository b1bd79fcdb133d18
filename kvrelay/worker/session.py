"""Sessions: one bidirectional stream per router, commands in, events out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from kvrelay.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    KvRelayError,
    ResourceExhausted,
    Unavailable,
)
from kvrelay.process.stop_request import DRAIN_GRACE_S
from kvrelay.process.telemetry import get_logger
from kvrelay.protocol_version import Protocol as PeerProtocol
from kvrelay.protocol_version import ours, printable
from kvrelay.types.workers import WorkerInfo
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
from kvrelay.worker_messages import Abort, Command, Event, Failed

# Protocol anomalies of peers that are remembered, so that each is logged once.
_TOLD_KEPT = 256
# A router sends its Hello as soon as the session is open.
_HELLO_S = 10.0
_MAX_SILENT = 256

log = get_logger(__name__)


class RouterSession:
    """The event stream to one router. Events are delivered in order, or the session ends."""

    def __init__(self, router_id: str, protocol: PeerProtocol | None = None) -> None:
        """`protocol`: what the router speaks; None stands for protocol 0."""
        self.router_id = router_id
        self.protocol = PeerProtocol() if protocol is None else protocol
        # The reason for the end, unless the worker leaves in order.
        self.error: KvRelayError | None = None
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()

    @property
    def pending(self) -> int:
        """Events that gRPC has not taken yet."""
        return self._events.qsize()

    def send(self, event: Event) -> None:
        """Queues an event. Does not wait."""
        self._events.put_nowait(event)

    def end(self, error: KvRelayError | None = None) -> None:
        """Ends the stream after the queued events. The first error is kept."""
        self.error = self.error or error
        self._events.put_nowait(None)

    async def events(self) -> AsyncIterator[Event]:
        """Yields the queued events until the session ends."""
        while (event := await self._events.get()) is not None:
            yield event


class CommandHandler(Protocol):
    """The interface of a worker towards its sessions."""

    def handle(self, command: Command, session: RouterSession) -> None:
        """Runs a router's command. Answers go through the session."""

    def session_began(self, session: RouterSession) -> None:
        """A router has connected and gets its welcome as the first message."""

    def session_ended(self, session: RouterSession) -> None:
        """The router has disconnected: aborts its sequences."""

    def drain(self, grace_s: float) -> None:
        """Stops taking new work; hands the rest back after `grace_s` seconds."""

    def info(self) -> WorkerInfo:
        """The worker's current heartbeat."""

    @property
    def grant_key(self) -> bytes:
        """The grant key for prefix exports of this worker."""


class WorkerService(WorkerServiceServicer):
    """Serves `kvrelay.v1.WorkerService` for one worker."""

    def __init__(self, worker: CommandHandler) -> None:
        self._worker = worker
        self._sessions: set[RouterSession] = set()
        self._closed = False
        self._told: set[tuple[str, str]] = set()
        # Number of sessions that have sent nothing yet.
        self._silent = 0

    def close(self, error: KvRelayError | None = None) -> None:
        """Ends all sessions, each after its last event, and rejects new ones. Their routers turn to
        other workers.

        Without an error, the end implicates neither the worker nor the requests that it ran.
        """
        self._closed = True
        for session in self._sessions:
            session.end(error)

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.SessionResponse]:
        """Serves one router's session: Hello, then commands in and events out.

        Aborts the call with InvalidArgument without a Hello, FailedPrecondition for an incompatible
        protocol, and Unavailable if the worker is closing.
        """
        try:
            hello = await self._greeted(request_iterator)
            session = RouterSession(hello.router_id, hello.protocol)
            if self._closed:
                raise Unavailable("the worker is shutting down")
        except KvRelayError as error:
            await status.abort(context, error)
        self._sessions.add(session)
        reader = asyncio.create_task(self._read(request_iterator, session))
        try:
            info = self._worker.info()
            self._worker.session_began(session)
            yield event_to_proto(Welcome(info.worker_id, info.epoch, self._worker.grant_key))
            async for event in session.events():
                yield event_to_proto(event)
            if session.error is not None:
                await status.abort(context, session.error)
        finally:
            reader.cancel()
            self._sessions.discard(session)
            self._worker.session_ended(session)

    async def _greeted(self, requests: AsyncIterator[pb.SessionRequest]) -> Hello:
        """Waits for the Hello, unless too many sessions wait for theirs. Raises what `_hello`
        raises, and DeadlineExceeded or ResourceExhausted.
        """
        wait = _HELLO_S if self._silent < _MAX_SILENT else 0
        self._silent += 1
        try:
            async with asyncio.timeout(wait):
                return await self._hello(requests)
        except TimeoutError:
            if not wait:
                raise ResourceExhausted(
                    f"{_MAX_SILENT} sessions without a hello are open; retry later",
                    retry_after_s=_HELLO_S,
                ) from None
            raise DeadlineExceeded(f"no hello arrived within {wait:g} s") from None
        finally:
            self._silent -= 1

    async def _hello(self, requests: AsyncIterator[pb.SessionRequest]) -> Hello:
        """Returns the router's Hello. Raises InvalidArgument, and FailedPrecondition for an
        incompatible protocol.
        """
        async for message in requests:
            hello = command_from_proto(message)
            if isinstance(hello, Hello):
                try:
                    ours().check(hello.protocol, f"router {hello.router_id}")
                except KvRelayError as error:
                    self._tell_once("router_refused", hello.router_id, reason=error.message)
                    raise
                return hello
            break
        raise InvalidArgument("the first command of a session must be hello", field="command")

    async def _read(
        self, requests: AsyncIterator[pb.SessionRequest], session: RouterSession
    ) -> None:
        """Reads commands until the stream ends. An invalid command fails alone."""
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
                # A peer can send any values.
                except Exception as error:
                    log.exception("command_failed", router=printable(session.router_id))
                    self._refuse(message, session, Internal(f"the command failed: {error!r:.200}"))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            log.warning("session_broken", router=session.router_id, reason=str(error))
        # gRPC raises the parser's errors. What the command asked for is unknown.
        except Exception as error:  # noqa: BLE001
            reason = f"a command cannot be read: {error!s:.200}"
            log.warning("command_unreadable", router=printable(session.router_id), reason=reason)
            session.end(InvalidArgument(reason))
        finally:
            session.end()

    def _refuse(
        self, message: pb.SessionRequest, session: RouterSession, error: KvRelayError
    ) -> None:
        """Fails the sequence of the command, if the command is about a sequence."""
        key = command_key(message)
        self._tell_once("command_refused", session.router_id, reason=error.message)
        if key is not None and message.WhichOneof("command") != "abort":
            self._worker.handle(Abort(*key), session)
            session.send(Failed(*key, error.code, error.message))

    def _tell_once(self, event: str, router_id: str, **fields: object) -> None:
        """Logs a peer's protocol anomaly once, since it may recur with every message."""
        told = (event, router_id)
        if told not in self._told:
            if len(self._told) >= _TOLD_KEPT:
                self._told.clear()
            self._told.add(told)
            log.warning(event, router=printable(router_id), **fields)

    async def GetWorkerStatus(
        self, request: pb.GetWorkerStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetWorkerStatusResponse:
        """Returns the worker's current status."""
        return pb.GetWorkerStatusResponse(
            status=worker_status_to_proto(WorkerStatus.of(self._worker.info()))
        )

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainResponse:
        """Drains the worker. `grace_seconds` defaults to DRAIN_GRACE_S; a negative value is an
        InvalidArgument.
        """
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
