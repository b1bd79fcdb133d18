"""A session with one incarnation of a worker: commands and events over one gRPC stream."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import grpc

from kvrelay.errors import FailedPrecondition, KvRelayError, PermissionDenied, Unauthenticated
from kvrelay.process.telemetry import get_logger
from kvrelay.protocol_version import ours
from kvrelay.security.capability import FetchGrant, make_capability
from kvrelay.security.credentials import Credentials
from kvrelay.security.grpc_tls import worker_channel
from kvrelay.types.requests import SequenceSpec
from kvrelay.types.workers import WorkerInfo
from kvrelay.wire.encoding.fields import answered
from kvrelay.wire.status import error_from_rpc
from kvrelay.wire.worker import (
    Decoded,
    Hello,
    Welcome,
    WorkerServiceStub,
    command_to_proto,
    decode_events,
)
from kvrelay.worker_messages import Abort, Command, Event, PrefixSource

# Timeout for a worker's answer to the greeting.
WELCOME_S = 5.0
# Shortest and longest pause between two connection attempts.
RECONNECT_S = (0.1, 2.0)
# Pause after either side has rejected the other's protocol. Only an upgrade changes that.
REFUSED_S = 30.0
MAX_MESSAGE_BYTES = 16 * 2**20
# Keepalive detects a frozen or unreachable worker within time + timeout, even if the socket stays
# open.
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    # While tokens flow, gRPC's bandwidth ping replaces the keepalive ping. Its timeout is one
    # minute by default.
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A new incarnation must not reuse a connection or a backoff of an earlier incarnation.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

log = get_logger("router.sessions")


class SessionListener(Protocol):
    """Receives the events of a worker's session."""

    def worker_found(self, info: WorkerInfo) -> None:
        """Handles an established session."""
        ...

    def worker_lost(self, worker_id: str, expected: bool) -> None:
        """Handles the end of a session. `expected`: the worker ended the session itself, as it does
        on shutdown.
        """

    def worker_said(self, worker_id: str, event: Event) -> None:
        """Handles an event of the worker."""
        ...


class WorkerSession:
    """Reconnects until cancelled. Between `worker_found` and `worker_lost` it delivers all events
    in order.
    """

    def __init__(
        self,
        info: WorkerInfo,
        router_id: str,
        listener: SessionListener,
        credentials: Credentials | None = None,
    ) -> None:
        self.info = info
        # Reason why one side rejects the other; empty otherwise.
        self.refusal = ""
        # Grant key from the worker's welcome, while the session lasts.
        self._grant_key: bytes | None = None
        # True once ignored messages of this worker have been logged.
        self._odd_told = False
        self._credentials = credentials
        # Reason for the end of the last attempt, if one side does not trust the other.
        self._untrusted = ""
        self._router_id = router_id
        self._listener = listener
        self._outgoing: asyncio.Queue[Command] = asyncio.Queue()

    def send(self, command: Command) -> None:
        """Queues a command for the worker."""
        self._outgoing.put_nowait(command)

    def grant_fetch(
        self, source: PrefixSource, spec: SequenceSpec, borrower: WorkerInfo
    ) -> PrefixSource | None:
        """Returns the source, which is this worker, with a fetch grant for the borrower. None if no
        grant key is known.
        """
        if not self._grant_key:
            return None
        grant = FetchGrant(
            *spec.key,
            borrower=borrower.worker_id,
            address=borrower.address,
            lender=self.info.worker_id,
            epoch=self.info.epoch,
            tokens=source.cached_tokens,
        )
        return replace(source, capability=make_capability(self._grant_key, grant))

    async def run(self) -> None:
        """Connects again and again until cancelled."""
        pause = RECONNECT_S[0]
        while True:
            if await self._converse():
                pause = RECONNECT_S[0]
            await asyncio.sleep(REFUSED_S if self.refusal else pause)
            pause = min(2 * pause, RECONNECT_S[1])

    async def _converse(self) -> bool:
        """Runs one stream to its end. Returns whether the session was established."""
        worker_id = self.info.worker_id
        self._outgoing = asyncio.Queue()
        found = expected = False
        async with worker_channel(self.info.address, self._credentials, CHANNEL_OPTIONS) as channel:
            call = WorkerServiceStub(channel).Session()
            sending = asyncio.create_task(self._send(call, self._outgoing))
            try:
                async with asyncio.timeout(WELCOME_S):
                    welcome = next(iter((await self._read(call) or Decoded()).events), None)
                if not isinstance(welcome, Welcome) or (welcome.worker_id, welcome.epoch) != (
                    worker_id,
                    self.info.epoch,
                ):
                    log.warning(
                        "session_wrong_worker",
                        worker=worker_id,
                        epoch=self.info.epoch,
                        answer=repr(welcome),
                    )
                    return False
                ours().check(welcome.protocol, worker_id)
                found = True
                self.refusal = ""
                self._grant_key = welcome.lending_key
                self._listener.worker_found(self.info)
                while (decoded := await self._read(call)) is not None:
                    self._deliver(worker_id, decoded)
                expected = True
            except (grpc.aio.AioRpcError, TimeoutError, KvRelayError) as error:
                self._tell(error, found)
            finally:
                call.cancel()
                sending.cancel()
                self._grant_key = None
                if found:
                    self._listener.worker_lost(worker_id, expected)
        return found

    def _deliver(self, worker_id: str, decoded: Decoded) -> None:
        """Delivers events. A malformed entry fails only its own sequence."""
        for failed in decoded.malformed:
            # The worker does not know that the sequence has failed.
            self.send(Abort(failed.request_id, failed.attempt))
            self._listener.worker_said(worker_id, failed)
        known = [event for event in decoded.events if not isinstance(event, Welcome)]
        for event in known:
            self._listener.worker_said(worker_id, event)
        if not known and not decoded.malformed and not self._odd_told:
            self._odd_told = True
            log.warning("event_ignored", worker=worker_id, known=bool(decoded.events))

    def _tell(self, error: Exception, found: bool) -> None:
        """Logs the end of a session. A missing worker is common: it is starting, or it is gone and
        its entry has not expired. A lack of trust is logged as a warning.
        """
        known = error_from_rpc(error) if isinstance(error, grpc.aio.AioRpcError) else error
        reason = str(known)
        if isinstance(known, FailedPrecondition) and not found:
            if known.message != self.refusal:
                log.warning("worker_refused", worker=self.info.worker_id, reason=known.message)
            self.refusal = known.message
            return
        untrusted = isinstance(known, PermissionDenied | Unauthenticated) or "TLS" in reason
        if untrusted and reason == self._untrusted:
            return
        self._untrusted = reason if untrusted else ""
        say = log.warning if untrusted else log.info if found else log.debug
        say("session_failed", worker=self.info.worker_id, epoch=self.info.epoch, reason=reason)

    async def _read(self, call: grpc.aio.StreamStreamCall) -> Decoded | None:
        message = await call.read()
        if message is grpc.aio.EOF:
            return None
        return decode_events(answered(message, self.info.worker_id))

    async def _send(
        self, call: grpc.aio.StreamStreamCall, outgoing: asyncio.Queue[Command]
    ) -> None:
        """Sends queued commands until the call ends. The reader reports the reason."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(command_to_proto(Hello(self._router_id)))
            while True:
                await call.write(command_to_proto(await outgoing.get()))
