"""The steps of a simulated decode worker: runs of equal steps at once, or single steps of the
production scheduler.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from decode_worker.scheduler import DecodeScheduler
from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.planning.profile import Profile
from kvrelay.simulation.agenda import VirtualClock
from kvrelay.simulation.worker import Cluster, Key, SimulatedWorker, StepTime, Times, token_of
from kvrelay.types.requests import FinishReason
from kvrelay.types.workers import PoolName
from kvrelay.worker.sequence import Sequence, Work
from kvrelay.worker.steps.meter import Meter
from kvrelay.worker_messages import SequenceTokens, TokenBatch

# Most decode steps that run at once. After that many, the router learns the tokens of all
# sequences, and their blocks are taken.
MOST_STEPS = 32
# Steps of a run whose times the estimators learn. They are about equal.
_TOLD_STEPS = 8


@dataclass(slots=True, eq=False)
class _Running:
    """A sequence of the batch. `synced`: steps of the worker up to which its tokens are in the
    books.
    """

    sequence: Sequence
    synced: int
    # The worker's step after which the answer is complete.
    end: int


class DecodeSteps(SimulatedWorker):
    """Runs a batch of sequences.

    While only answers are in the batch, each step takes one token of each sequence, so the times of
    the next steps follow from the size of the batch and its context. The worker then runs all steps
    up to the next change of the batch at once. With prompts in the batch, or without spare blocks,
    each step comes from the scheduler.
    """

    pool: PoolName = "decode"

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        profile: Profile,
        num_blocks: int,
        cluster: Cluster,
        most_steps: int,
    ) -> None:
        super().__init__(worker_id, epoch, profile, num_blocks, cluster)
        config = cluster.config
        itl_s = None if config.slo is None else config.slo.itl_s
        self.process.slowed = self._slow
        self.scheduler = DecodeScheduler(self.cache, config.decode.chunk_tokens, None, itl_s)
        self.meter = Meter(VirtualClock(cluster.agenda))
        # Sequences of the scheduler that decode in runs of steps.
        self._running: dict[Key, _Running] = {}
        # Sequences of the scheduler that do not: their prompts are not computed yet.
        self._prompts: dict[Key, Sequence] = {}
        self._most_steps = most_steps
        # (last step, number, key) of the running sequences.
        self._ends: list[tuple[int, int, Key]] = []
        self._numbers = 0
        # Steps so far, and tokens of the running sequences after them.
        self._steps = 0
        self._context = 0
        # End times of the steps since `_times_from`.
        self._times: array[float] = array("d")
        self._times_from = 0
        # The run of steps in progress: when it began, and its number of steps.
        self._run: tuple[float, int] | None = None
        self._stepping = False
        self._run_number = 0
        # The last steps that the router has not been told of.
        self._recent: deque[StepTime] = deque(maxlen=_TOLD_STEPS)
        # Changes of the batch at the end of the current step.
        self._pending: list[Callable[[], None]] = []

    @abstractmethod
    def note_batch(self) -> None:
        """Records the size of the batch after a change."""

    def _decodes(self, sequence: Sequence) -> None:
        """Adds a sequence that decodes to the runs of steps."""
        spec = sequence.spec
        left = min(
            spec.sampling.max_tokens - sequence.num_emitted,
            self.profile.max_model_len - len(sequence.tokens),
        )
        end = self._steps + max(1, left)
        self._running[spec.key] = _Running(sequence, self._steps, end)
        self._context += len(sequence.tokens)
        self._numbers += 1
        heapq.heappush(self._ends, (end, self._numbers, spec.key))

    def _leave(self, key: Key, running: _Running) -> None:
        del self._running[key]
        self._context -= len(running.sequence.tokens)
        self.scheduler.remove(running.sequence)

    # Steps

    def _at_boundary(self, change: Callable[[], None]) -> None:
        """Changes the batch at the end of the running step, or now if there is none."""
        self._pending.append(change)
        if not self._stepping:
            self._begin()
        elif self._run is not None:
            self._cut()

    def _cut(self) -> None:
        """Ends the run of steps with the step that is running now."""
        assert self._run is not None, "a run is cut"
        first = self._steps - self._times_from
        place = bisect_left(self._times, self.now, lo=first)
        begun, steps = self._run
        left = place + 1 - first
        if left < steps:
            del self._times[first + left :]
            self._start_run(begun, left)

    def _begin(self) -> None:
        """Begins the next steps, after the changes that wait for it."""
        self._stepping = False
        while self._pending:
            waiting, self._pending = self._pending, []
            for change in waiting:
                change()
        if not len(self.scheduler):
            self.process.ends()
            return
        self._stepping = True
        if not self._prompts and self._has_room():
            self._begin_run()
        else:
            self._begin_step()

    def _has_room(self) -> bool:
        """Whether each running sequence may take the blocks of the steps up to the next books."""
        each = 1 + self._most_steps // self.cache.block_size
        return (1 + each) * len(self._running) <= self.cache.pool.units_available

    def _blocks_behind(self, steps: int) -> int:
        """The blocks that the running sequences take up to this step of the worker, and have not
        taken yet.
        """
        return sum(
            one.sequence.blocks_missing(len(one.sequence.tokens) + steps - one.synced - 1)
            for one in self._running.values()
            if one.synced < steps
        )

    def _step_now(self) -> int:
        """The number of the step that is running, or of the last one."""
        if self._run is None:
            return self._steps
        first = self._steps - self._times_from
        place = bisect_left(self._times, self.now, lo=first)
        return self._steps + min(self._run[1], place + 1 - first)

    def _begin_run(self) -> None:
        while self._ends[0][2] not in self._running or (
            self._running[self._ends[0][2]].end != self._ends[0][0]
        ):
            heapq.heappop(self._ends)
        steps = min(
            self._ends[0][0] - self._steps, self._times_from + self._most_steps - self._steps
        )
        # Whoever has joined has the first step of the run.
        self.scheduler.joined_at = None
        batch, context, at = len(self._running), self._context, self.now
        costs = self.costs
        self.process.begins("decode")
        speed = self.process.speed
        seconds = (costs.decode_s(batch, context) + self.cluster.delays.step_s) / speed
        grows = costs.decode_context_token_s * batch / speed
        for factor in self.process.step_factors("decode", steps):
            at += factor * seconds
            seconds += grows
            self._times.append(at)
        self._start_run(self.now, steps)

    def _start_run(self, begun: float, steps: int) -> None:
        self._run = begun, steps
        self._run_number += 1
        number = self._run_number

        def ended() -> None:
            if self._run_number == number:
                self._ran()

        end = self._times[self._steps - self._times_from + steps - 1]
        self.cluster.agenda.at(end, self.while_alive(ended))

    def _slow(self, ratio: float) -> None:
        """Multiplies the times of the steps of the run."""
        if self._run is None:
            return
        now, first = self.now, self._steps - self._times_from
        for place in range(bisect_left(self._times, now, lo=first), len(self._times)):
            self._times[place] = now + ratio * (self._times[place] - now)
        self._start_run(*self._run)

    def _ran(self) -> None:
        assert self._run is not None, "a run ends"
        begun, steps = self._run
        self._run = None
        batch, first = len(self._running), self._steps - self._times_from
        self.busy_s += self.now - begun
        self.meter.count(batch * steps)
        self._steps += steps
        self._context += batch * steps
        self._learn(begun, batch, first, steps)
        said: list[tuple[_Running, int]] = []
        while self._ends and self._ends[0][0] <= self._steps:
            end, _, key = heapq.heappop(self._ends)
            running = self._running.get(key)
            if running is None or running.end != end:
                continue
            said.append((running, running.synced))
            self._advance(running)
            self._leave(key, running)
        if self._steps - self._times_from >= self._most_steps:
            self._sync_all(said)
        elif said:
            self._say(said)
        self.note_batch()
        self._begin()

    def _learn(self, begun: float, batch: int, first: int, steps: int) -> None:
        """Tells the estimators of the steps' times."""
        before = begun
        for place in range(first, first + steps):
            at = self._times[place]
            self.step_cost.ended(batch, at - before, at)
            if place - first < _TOLD_STEPS:
                self.scheduler.chunk_budget.ended(True, 0, at - before, at)
                self._recent.append((batch, at - before))
            before = at

    def _advance(self, running: _Running) -> None:
        """Brings a sequence's tokens and blocks up to the current step."""
        steps = self._steps - running.synced
        if not steps:
            return
        sequence = running.sequence
        running.synced = self._steps
        sequence.tokens.extend(array("q", [token_of(sequence.spec)]) * steps)
        try:
            sequence.take_blocks(self.cache, len(sequence.tokens) - 1)
        except OutOfBlocks as error:  # pragma: no cover - `_has_room` keeps them free
            raise AssertionError("a run of steps began without its blocks") from error
        sequence.advance(self.cache, steps)

    def tell_all(self) -> None:
        """Tells the router the tokens of all steps so far, between two steps."""
        if any(one.synced < self._steps for one in self._running.values()):
            self._sync_all([])

    def last_words(self) -> tuple[TokenBatch, dict[str, Times]] | None:
        """Returns the tokens of the steps whose messages have arrived and that the router does not
        know yet, when the worker dies. None without any.
        """
        if self._run is None:
            return None
        first = self._steps - self._times_from
        sent_s = self.now - self.cluster.delays.message_s
        self._steps += bisect_right(self._times, sent_s, lo=first) - first
        said = [(one, one.synced) for one in self._running.values() if one.synced < self._steps]
        for running, _ in said:
            self._advance(running)
        return self._tokens_of(said) if said else None

    def _sync_all(self, ended: list[tuple[_Running, int]]) -> None:
        said = list(ended)
        for running in self._running.values():
            if running.synced < self._steps:
                said.append((running, running.synced))
                self._advance(running)
        if said:
            self._say(said)
        self._times = array("d")
        self._times_from = self._steps

    def _say(self, said: list[tuple[_Running, int]]) -> None:
        """Sends the tokens of sequences since the steps up to which the router has them."""
        batch, times = self._tokens_of(said)
        self.tell(batch, times, tuple(self._recent))
        self._recent.clear()

    def _tokens_of(self, said: list[tuple[_Running, int]]) -> tuple[TokenBatch, dict[str, Times]]:
        """Returns the tokens of sequences since these steps, and the times of the tokens."""
        found, times = [], {}
        for running, since in said:
            spec, sequence = running.sequence.spec, running.sequence
            count = self._steps - since
            index = sequence.num_emitted - count
            finish: FinishReason | None = "length" if running.end <= self._steps else None
            tokens = (token_of(spec),) * count
            found.append(SequenceTokens(*spec.key, index, tokens, (), finish))
            ends = self._times[since - self._times_from : self._steps - self._times_from]
            times[spec.request_id] = np.asarray(ends, dtype=np.float64)
        return TokenBatch(tuple(found)), times

    # Single steps

    def _begin_step(self) -> None:
        self.tell_all()
        batch = self.scheduler.next(self.now)
        # The scheduler may have preempted sequences, which are computed again.
        for key, running in list(self._running.items()):
            if running.sequence.uncomputed != 1:
                del self._running[key]
                self._context -= len(running.sequence.tokens)
                self._prompts[key] = running.sequence
        if not batch:
            self._stepping = False
            self.process.ends()
            return
        self.run_step(batch, lambda seconds: self._stepped(batch, seconds))

    def _stepped(self, batch: list[Work], seconds: float) -> None:
        now = self.now
        self.busy_s += seconds
        self.meter.count(sum(work.num_tokens for work in batch))
        self.scheduler.ran(batch, seconds, now)
        self.step_cost.ended(sum(work.num_tokens for work in batch), seconds, now)
        self.scheduler.complete(batch)
        said, times = [], {}
        at: Times = np.array([now])
        # Every running sequence is in the batch, so the steps of runs and single steps agree.
        self._steps += 1
        self._times_from = self._steps
        self._times = array("d")
        for work in batch:
            sequence, key = work.sequence, work.sequence.spec.key
            if sequence.ended or not work.sample:
                continue
            first = sequence.num_emitted == sequence.spec.num_emitted
            local = first and sequence.started is not None and key in self._prompts
            token, index = token_of(sequence.spec), sequence.num_emitted
            finish = sequence.append(token, frozenset(), self.profile.max_model_len)
            timings = sequence.timings(now) if local else None
            if timings is not None:
                self.meter.waited(timings.queue_seconds)
            said.append(SequenceTokens(*sequence.spec.key, index, (token,), (), finish, timings))
            times[sequence.spec.request_id] = at
            running = self._running.get(key)
            if running is not None:
                running.synced = self._steps
                self._context += 1
            if finish is not None:
                if running is not None:
                    self._leave(key, running)
                else:
                    del self._prompts[key]
                    self.scheduler.remove(sequence)
            elif running is None:
                del self._prompts[key]
                self._decodes(sequence)
        if said:
            self.tell(TokenBatch(tuple(said)), times)
        self.note_batch()
        self._begin()
