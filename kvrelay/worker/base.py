"""What a prefill and a decode worker have in common."""

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
    """Of the sequence that the command is about, if it is about one."""
    match command:
        case Renew():
            return None
        case Abort(request_id, attempt):
            return request_id, attempt
        case Reserve(spec) | Prefill(spec) | RunLocal(spec):
            return spec.key


@dataclass(frozen=True, slots=True)
class Identity:
    """Which worker this is. Its epoch is higher than that of any worker started before it."""

    worker_id: str
    pool: PoolName
    epoch: int
    address: str
    host_id: str
    claim: Claim | None = None  # under which a controller started it


class Worker(ABC):
    """Owns the block accounting, the scheduler and the step loop; lives on one event loop.

    A sequence is known by its key (request id, attempt) from the command that brought it until its
    last event; a command that arrives twice is run once.
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
        self.certificate_note = ""  # what its host has to say of the worker's certificate
        self._integrity_error = ""
        self._drain_by: float | None = None

    @property
    def state(self) -> WorkerState:
        """starting ─▶ ready ─▶ draining, and from each of them ─▶ stuck, the last before the
        process ends.

        It is ready once the engine has run real steps, and takes new work only then.
        """
        if self.steps.hung:
            return "stuck"
        if self._drain_by is not None:
            return "draining"
        return "ready" if self.steps.proven else "starting"

    def handle(self, command: Command, session: RouterSession) -> None:
        """Runs a router's command, unless it is about another router's sequence of the same
        name.
        """
        key = _key(command)
        if key is None or self.sessions.get(key, session) is session:
            self.take(command, session)
        elif not isinstance(command, Abort):
            text = f"request id {key[0]!r} is in use by a request of another router"
            session.send(Failed(*key, Code.FAILED_PRECONDITION, text))

    @property
    @abstractmethod
    def lending_key(self) -> bytes:
        """By which routers grant other workers what this one's prefix cache holds."""

    @abstractmethod
    def take(self, command: Command, session: RouterSession) -> None:
        """Runs a router's command. Answers go through the session."""

    @abstractmethod
    def abort(self, key: Key) -> None:
        """Ends a sequence that may or may not be here; frees what it holds."""

    @abstractmethod
    def advanced(self, sequence: Sequence, tokens: SequenceTokens | None) -> None:
        """A step computed a chunk of `sequence`; `tokens` is what it sampled, if it did."""

    @abstractmethod
    def sequences(self) -> Iterable[Sequence]:
        """All that are here, at whatever stage."""

    @abstractmethod
    def load(self) -> WorkerLoad:
        """The counts of this moment; `info` adds what both pools have."""

    def session_ended(self, session: RouterSession) -> None:
        """The router is gone or will start anew: nothing of its is of use any more."""
        for key in [key for key, owner in self.sessions.items() if owner is session]:
            self.abort(key)

    def drain(self, grace_s: float) -> None:
        """Takes nothing new from now on. What is left after the grace is handed back; asked again,
        the earlier end holds.
        """
        by = self.clock.now() + grace_s
        self._drain_by = by if self._drain_by is None else min(by, self._drain_by)
        self.steps.news.set()

    async def emptied(self) -> None:
        """Until nothing runs, waits or is leased here."""
        while True:
            if self.load().empty:
                return
            await asyncio.sleep(HOUSEKEEPING_S)

    def keep_house(self, now: float) -> None:
        """Ends what time alone has ended: called before each step, and HOUSEKEEPING_S apart."""
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
        """Whether the sequence can be run here and now; says otherwise why not, before it can spoil
        a whole step.
        """
        length, most = len(spec.token_ids), self.runner.max_model_len
        text = ""
        if not 0 < length < most:
            text = (
                f"{length} tokens do not fit into a context of {most}, which has to hold one to "
                f"{most - 1}"
            )
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
            text = f"the deadline had passed when it came to {self.identity.worker_id}"
            session.send(Failed(*spec.key, Code.DEADLINE_EXCEEDED, text))
            return False
        if self.state != "ready":
            session.send(Refused(*spec.key, self.state))
            return False
        return True

    def _flaw(self, spec: SequenceSpec) -> str:
        """What is wrong with its sampling, or nothing. Routers check that too; none is trusted with
        others' steps.
        """
        try:
            check_params(spec.sampling, self.runner.vocab_size)
            check_sizes(spec.sampling, self.runner.vocab_size)
        except InvalidArgument as error:
            return error.message
        return ""

    def begin(self, spec: SequenceSpec) -> Sequence:
        return Sequence(spec, self.clock.now(), self.cache.hasher(spec.salt))

    def report(self, batch: list[Work], sampled: SequenceOf[SequenceOf[Sampled]]) -> None:
        """Sends each router what the step gave its sequences, in one message."""
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
        """So many layers of the step that runs have stored its KV: a worker that sends KV may
        begin.
        """
        return

    def report_failure(self, work: Work, error: Exception) -> None:
        """Ends the attempt, and nobody else finds its KV in the prefix cache: it may be what the
        step failed on.
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
        """Ends the attempt here and says so."""
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
        """Lets go of the KV's memory; to be called when `run` has ended and nobody can push or
        fetch any more.
        """
        self.runner.close()

    def info(self) -> WorkerInfo:
        """What it says of itself at this moment, its books looked through."""
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
        """When idle, looks whether every block is accounted for, once after each time that
        something happened.
        """
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
        """A load with the figures that are the same for both pools."""
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
        """Adds sampled tokens up to the one that the answer ends with. All but the last are right
        drafts.
        """
        first_here = sequence.num_emitted == sequence.spec.num_emitted
        index = sequence.num_emitted
        token_ids: list[int] = []
        finish: FinishReason | None = None
        for sample in sampled:
            if token_ids:
                # The step that the draft was in has computed its KV
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
