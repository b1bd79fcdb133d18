"""The driver: runs the dispatcher with the real clock, real workers and the registry."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from kvrelay.clock import Clock
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.kvcache.block_hashes import HASH_BYTES
from kvrelay.errors import Cancelled, KvRelayError, Unavailable
from kvrelay.process.telemetry import get_logger
from kvrelay.security.credentials import Credentials
from kvrelay.tenants import Tenant
from kvrelay.types.workers import PoolName, WorkerInfo, WorkerState
from kvrelay.worker_messages import Command, Event, Prefill
from router.core.compatibility import misfit
from router.core.dispatcher import Dispatcher
from router.core.effects import Effect, Emit, End, Notice, Preempted, Send
from router.core.lifecycle import RETRY_AFTER_S
from router.core.request import Request
from router.runtime.sessions import WorkerSession
from router.runtime.stream import Stream, TokenSink
from router.runtime.worker_directory import RouterRegistry
from router.runtime.write_scheduler import WriteScheduler

POLL_S = 0.5
# Shortest interval between two polls, however often the registry changes.
LEAST_POLL_S = 0.02
TICK_S = 0.05
# Interval between two looks for a prefill worker that is about to need a prompt, if prompts wait.
LOOK_S = 0.01
# Number of ended streams that are kept for observers. They hold their prompts' tokens.
RECENT = 60
# A worker may be absent from the registry for this long. After a flush its entry returns with its
# next heartbeat.
FORGET_S = 5.0
# A request for an empty decode pool counts as waiting for this long, even if it has ended.
WANTED_S = 5.0

log = get_logger("router.driver")


class Observer(Protocol):
    """Receives request events, for metrics."""

    def tokens(self, stream: Stream, count: int, previous: float | None, now: float) -> None:
        """Handles `count` new tokens; `previous` is the time of the tokens before them."""
        ...

    def ended(self, stream: Stream) -> None:
        """Handles the end of a request."""
        ...


class Driver:
    """Owns the dispatcher, the sessions and the streams. It runs on a single event loop."""

    def __init__(
        self,
        config: ClusterConfig,
        registry: RouterRegistry,
        router_id: str,
        clock: Clock,
        observer: Observer,
        credentials: Credentials | None = None,
        misfit: Callable[[WorkerInfo], str] = misfit,
        *,
        hash_bytes: int = HASH_BYTES,
        changed: asyncio.Event | None = None,
        sleeps: bool = False,
    ) -> None:
        """`misfit` returns why a worker must not get requests in any state; see
        `router.core.compatibility`. `changed` is set when `state` may have changed. `sleeps`:
        the decode pool may be empty until a request waits.
        """
        self.dispatcher = Dispatcher(config, hash_bytes=hash_bytes)
        self.draining = False
        self.sleeps = sleeps
        self.registry_state = "ok"
        # Workers by the last poll of the registry, and workers with a live session.
        self.known: tuple[WorkerInfo, ...] = ()
        self._misfit = misfit
        # Incompatible workers in the registry.
        self._misfits: dict[str, str] = {}
        self._wanted: Mapping[PoolName, int] = {
            "prefill": config.prefill.replicas,
            "decode": config.decode.replicas,
        }
        self._desired: Mapping[PoolName, int] = {}
        self._wanted_until = float("-inf")
        # Set when a request has found the decode pool empty.
        self.knocked = asyncio.Event()
        # Whether the configured number of workers has been ready once.
        self.started = False
        self._registry = registry
        self._router_id = router_id
        self._clock = clock
        self._observer = observer
        self._credentials = credentials
        self._sessions: dict[str, tuple[WorkerSession, asyncio.Task[None]]] = {}
        self._last_seen: dict[str, float] = {}
        self._streams: dict[str, Stream] = {}
        self._write_scheduler = WriteScheduler()
        # Ended streams, oldest first, for an observer that removes them.
        self.recent: deque[Stream] = deque(maxlen=RECENT)
        self._soon = asyncio.Event()
        # Set when `state` may have changed.
        self.changed = changed or asyncio.Event()
        # Set while there are requests.
        self._work = asyncio.Event()
        # Set while there are no requests.
        self._idle = asyncio.Event()
        self._idle.set()

    # Requests

    def newest(self) -> Iterator[Stream]:
        """Returns the streams that have not ended, newest first."""
        return reversed(self._streams.values())

    def check_open(self, tenant: Tenant, priority: int, requests: int = 1) -> None:
        """Raises Unavailable while draining, or ResourceExhausted if a full queue would reject one
        of so many requests of this tenant and priority.
        """
        self._check_not_draining()
        self.dispatcher.check_room(tenant, priority, requests)

    def _check_not_draining(self) -> None:
        if self.draining:
            raise Unavailable(
                "the router is draining; send the request to another router",
                retry_after_s=RETRY_AFTER_S,
            )

    def submit(self, request: Request, text: TokenSink) -> Stream:
        """Submits a request and returns its stream. `text` has consumed request.resume. Raises
        Unavailable while draining, and the errors of Dispatcher.submit.
        """
        self._check_not_draining()
        now = self._clock.now()
        if self.sleeps and not self.ready()["decode"]:
            self._wanted_until = now + WANTED_S
            self.knocked.set()
        life, effects = self.dispatcher.submit(request, now)
        self._streams[request.request_id] = stream = Stream(
            life, text, self._clock, self._write_scheduler
        )
        self._work.set()
        self._idle.clear()
        self._carry_out(effects, now)
        return stream

    def cancel(self, request_id: str) -> None:
        """Cancels the request everywhere, if it has not ended."""
        now = self._clock.now()
        error = Cancelled("the client cancelled the request")
        self._carry_out(self.dispatcher.cancel(request_id, error, now), now)

    def abandon(self, error: KvRelayError) -> None:
        """Ends all remaining requests with the error."""
        now = self._clock.now()
        for request_id in list(self._streams):
            self._carry_out(self.dispatcher.cancel(request_id, error, now), now)

    async def drained(self) -> None:
        """Starts draining: rejects new requests and waits until the last request has ended."""
        self.draining = True
        self.changed.set()
        await self._idle.wait()

    # Workers

    @property
    def state(self) -> WorkerState:
        """The router's state: `ready` if a new request can be served, if need be by a worker that
        starts for it, and the configured number of workers has been ready once; else `starting` or
        `draining`.
        """
        if self.draining:
            return "draining"
        return "ready" if self.started and (self.sleeps or self.ready()["decode"]) else "starting"

    @property
    def is_wanted(self) -> bool:
        """Whether a request has just found the decode pool empty. It may have ended: its deadline
        may be shorter than the start of a worker.
        """
        return self._clock.now() < self._wanted_until

    def ready(self) -> Mapping[PoolName, int]:
        """Returns the number of ready workers of each pool."""
        states = [one.pool for one in self.dispatcher.workers if one.state == "ready"]
        return {"prefill": states.count("prefill"), "decode": states.count("decode")}

    @property
    def compatible(self) -> tuple[WorkerInfo, ...]:
        """The known workers that this router may give work to."""
        refused = self.refused
        return tuple(one for one in self.known if one.worker_id not in refused)

    @property
    def refused(self) -> Mapping[str, str]:
        """Workers that are incompatible with this router, or that reject it, with the reasons."""
        refusals = {
            worker_id: one.refusal for worker_id, (one, _) in self._sessions.items() if one.refusal
        }
        return refusals | self._misfits

    def worker_found(self, info: WorkerInfo) -> None:
        """Handles a new session with a worker."""
        log.info(
            "worker_found",
            worker=info.worker_id,
            pool=info.pool,
            epoch=info.epoch,
            address=info.address,
        )
        now = self._clock.now()
        self._carry_out(self.dispatcher.worker_found(info, now), now)
        self._workers_changed()

    def worker_lost(self, worker_id: str, expected: bool) -> None:
        """Handles the end of a worker's session."""
        log.info("worker_lost", worker=worker_id)
        now = self._clock.now()
        self._carry_out(self.dispatcher.worker_lost(worker_id, now, expected), now)
        self._workers_changed()

    def _workers_changed(self) -> None:
        ready = self.ready()
        # The policy or an operator may have made a pool smaller than it is configured.
        self.started = self.started or all(
            ready[pool] >= min(number, self._desired.get(pool, number))
            for pool, number in self._wanted.items()
        )
        self.changed.set()

    def worker_said(self, worker_id: str, event: Event) -> None:
        """Handles a worker's event."""
        now = self._clock.now()
        self._carry_out(self.dispatcher.on_event(worker_id, event, now), now)

    # Loops

    async def run(self) -> None:
        """Runs until cancelled. Errors of workers and of the registry are handled; any other error
        ends it.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            while True:
                self._soon.clear()
                await self._poll(tasks)
                await asyncio.sleep(LEAST_POLL_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S - LEAST_POLL_S):
                        await self._soon.wait()

    def look_soon(self) -> None:
        """Requests an early poll, because the registry has changed."""
        self._soon.set()

    async def _tick(self) -> None:
        tick_at = 0.0
        while True:
            await self._work.wait()
            now = self._clock.now()
            if now >= tick_at:
                tick_at = now + TICK_S
                self._carry_out(self.dispatcher.tick(now), now)
            else:
                self._carry_out(self.dispatcher.pump(now), now)
            await asyncio.sleep(LOOK_S if self.dispatcher.prompts_wait else TICK_S)

    async def _poll(self, tasks: asyncio.TaskGroup) -> None:
        try:
            found = await self._registry.workers()
            if not self.started:
                self._desired = await self._registry.desired()
        except Unavailable as error:
            if self.registry_state == "ok":
                log.warning("registry_unavailable", reason=error.message)
            self.registry_state = error.message
            return
        self.registry_state = "ok"
        now = self._clock.now()
        # A worker with a live session is alive even without an entry: if Redis rejects writes, all
        # entries expire.
        named = {info.worker_id for info in found}
        silent = (info for info in self.dispatcher.workers if info.worker_id not in named)
        # The numbers of workers grow: prefill-9 comes before prefill-10.
        self.known = tuple(
            sorted((*found, *silent), key=lambda info: (len(info.worker_id), info.worker_id))
        )
        self._look_for_misfits(found)
        for info in self.known:
            if info.worker_id in self._misfits:
                self._close(info.worker_id)
                continue
            self._last_seen[info.worker_id] = now
            session = self._sessions.get(info.worker_id)
            if session is None or session[0].info.epoch != info.epoch:
                self._close(info.worker_id)
                opened = WorkerSession(info, self._router_id, self, self._credentials)
                self._sessions[info.worker_id] = opened, tasks.create_task(opened.run())
            else:
                session[0].info = info
        for worker_id in [one for one, seen in self._last_seen.items() if now - seen > FORGET_S]:
            del self._last_seen[worker_id]
            self._close(worker_id)
        self._carry_out(self.dispatcher.workers_changed(self.known, now), now)
        self._workers_changed()

    def _look_for_misfits(self, found: Iterable[WorkerInfo]) -> None:
        """Finds incompatible workers and logs each reason once."""
        misfits = {info.worker_id: reason for info in found if (reason := self._misfit(info))}
        for worker_id, reason in misfits.items():
            if self._misfits.get(worker_id) != reason:
                log.warning("worker_refused", worker=worker_id, reason=reason)
        self._misfits = misfits

    def _close(self, worker_id: str) -> None:
        session = self._sessions.pop(worker_id, None)
        if session is not None:
            # The cancelled session reports the loss before its successor can connect.
            session[1].cancel()

    def _carry_out(self, effects: list[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case Emit():
                    self._emit(effect, now)
                case Send(worker_id, command):
                    # Otherwise the worker's loss is about to be reported.
                    if worker_id in self._sessions:
                        session = self._sessions[worker_id][0]
                        session.send(self._with_leave_to_fetch(command, session.info))
                case Notice(worker_id, text):
                    log.warning("worker_health_changed", worker=worker_id, reason=text)
                case Preempted(request_id, worker_id, why):
                    log.info("request_preempted", request=request_id, worker=worker_id, reason=why)
                case End(request_id):
                    stream = self._streams.pop(request_id, None)
                    if stream is None:
                        # An error ended its submission.
                        continue
                    stream.end(effect, now)
                    self.recent.append(stream)
                    if not self._streams:
                        self._work.clear()
                        self._idle.set()
                    self._observer.ended(stream)

    def _with_leave_to_fetch(self, command: Command, borrower: WorkerInfo) -> Command:
        """Adds a fetch grant to a prefill's source. Without a grant the source is removed."""
        if not isinstance(command, Prefill) or command.source is None:
            return command
        lender = self._sessions.get(command.source.worker_id)
        source = (
            None
            if lender is None
            else lender[0].grant_fetch(command.source, command.spec, borrower)
        )
        return replace(command, source=source)

    def _emit(self, emit: Emit, now: float) -> None:
        stream = self._streams.get(emit.request_id)
        if stream is None:
            # An earlier token of the same batch completed a stop string.
            return
        count, previous = stream.num_tokens, stream.token_at
        more = stream.push(emit, now)
        self._observer.tokens(stream, stream.num_tokens - count, previous, now)
        if not more:
            self._carry_out(self.dispatcher.stop(emit.request_id, now), now)
