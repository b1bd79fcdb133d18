"""The common base of prefill and decode workers."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from kvrelay.clock import Clock
from kvrelay.engine.kvcache.block_pool import IntegrityError
from kvrelay.engine.kvcache.prefix_cache import KvCache
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import Sampled
from kvrelay.errors import Code, InvalidArgument
from kvrelay.messages import (
    DRAINING,
    SEQUENCE_FAULT,
    Abort,
    Command,
    Failed,
    Prefill,
    Refused,
    Renew,
    Reserve,
    RunLocal,
    SequenceTokens,
    TokenBatch,
)
from kvrelay.protocol import ours
from kvrelay.sampling_limits import check_params, check_sizes
from kvrelay.types import (
    Claim,
    FinishReason,
    PoolName,
    SequenceSpec,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
)
from kvrelay.worker.meter import Meter, resident_bytes
from kvrelay.worker.sequence import Sequence, Work
from kvrelay.worker.session import RouterSession
from kvrelay.worker.step_loop import Scheduler, StepLoop

Key = tuple[str, int]
HOUSEKEEPING_S = 0.1


def _key(command: Command) -> Key | None:
    """The key of the command's sequence, or None if the command is not about a sequence."""
    match command:
        case Renew():
            return None
        case Abort(request_id, attempt):
            return request_id, attempt
        case Reserve(spec) | Prefill(spec) | RunLocal(spec):
            return spec.key


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies this worker. Its epoch is higher than that of any worker started earlier."""

    worker_id: str
    pool: PoolName
    epoch: int
    address: str
    host_id: str
    # The claim under which a controller started the worker.
    claim: Claim | None = None


class Worker(ABC):
    """Owns the block accounting, the scheduler and the step loop; lives on one event loop.

    A sequence is known by its key (request id, attempt) from the command that brought it until its
    last event. A repeated command runs once.
    """

    def __init__(
        self,
        identity: Identity,
        runner: ModelRunner,
        cache: KvCache,
        scheduler: Scheduler,
        clock: Clock,
    ) -> None:
        self.identity = identity
        self.runner = runner
        self.cache = cache
        self.clock = clock
        self.meter = Meter(clock)
        self.steps = StepLoop(scheduler, runner, self, clock)
        self.sessions: dict[Key, RouterSession] = {}
        # The host's report on the worker's certificate; part of the heartbeat.
        self.certificate_note = ""
        self._integrity_error = ""
        self._drain_by: float | None = None

    @property
    def state(self) -> WorkerState:
        """The lifecycle state: starting ─▶ ready ─▶ draining. Each of them can change to stuck, the
        last state before the process ends.

        The worker is ready after the engine has run its proving steps, and takes new work only
        while it is ready.
        """
        if self.steps.hung:
            return "stuck"
        if self._drain_by is not None:
            return "draining"
        return "ready" if self.steps.proven else "starting"

    def handle(self, command: Command, session: RouterSession) -> None:
        """Runs a router's command, unless another router has a sequence with the same key."""
        key = _key(command)
        if key is None or self.sessions.get(key, session) is session:
            self.take(command, session)
        elif not isinstance(command, Abort):
            text = f"request id {key[0]!r} is used by a request of another router"
            session.send(Failed(*key, Code.FAILED_PRECONDITION, text))

    @property
    @abstractmethod
    def lending_key(self) -> bytes:
        """The grant key: routers sign with it which workers may fetch from this worker's prefix
        cache.
        """

    @abstractmethod
    def take(self, command: Command, session: RouterSession) -> None:
        """Runs a router's command. Answers go through the session."""

    @abstractmethod
    def abort(self, key: Key) -> None:
        """Ends a sequence and frees what it holds. Does nothing if the sequence is unknown."""

    @abstractmethod
    def advanced(self, sequence: Sequence, tokens: SequenceTokens | None) -> None:
        """Called after a step computed a chunk of `sequence`. `tokens` are the samples, or None."""

    @abstractmethod
    def sequences(self) -> Iterable[Sequence]:
        """All sequences on this worker, at every stage."""

    @abstractmethod
    def load(self) -> WorkerLoad:
        """The current load of the worker, as `measured` builds it."""

    def session_ended(self, session: RouterSession) -> None:
        """Aborts all sequences of a router whose session has ended."""
        for key in [key for key, owner in self.sessions.items() if owner is session]:
            self.abort(key)

    def drain(self, grace_s: float) -> None:
        """Stops taking new work. After `grace_s` seconds the remaining sequences are handed back.

        If called again, the earlier deadline holds.
        """
        by = self.clock.now() + grace_s
        self._drain_by = by if self._drain_by is None else min(by, self._drain_by)
        self.steps.news.set()

    async def emptied(self) -> None:
        """Returns when nothing runs, waits or is leased here."""
        while True:
            if self.load().empty:
                return
            await asyncio.sleep(HOUSEKEEPING_S)

    def keep_house(self, now: float) -> None:
        """Fails the sequences past their deadline, and all sequences once the drain grace is over.
        Called before each step, and every HOUSEKEEPING_S.
        """
        overdue = [one.spec.key for one in self.sequences() if now >= one.deadline]
        for key in overdue:
            if key in self.sessions:
                self.fail(
                    key, Code.DEADLINE_EXCEEDED, f"the deadline passed on {self.identity.worker_id}"
                )
        if self._drain_by is not None and now >= self._drain_by:
            for key in list(self.sessions):
                self.fail(key, Code.UNAVAILABLE, DRAINING)

    def can_run(self, spec: SequenceSpec, session: RouterSession) -> bool:
        """True if the sequence can run here now. Otherwise sends the router the reason, since an
        invalid sequence could fail a whole step.
        """
        length, most = len(spec.token_ids), self.runner.max_model_len
        text = ""
        if not 0 < length < most:
            text = f"{length} tokens do not fit into the context; allowed are 1 to {most - 1}"
        elif not 0 <= min(spec.token_ids) <= max(spec.token_ids) < self.runner.vocab_size:
            text = f"a token id is outside of 0 to {self.runner.vocab_size - 1}"
        elif not 0 < spec.prompt_len <= length:
            text = (
                f"prompt_len is {spec.prompt_len}; allowed is 1 to {length}, the number of tokens"
            )
        else:
            text = self._flaw(spec)
        if text:
            session.send(Failed(*spec.key, Code.INVALID_ARGUMENT, text))
            return False
        if spec.deadline_s is not None and spec.deadline_s <= 0:
            text = f"the deadline had passed when the request arrived at {self.identity.worker_id}"
            session.send(Failed(*spec.key, Code.DEADLINE_EXCEEDED, text))
            return False
        if self.state != "ready":
            session.send(Refused(*spec.key, self.state))
            return False
        return True

    def _flaw(self, spec: SequenceSpec) -> str:
        """The flaw in the sampling parameters, or empty. Routers check them too, but no router is
        trusted with the steps of others.
        """
        try:
            check_params(spec.sampling, self.runner.vocab_size)
            check_sizes(spec.sampling, self.runner.vocab_size)
        except InvalidArgument as error:
            return error.message
        return ""

    def begin(self, spec: SequenceSpec) -> Sequence:
        """A new sequence that arrives now."""
        return Sequence(spec, self.clock.now(), self.cache.hasher(spec.salt))

    def report(self, batch: list[Work], sampled: SequenceOf[SequenceOf[Sampled]]) -> None:
        """Sends each router the tokens of its sequences, in one message per router."""
        outgoing: dict[RouterSession, list[SequenceTokens]] = {}
        now = self.clock.now()
        for work, draws in zip(batch, sampled, strict=True):
            sequence = work.sequence
            accepted = max(0, len(draws) - 1) if work.draft else 0
            self.meter.count(work.num_tokens + accepted)
            self.meter.drafted(len(work.draft), accepted)
            if sequence.ended:
                continue
            tokens = None
            if draws:
                tokens = self._append(sequence, draws, now)
                outgoing.setdefault(self.sessions[sequence.spec.key], []).append(tokens)
            self.advanced(sequence, tokens)
        for session, items in outgoing.items():
            session.send(TokenBatch(tuple(items)))

    def stored(self, batch: list[Work], layers: int) -> None:
        """Called when the first `layers` layers have stored the running step's KV, to send it."""
        return

    def report_failure(self, work: Work, error: Exception) -> None:
        """Ends the attempt and makes its blocks unfindable in the prefix cache, since their KV may
        have caused the failure.
        """
        sequence = work.sequence
        self.cache.withdraw(sequence.blocks)
        if sequence.ended:
            return
        if isinstance(error, InvalidArgument):
            self.fail(sequence.spec.key, error.code, error.message)
        else:
            text = f"{SEQUENCE_FAULT}: the model failed on token {len(sequence.tokens)}: {error}"
            self.fail(sequence.spec.key, Code.INTERNAL, text)

    def fail(self, key: Key, code: Code, message: str) -> None:
        """Aborts the attempt and sends the router the error."""
        session = self.sessions[key]
        self.abort(key)
        session.send(Failed(*key, code, message))

    async def run(self) -> None:
        """Works until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_house())
            tasks.create_task(self.steps.run())

    async def _keep_house(self) -> None:
        while True:
            self.keep_house(self.clock.now())
            await asyncio.sleep(HOUSEKEEPING_S)

    async def close(self) -> None:
        """Releases the KV memory. Call it when `run` has ended and no push or fetch can still reach
        the memory.
        """
        self.runner.close()

    def info(self) -> WorkerInfo:
        """The worker's current heartbeat. Checks the block accounting if the worker is idle."""
        self._check_integrity()
        return WorkerInfo(
            worker_id=self.identity.worker_id,
            pool=self.identity.pool,
            epoch=self.identity.epoch,
            state=self.state,
            address=self.identity.address,
            model_id=self.runner.model_id,
            layout_hash=self.runner.layout_hash,
            block_size=self.runner.layout.block_size,
            block_bytes=self.runner.layout.block_bytes,
            host_id=self.identity.host_id,
            max_model_len=self.runner.max_model_len,
            load=self.load(),
            pid=os.getpid(),
            tensor_parallel=self.runner.layout.ranks,
            started_by="" if self.identity.claim is None else self.identity.claim.owner,
            term=0 if self.identity.claim is None else self.identity.claim.term,
            protocol=ours(),
            sampled_model_id=self.runner.sampled_model_id,
            tokenizer_id=self.runner.tokenizer_id,
            vocab_size=self.runner.vocab_size,
        )

    def _check_integrity(self) -> None:
        """When idle and changed since the last check: checks that all blocks are accounted for."""
        if not self.steps.idle or not self.steps.changed:
            return
        self.steps.changed = False
        try:
            self.cache.check_integrity()
            self._integrity_error = ""
        except IntegrityError as error:
            self._integrity_error = str(error)

    def measured(
        self,
        *,
        running: int,
        waiting: Iterable[Sequence],
        busy_share: float,
        leases: int = 0,
        blocks_leased: int = 0,
        preemptions: int = 0,
    ) -> WorkerLoad:
        """A load snapshot with the figures that both pools have in common."""
        resident, shared = resident_bytes(self.runner.rank_pids)
        waiting = tuple(waiting)
        return WorkerLoad(
            running=running,
            waiting=len(waiting),
            waiting_tokens=sum(sequence.uncomputed for sequence in waiting),
            blocks_total=self.cache.pool.num_blocks,
            blocks_held=self.cache.pool.num_held,
            blocks_cached=self.cache.pool.num_cached,
            leases=leases,
            tokens_per_second=self.meter.tokens_per_second(),
            weight_bytes=self.runner.weight_bytes,
            kv_bytes=self.runner.kv_bytes,
            rss_bytes=resident,
            shared_bytes=shared,
            integrity_ok=not self._integrity_error,
            integrity_error=self._integrity_error,
            preemptions=preemptions,
            draft_tokens=self.meter.draft_tokens,
            accepted_tokens=self.meter.accepted_tokens,
            queue_wait_p95_ms=self.meter.queue_wait_p95_ms(),
            certificate_note=self.certificate_note,
            step_age_s=self.steps.watch.age_s,
            busy_share=busy_share,
            blocks_leased=blocks_leased,
        )

    def _append(
        self, sequence: Sequence, sampled: SequenceOf[Sampled], now: float
    ) -> SequenceTokens:
        """Adds sampled tokens up to the answer's end. All but the last are accepted drafts."""
        first_here = sequence.num_emitted == sequence.spec.num_emitted
        index = sequence.num_emitted
        token_ids: list[int] = []
        finish: FinishReason | None = None
        for sample in sampled:
            if token_ids:
                # The step that the draft was in has computed the draft's KV.
                sequence.advance(self.cache, 1)
            finish = sequence.append(
                sample.token_id, self.runner.eos_token_ids, self.runner.max_model_len
            )
            token_ids.append(sample.token_id)
            if finish is not None:
                break
        timings = sequence.timings(now) if first_here else None
        if timings is not None:
            self.meter.waited(timings.queue_seconds)
        logprobs = (sample.logprobs for sample in sampled[: len(token_ids)])
        return SequenceTokens(
            *sequence.spec.key,
            index=index,
            token_ids=tuple(token_ids),
            logprobs=tuple(one for one in logprobs if one is not None),
            finish_reason=finish,
            prefill=timings,
        )
