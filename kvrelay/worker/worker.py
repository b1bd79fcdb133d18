"""A worker of either pool: takes commands, runs steps, sends events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from kv_transfer.blocks.block_copy import without_kernel
from kv_transfer.prefix_export import PrefixExport
from kvrelay.engine.sampling.matcher import Matcher
from kvrelay.engine.sampling.sampler import Sampled
from kvrelay.errors import Code, InvalidArgument, KvRelayError
from kvrelay.protocol_version import KV_INDEX
from kvrelay.types.requests import SequenceSpec
from kvrelay.types.workers import WorkerInfo, WorkerLoad, WorkerState
from kvrelay.worker.cache_feed import CacheFeeds
from kvrelay.worker.context import Key, WorkerContext
from kvrelay.worker.drain import Drain
from kvrelay.worker.guided_starts import GuidedStarts
from kvrelay.worker.heartbeat import Heartbeat
from kvrelay.worker.sequence import Work
from kvrelay.worker.sequence_check import sequence_flaw
from kvrelay.worker.session import RouterSession
from kvrelay.worker.stage import BuildStage, Start
from kvrelay.worker.steps.meter import Meter
from kvrelay.worker.steps.step_tokens import append_tokens
from kvrelay.worker_messages import (
    DRAINING,
    SEQUENCE_FAULT,
    Abort,
    Command,
    Failed,
    Prefill,
    Refused,
    Renew,
    Reserve,
    ResyncCache,
    RunLocal,
    SequenceTokens,
    TokenBatch,
)

HOUSEKEEPING_S = 0.1


class Worker:
    """Owns the stage and the step loop; lives on one event loop.

    A sequence is known by its key (request id, attempt) from the command that brought it until its
    last event. A repeated command runs once.
    """

    def __init__(self, context: WorkerContext, build_stage: BuildStage) -> None:
        self.context = context
        self.stage = build_stage(context)
        self.prefix_export = PrefixExport(
            context.cache, context.sender, context.identity.epoch, context.work.set
        )
        findable = self.stage.findable or context.cache.pool
        self.cache_feeds = CacheFeeds(findable, context.clock)
        # Set when the state may have changed.
        self.state_changed = asyncio.Event()
        self._steps = self.stage.steps(self)
        self._meter = Meter(context.clock)
        self._guided_starts = GuidedStarts(context.runner)
        self.heartbeat = Heartbeat(context, self._meter)
        self._drain = Drain(context.clock)

    @property
    def state(self) -> WorkerState:
        """The lifecycle state: starting ─▶ ready ─▶ draining. Each of them can change to stuck, the
        last state before the process ends.

        The worker is ready after the engine has run its warm-up steps, and takes new answers only
        while it is ready.
        """
        if self.context.engine.hung:
            return "stuck"
        if self._drain.begun:
            return "draining"
        return "ready" if self.context.engine.proven else "starting"

    @property
    def grant_key(self) -> bytes:
        """The grant key: routers sign with it which workers may fetch from this worker's prefix
        cache.
        """
        return self.prefix_export.key

    # Commands

    def handle(self, command: Command, session: RouterSession) -> None:
        """Runs a router's command. Answers go through the session. Raises KvRelayError for a
        command of the other pool.
        """
        match command:
            case Abort(request_id, attempt):
                key = request_id, attempt
                if self._may_use(key, session):
                    self._abort(key)
            case Renew():
                self._check_pool(command)
                self.stage.renew(command)
            case ResyncCache():
                self.cache_feeds.resync(session)
            case Reserve() | Prefill() | RunLocal():
                self._start(command, session)

    def _start(self, command: Start, session: RouterSession) -> None:
        key = command.spec.key
        if not self._may_use(key, session):
            text = f"request id {key[0]!r} is used by a request of another router"
            session.send(Failed(*key, Code.FAILED_PRECONDITION, text))
            return
        self._check_pool(command)
        if key in self.context.sessions:
            self.stage.repeat(key, session)
        elif self._can_run(command.spec, session):
            if command.spec.sampling.guidance is None:
                self.stage.start(command, session, None)
            else:
                self._start_guided(command, session)

    def _start_guided(self, command: Start, session: RouterSession) -> None:
        """Starts the sequence when its guidance is compiled, if it can still run then."""
        key = command.spec.key
        # From now on the attempt can be aborted.
        self.context.sessions[key] = session

        def start(matcher: Matcher) -> None:
            del self.context.sessions[key]
            if self._can_run(command.spec, session):
                self.stage.start(command, session, matcher)

        def fail(error: KvRelayError) -> None:
            self.context.sessions.pop(key, None)
            session.send(Failed(*key, error.code, error.message))

        self._guided_starts.add(command.spec, start, fail)

    def _may_use(self, key: Key, session: RouterSession) -> bool:
        """Whether no other router has an attempt with this key."""
        return self.context.sessions.get(key, session) is session

    def _check_pool(self, command: Command) -> None:
        if not isinstance(command, self.stage.commands):
            pool, name = self.context.identity.pool, type(command).__name__
            raise KvRelayError(f"a {pool} worker does not accept {name}")

    def _can_run(self, spec: SequenceSpec, session: RouterSession) -> bool:
        """True if the sequence can run here now. Otherwise sends the router the reason."""
        runner = self.context.runner
        if flaw := sequence_flaw(spec, runner.max_model_len, runner.vocab_size):
            session.send(Failed(*spec.key, Code.INVALID_ARGUMENT, flaw))
            return False
        if spec.adapter and not runner.adapters.serves(spec.adapter):
            # Another worker may have it. The base model must not answer in its place.
            session.send(Refused(*spec.key, "adapter"))
            return False
        if spec.deadline_s is not None and spec.deadline_s <= 0:
            text = (
                "the deadline had passed when the request arrived at "
                f"{self.context.identity.worker_id}"
            )
            session.send(Failed(*spec.key, Code.DEADLINE_EXCEEDED, text))
            return False
        state = self.state
        continues = state == "draining" and spec.num_emitted > 0 and not self._drain.over
        if state != "ready" and not continues:
            session.send(Refused(*spec.key, state))
            return False
        return True

    def session_began(self, session: RouterSession) -> None:
        """Begins to tell the router which blocks the prefix cache holds, if it understands that."""
        if KV_INDEX in session.protocol.features and KV_INDEX not in self.stage.lacks:
            self.cache_feeds.open(session)

    # The end of a sequence

    def session_ended(self, session: RouterSession) -> None:
        """Aborts all sequences of a router whose session has ended."""
        self.cache_feeds.close(session)
        sessions = self.context.sessions
        for key in [key for key, owner in sessions.items() if owner is session]:
            self._abort(key)

    def _abort(self, key: Key) -> None:
        self._guided_starts.cancel(key)
        self.stage.abort(key)
        if self.context.sessions.pop(key, None) is not None:
            self._drain.abandoned()

    def _fail(self, key: Key, code: Code, message: str) -> None:
        self._guided_starts.cancel(key)
        self.stage.abort(key)
        self.context.fail(key, code, message)

    def drain(self, grace_s: float) -> None:
        """Stops taking new answers. After `grace_s` seconds the remaining sequences are handed
        back. If called again, the earlier deadline holds.
        """
        self._drain.begin(grace_s)
        self.state_changed.set()

    async def emptied(self) -> None:
        """Returns when nothing runs, waits or is leased here."""
        # No event tells of every change of the load.
        while not self._load().empty:  # noqa: ASYNC110
            await asyncio.sleep(HOUSEKEEPING_S)

    async def flush(self) -> None:
        """Stores the cached blocks in the tiers, so that they survive the worker. Takes some
        seconds at most.
        """
        if self.context.tiers is not None:
            await self.context.tiers.flush()

    def keep_house(self, now: float) -> None:
        """Fails the sequences past their deadline, and all sequences once the drain grace is over.
        Called before each step, and every HOUSEKEEPING_S.
        """
        sessions = self.context.sessions
        text = f"the deadline passed on {self.context.identity.worker_id}"
        for key in [
            sequence.spec.key for sequence in self.stage.sequences() if now >= sequence.deadline
        ]:
            if key in sessions:
                self._fail(key, Code.DEADLINE_EXCEEDED, text)
        if self._drain.over:
            for key in list(sessions):
                self._fail(key, Code.UNAVAILABLE, DRAINING)
        self.stage.inbound.receiver.keep_house(now)
        if self.context.tiers is not None:
            self.context.tiers.keep_house()
        self.stage.keep_house(now)

    # Steps

    def stored(self, batch: list[Work], layers: int) -> None:
        """Called when the first `layers` layers have stored the running step's KV, to send it."""
        self.stage.stored(batch, layers)

    def report(self, batch: list[Work], sampled: SequenceOf[SequenceOf[Sampled]]) -> None:
        """Sends each router the tokens of its sequences, in one message per router."""
        outgoing: dict[RouterSession, list[SequenceTokens]] = {}
        for work, draws in zip(batch, sampled, strict=True):
            accepted = max(0, len(draws) - 1) if work.draft else 0
            self._meter.count(work.num_tokens + accepted)
            self._meter.drafted(len(work.draft), accepted)
            if work.sequence.ended:
                continue
            tokens = None
            if draws:
                tokens = append_tokens(work.sequence, draws, self.context)
                session = self.context.sessions[work.sequence.spec.key]
                outgoing.setdefault(session, []).append(tokens)
            self._computed(work, tokens)
        if any(_ends_prompt_or_answer(one) for items in outgoing.values() for one in items):
            # The router places the next turn of the conversation by what it knows then.
            self.cache_feeds.flush()
        for session, items in outgoing.items():
            session.send(TokenBatch(tuple(items)))

    def _computed(self, work: Work, tokens: SequenceTokens | None) -> None:
        key = work.sequence.spec.key
        if tokens is not None and tokens.prefill is not None:
            self._meter.waited(tokens.prefill.queue_seconds)
            self.stage.prompt_computed(work.sequence, tokens.prefill)
        if tokens is not None and tokens.finish_reason is not None:
            self._abort(key)
            return
        try:
            self.stage.computed(work.sequence, tokens)
        except KvRelayError as error:
            self._fail(key, error.code, error.message)

    def report_failure(self, work: Work, error: Exception) -> None:
        """Ends the attempt and makes its blocks unfindable in the prefix cache, since their KV may
        have caused the failure.
        """
        sequence = work.sequence
        self.context.cache.withdraw(sequence.blocks)
        if sequence.ended:
            return
        if isinstance(error, InvalidArgument):
            self._fail(sequence.spec.key, error.code, error.message)
        else:
            text = f"{SEQUENCE_FAULT}: the model failed on token {len(sequence.tokens)}: {error}"
            self._fail(sequence.spec.key, Code.INTERNAL, text)

    # The life of the worker

    async def run(self) -> None:
        """Works until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_house())
                tasks.create_task(self._run_steps())
                tasks.create_task(self.cache_feeds.run())
                if self.context.tiers is not None:
                    tasks.create_task(self.context.tiers.run())
        finally:
            self.context.engine.shutdown()

    async def _run_steps(self) -> None:
        # On a new machine this compiles the kernel that copies blocks: no hand-off waits for that.
        await asyncio.to_thread(without_kernel)
        await self.context.engine.warm_up()
        self.state_changed.set()
        await self._steps.run()

    async def _keep_house(self) -> None:
        while True:
            self.keep_house(self.context.clock.now())
            await asyncio.sleep(HOUSEKEEPING_S)

    async def close(self) -> None:
        """Ends all transfers and connections, then releases the KV memory. Call it when `run` has
        ended.
        """
        self._guided_starts.close()
        await self.stage.close()
        if self.context.tiers is not None:
            await self.context.tiers.close()
        if self.context.draft is not None:
            self.context.draft.close()
        self.context.runner.close()

    def info(self) -> WorkerInfo:
        """The current heartbeat. Checks the block accounting if the worker is idle and anything
        happened since the last check.
        """
        if self._steps.idle and self._steps.changed:
            self._steps.changed = False
            self.heartbeat.check_integrity(self.stage)
        return self.heartbeat.info(self.state, self._load(), self.stage.lacks)

    def _load(self) -> WorkerLoad:
        load = self.heartbeat.load(self.stage.load())
        if load.empty and self._drain.awaits_return:
            # The controller would stop a draining worker that is empty.
            return replace(load, leases=1)
        return load


def _ends_prompt_or_answer(tokens: SequenceTokens) -> bool:
    return tokens.prefill is not None or tokens.finish_reason is not None
