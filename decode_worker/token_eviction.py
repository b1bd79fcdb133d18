"""Drops tokens of sequences that have reached their budget, between two steps."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import cast

from decode_worker.token_budget import TokenBudget
from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.token_eviction.compaction import Compaction
from kvrelay.engine.token_eviction.evictor import Overfull, TokenEvictor
from kvrelay.engine.token_eviction.recent_queries import RecentQueries
from kvrelay.process.telemetry import get_logger
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.sequence import Sequence
from kvrelay.worker.steps.step_thread import Result

log = get_logger(__name__)


def evictor_of(context: WorkerContext) -> TokenEvictor:
    """The evictor of a worker whose configuration has kv.eviction."""
    evictor = cast(ModelRunner, context.runner).evictor
    assert evictor is not None, "the runner was loaded without eviction"
    return evictor


class Eviction:
    """Evicts tokens of one worker's sequences. The engine's thread chooses and moves them; blocks
    change hands on the event loop.
    """

    def __init__(
        self,
        context: WorkerContext,
        budget: TokenBudget,
        preempt: Callable[[], object],
        fail: Callable[[Sequence, Exception], None],
    ) -> None:
        """preempt: frees the blocks of a sequence. fail: told of a sequence that could not be
        compacted, and cannot go on.
        """
        self.budget = budget
        self._evictor = evictor_of(context)
        self._cache = context.cache
        self._engine = context.engine
        self._preempt = preempt
        self._fail = fail
        # Since the start.
        self.tokens_dropped = 0

    async def prepare(self, active: Callable[[], SequenceOf[Sequence]]) -> None:
        """Prepares the next step of the active sequences, oldest first: evicts where it is due, and
        has queries kept where they are needed.

        One sequence evicts at a time, and the others that are due sit the step out. So a sequence
        never waits for the evictions of all others at once.
        """
        while due := [one for one in active() if self.budget.is_due(one)]:
            await self._evict(due[0])
            if any(not self.budget.is_due(one) for one in active()):
                break
        for sequence in active():
            if sequence.queries is None and self.budget.needs_queries(sequence):
                sequence.queries = RecentQueries(sequence.num_computed)

    async def _evict(self, sequence: Sequence) -> None:
        # A sequence that is removed meanwhile keeps its blocks until the end.
        sequence.in_flight = True
        failure = None
        try:
            await self._compact(sequence)
        # Whatever is raised is about this sequence.
        except Exception as error:
            failure = error
            log.error("eviction_failed", request=sequence.spec.request_id, exc_info=error)
        finally:
            sequence.in_flight = False
        if sequence.ended:
            sequence.drop_blocks(self._cache)
        elif failure is not None:
            self._fail(sequence, failure)

    async def _compact(self, sequence: Sequence) -> None:
        before = sequence.num_stored
        found = await self._plan(sequence)
        if found is None:
            return
        plan, spare = found
        blocks = [*sequence.blocks, *spare]
        sequence.blocks = blocks
        await self._run(before, partial(self._evictor.move, blocks, plan))
        sequence.compacted([blocks[place] for place in plan.places], plan.rows)
        kept = set(plan.places)
        self._cache.release([block for place, block in enumerate(blocks) if place not in kept])
        self.tokens_dropped += before - sequence.num_stored

    async def _plan(self, sequence: Sequence) -> tuple[Compaction, list[int]] | None:
        """The plan, and the spare blocks that it needs; None if the sequence ended or was
        preempted.

        The tokens that are dropped never depend on the memory that is left. So if no spare blocks
        are left, the sequence's own blocks leave the prefix cache, and then others are preempted.
        """
        while not sequence.ended:
            overfull = Overfull(
                tuple(sequence.blocks),
                tuple(sequence.positions),
                self.budget.blocks_over(sequence),
                self._fixed(sequence),
                sequence.queries,
            )
            plan = await self._run(sequence.num_stored, partial(self._evictor.plan, overfull))
            if sequence.ended:
                break
            try:
                return plan, self._cache.allocate(plan.num_spare)
            except OutOfBlocks:
                if own := self._own_named(sequence):
                    self._cache.withdraw(own)
                    continue
            self._preempt()
            if not sequence.blocks:
                break
        return None

    def _fixed(self, sequence: Sequence) -> frozenset[int]:
        """The places of blocks whose content must not change."""
        pool = self._cache.pool
        return frozenset(
            place
            for place, block in enumerate(sequence.blocks)
            if pool.hash_of(block) is not None or pool.num_holds(block) > 1
        )

    def _own_named(self, sequence: Sequence) -> list[int]:
        """The blocks of the sequence that the prefix cache has, and no other sequence."""
        pool = self._cache.pool
        return [
            block
            for block in sequence.blocks
            if pool.hash_of(block) is not None and pool.num_holds(block) == 1
        ]

    async def _run(self, tokens: int, function: Callable[[], Result]) -> Result:
        return await self._engine.timed(tokens, function, costed=False)
