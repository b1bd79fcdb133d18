"""A simulated decode worker: the commands of the router, leases and load."""

from __future__ import annotations

from kvrelay.errors import Code
from kvrelay.planning.profile import Profile
from kvrelay.simulation.decode_steps import MOST_STEPS, DecodeSteps
from kvrelay.simulation.worker import Cluster, Key, token_of
from kvrelay.types.requests import SequenceSpec
from kvrelay.types.workers import WorkerLoad
from kvrelay.worker.sequence import Sequence
from kvrelay.worker.steps.busy_share import RecentMean
from kvrelay.worker.steps.measured_step_cost import utilisation
from kvrelay.worker_messages import (
    DRAINING,
    Abort,
    Command,
    Failed,
    HandoffTarget,
    Refused,
    Reserve,
    Reserved,
    RunLocal,
)


class SimulatedDecode(DecodeSteps):
    """Leases blocks to requests, takes hand-offs, and prefills prompts of the local path."""

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        profile: Profile,
        num_blocks: int,
        cluster: Cluster,
        most_steps: int = MOST_STEPS,
    ) -> None:
        super().__init__(worker_id, epoch, profile, num_blocks, cluster, most_steps)
        self._max_batch = cluster.config.decode.max_batch
        self._epoch = epoch
        self._leases = 0
        # Sequences that wait for their KV.
        self._reserved: dict[Key, Sequence] = {}
        self._slots_taken = RecentMean(self.now)
        self._answering = RecentMean(self.now)

    # Commands

    @property
    def empty(self) -> bool:
        """Whether no sequence is here."""
        return not (self._running or self._prompts or self._reserved)

    def handle(self, command: Command) -> None:
        """Runs a command of the router."""
        match command:
            case Reserve(spec):
                self._reserve(spec)
            case RunLocal(spec):
                if self._refuses(spec):
                    return
                sequence = self.sequence(spec)
                self._prompts[spec.key] = sequence
                self._at_boundary(lambda: self._add(sequence))
            case Abort(request_id, attempt):
                key = request_id, attempt
                if key in self._reserved:
                    self._reserved.pop(key).drop_blocks(self.cache)
                    self.note_batch()
                    self._at_boundary(lambda: None)
                else:
                    self._at_boundary(lambda: self._abort(key))

    def join(self, key: Key, epoch: int) -> bool:
        """Takes the KV of a reserved sequence, which decodes from the next step on. Returns False
        if it is not reserved.
        """
        sequence = self._reserved.get(key)
        if sequence is None or epoch != self._epoch:
            return False
        now = self.now
        self._at_boundary(lambda: self._join(key, now))
        return True

    def fail_all(self) -> None:
        """Hands all sequences back."""

        def fail() -> None:
            self.tell_all()
            for key in [*self._reserved, *self._running, *self._prompts]:
                if key in self._reserved:
                    self._reserved.pop(key).drop_blocks(self.cache)
                else:
                    self._abort(key)
                self.tell(Failed(*key, Code.UNAVAILABLE, DRAINING))

        self._at_boundary(fail)

    def load(self) -> WorkerLoad:
        """The load that the worker reports."""
        now, pool, waiting = self.now, self.cache.pool, self.scheduler.waiting
        leased = sum(len(one.blocks) for one in self._reserved.values())
        fill = max(self._slots_taken.mean(now), (pool.num_held - leased) / pool.num_blocks)
        itl_s = self.scheduler.itl_s or self.scheduler.least_itl_s
        budget = self.scheduler.chunk_budget
        return WorkerLoad(
            running=len(self.scheduler) - len(waiting),
            waiting=len(waiting),
            waiting_tokens=sum(one.uncomputed for one in waiting),
            blocks_total=pool.num_blocks,
            blocks_held=pool.num_held,
            blocks_cached=pool.num_cached,
            leases=len(self._reserved),
            tokens_per_second=self.meter.tokens_per_second(),
            preemptions=self.scheduler.preemptions,
            queue_wait_p95_ms=self.meter.queue_wait_p95_ms(),
            busy_share=utilisation(self.step_cost.added(now), fill),
            blocks_leased=leased,
            prompt_tokens_per_second=budget.tokens_per_second(
                itl_s, self._answering.mean(now), now
            ),
        )

    def _refuses(self, spec: SequenceSpec) -> bool:
        """Refuses a sequence without a batch slot. Returns whether it did."""
        taken = len(self._running) + len(self._prompts) + len(self._reserved)
        if not self.draining and taken < self._max_batch:
            return False
        self.tell(Refused(*spec.key, DRAINING if self.draining else "full"))
        return True

    def _reserve(self, spec: SequenceSpec) -> None:
        if self._refuses(spec):
            return
        cache, sequence = self.cache, self.sequence(spec)
        sequence.take_prefix(cache)
        missing = sequence.units_missing(cache, len(sequence.tokens))
        missing += self.scheduler.units_awaited(spec.priority)
        # The running sequences have not yet taken the blocks of their last steps.
        missing += self._blocks_behind(self._step_now())
        if missing > cache.pool.units_available:
            sequence.drop_blocks(cache)
            self.tell(Refused(*spec.key, "full"))
            return
        sequence.take_blocks(cache, len(sequence.tokens))
        if (
            self._run is not None
            and self._blocks_behind(self._steps + self._run[1]) > cache.pool.units_available
        ):
            # The next steps need the scheduler, which preempts.
            self._at_boundary(lambda: None)
        self._reserved[spec.key] = sequence
        self._leases += 1
        self.note_batch()
        target = HandoffTarget(
            worker_id=self.worker_id,
            address=self.worker_id,
            epoch=self._epoch,
            lease_id=self._leases,
            generation=1,
            num_blocks=len(sequence.blocks),
            cached_tokens=sequence.num_computed,
            layout_hash="",
            host_id=self.worker_id,
        )
        self.tell(Reserved(*spec.key, target))

    # Changes of the batch, between two steps

    def _add(self, sequence: Sequence) -> None:
        if self._prompts.get(sequence.spec.key) is sequence:
            self.scheduler.add(sequence)
            self.note_batch()

    def _join(self, key: Key, since: float) -> None:
        sequence = self._reserved.pop(key, None)
        if sequence is None:
            return
        sequence.advance(self.cache, len(sequence.tokens) - sequence.num_computed)
        sequence.append(token_of(sequence.spec), frozenset(), self.profile.max_model_len)
        self.scheduler.join(sequence, since)
        self._decodes(sequence)
        self.note_batch()

    def _abort(self, key: Key) -> None:
        running = self._running.get(key)
        if running is not None:
            self._advance(running)
            self._leave(key, running)
        elif key in self._prompts:
            sequence = self._prompts.pop(key)
            if sequence in set(self.scheduler):
                self.scheduler.remove(sequence)
        self.note_batch()

    def note_batch(self) -> None:
        """Records the batch for the estimates that the load reports."""
        now = self.now
        self._slots_taken.is_now(len(self.scheduler) / self._max_batch, now)
        self._answering.is_now(float(bool(self._running)), now)
        self.scheduler.expects_answers = bool(self._reserved)
