"""Selects the sequences of the next step of a decode worker. Pure: no clock, no I/O, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from decode_worker.chunk_budget import ChunkBudget
from decode_worker.drafter import Drafter
from decode_worker.token_budget import TokenBudget
from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.worker.scheduler import Scheduler
from kvrelay.worker.sequence import Sequence, Work


def _age(sequence: Sequence) -> tuple[int, float]:
    return sequence.spec.priority, sequence.arrived


class DecodeScheduler(Scheduler):
    """Continuous batching: each step runs one token of every decoding sequence. In the same step it
    runs chunks of the prompts that are prefilled here, under a token budget, fairly between
    tenants. While sequences decode, the budget leaves them their ITL.

    Active sequences hold blocks for all their tokens; waiting sequences hold none. If a decoding
    sequence needs a block and none is left, a sequence is preempted: it waits again and is later
    recomputed from its tokens. The victim is the youngest sequence of the tenant with the most
    blocks relative to its weight. The oldest sequence is never preempted while others are active,
    so it always progresses.

    With a drafter, decoding sequences run drafts as far as spare blocks allow. No sequence is
    preempted for a draft.
    """

    def __init__(
        self,
        cache: KvCache,
        chunk_tokens: int,
        drafter: Drafter | None = None,
        itl_s: float | None = None,
        token_budget: TokenBudget | None = None,
    ) -> None:
        """itl_s: the least ITL in seconds that prompts leave to decoding sequences; None for no
        such aim. token_budget: when sequences drop tokens; None if they keep all.
        """
        super().__init__(cache, chunk_tokens)
        self._token_budget = token_budget
        self._drafter = drafter
        self.chunk_budget = ChunkBudget(chunk_tokens, min(chunk_tokens, cache.block_size))
        # Whether a sequence may join at any time. It would wait for the end of the running step.
        self.expects_answers = False
        # The configured ITL in seconds; None without such an aim.
        self.least_itl_s = itl_s
        # Oldest first, like _waiting.
        self._active: list[Sequence] = []
        self._waiting: list[Sequence] = []
        # The waiting sequence that found no room, with the blocks and active sequences then.
        self._no_room: tuple[Sequence, int, int, int] | None = None
        self.preemptions = 0
        # Since when a sequence that was handed over waits for its first step.
        self.joined_at: float | None = None

    def __len__(self) -> int:
        """Number of sequences, active and waiting."""
        return len(self._active) + len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._active
        yield from self._waiting

    @property
    def active(self) -> tuple[Sequence, ...]:
        """Sequences with blocks, oldest first."""
        return tuple(self._active)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences without blocks, oldest first."""
        return tuple(self._waiting)

    @property
    def itl_s(self) -> float | None:
        """The smallest ITL in seconds that the decoding and expected sequences ask for; None if
        there are none, or without such an aim.

        A sequence that asks for less than the configured ITL would slow the prompts of others.
        """
        least = self.least_itl_s
        if least is None:
            return None
        decoding = (one.spec.itl_s for one in self._active if one.uncomputed == 1)
        expected = least if self.expects_answers else None
        return min((max(least, own or 0.0) for own in decoding), default=expected)

    @property
    def decodes(self) -> bool:
        """Whether a sequence decodes."""
        return any(one.uncomputed == 1 for one in self._active)

    def units_awaited(self, priority: int) -> int:
        """The units of memory with which the oldest waiting sequence of this urgency or a higher
        one can start; 0 if none waits.
        """
        first = self._waiting[0] if self._waiting else None
        if first is None or first.spec.priority > priority:
            return 0
        return first.units_missing(self._cache, self._held(first)) + self._spare

    def prompt_tokens_per_second(self, answering: float, now: float) -> float | None:
        """Returns the rate at which a prompt would be computed: 0 if the answers leave no time,
        None if unknown. answering: share of the time in which sequences decode, 0 to 1.
        """
        itl_s = self.itl_s or self.least_itl_s
        return self.chunk_budget.tokens_per_second(itl_s, answering, now)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence to prefill here."""
        self._waiting.append(sequence)
        self._waiting.sort(key=_age)

    def resume(self, sequence: Sequence) -> None:
        """Adds a sequence to prefill here, which may hold its blocks already, with a part of its
        KV.
        """
        if sequence.blocks:
            self._activate(sequence)
        else:
            self.add(sequence)

    def join(self, sequence: Sequence, now: float) -> None:
        """Adds a sequence whose KV was handed over, except that of its last token. It decodes from
        the next step on.
        """
        assert sequence.uncomputed == 1, (
            f"{sequence.uncomputed} tokens left to compute at the hand-off"
        )
        self._activate(sequence)
        if self.joined_at is None:
            self.joined_at = now

    async def prepare(self) -> None:
        """Prepares the drafts of the next step. Sequences may come and go meanwhile."""
        if self._drafter is not None and 0 < len(self._active) <= self._drafter.max_batch:
            decoding = [one for one in self._active if one.uncomputed == 1]
            await self._drafter.prepare(decoding)

    def next(self, now: float) -> list[Work]:
        """The next step's work; empty if there is nothing to run, or if all waiting sequences wait
        for blocks.
        """
        waited_s = 0.0 if self.joined_at is None else now - self.joined_at
        self.joined_at = None
        self._grow()
        batch: list[Work] = []
        prompts: list[Sequence] = []
        for sequence in self._active:
            if self._token_budget is not None and self._token_budget.is_due(sequence):
                sequence.passes(now)
            elif sequence.uncomputed == 1:
                batch.append(self._work(sequence, 1, now, self._draft(sequence)))
            else:
                prompts.append(sequence)
        if not prompts and not self._waiting:
            return batch
        budget = self.chunk_budget.tokens(self.itl_s, waited_s if batch else 0.0, now)
        may_start = True
        for sequence in self._turns.order(sorted([*prompts, *self._waiting], key=_age)):
            if not budget:
                break
            if not sequence.blocks:
                may_start = may_start and self._admit(sequence, now)
                if not may_start:
                    continue
                self._waiting.remove(sequence)
                self._activate(sequence)
            num_tokens = min(self._budget(sequence, budget), self._computable(sequence))
            budget -= num_tokens
            self._turns.charge(sequence, num_tokens)
            batch.append(self._work(sequence, num_tokens, now))
        for sequence in prompts:
            if not sequence.in_flight:
                sequence.passes(now)
        return batch

    def ran(self, batch: list[Work], seconds: float, now: float) -> None:
        """Learns from the time of a step how many prompt tokens fit into the next."""
        prompt_tokens = sum(work.num_tokens for work in batch if work.num_tokens > 1)
        decoding = any(work.num_tokens == 1 for work in batch)
        self.chunk_budget.ended(decoding, prompt_tokens, seconds, now)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence. Its blocks are released now, or at the end of the running step."""
        (self._active if sequence in self._active else self._waiting).remove(sequence)
        if self._drafter is not None:
            self._drafter.forget(sequence)
        self._end(sequence)

    def preempt(self) -> int:
        """Preempts a sequence between two steps. Returns its place among the active ones."""
        place = self._victim()
        victim = self._active.pop(place)
        victim.drop_blocks(self._cache)
        if self._drafter is not None:
            self._drafter.pause(victim)
        self.add(victim)
        self.preemptions += 1
        return place

    def _grow(self) -> None:
        """Gives every active sequence the block that its next tokens need."""
        index = 0
        while index < len(self._active):
            try:
                sequence = self._active[index]
                sequence.take_blocks(self._cache, self._held(sequence))
                index += 1
            except OutOfBlocks:
                index -= self.preempt() < index

    def _victim(self) -> int:
        """The index of the sequence to preempt among the least urgent active ones; see the
        class.
        """
        least_urgent = self._active[-1].spec.priority
        blocks: Counter[str] = Counter()
        for sequence in self._active:
            blocks[sequence.spec.tenant] += len(sequence.blocks)

        def excess(place: int) -> tuple[float, int]:
            sequence = self._active[place]
            return blocks[sequence.spec.tenant] / sequence.weight, place

        others = [
            place
            for place in range(1, len(self._active))
            if self._active[place].spec.priority == least_urgent
        ]
        return max(others, key=excess, default=0)

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Takes blocks for all tokens, if that leaves a spare block for each active sequence."""
        pool = self._cache.pool
        state = sequence, pool.units_available, pool.num_contents, len(self._active)
        # The search for a cached prefix takes long, so it is not repeated in vain.
        if state == self._no_room:
            return False
        budget = self._token_budget
        sequence.take_prefix(self._cache, None if budget is None else budget.cacheable(sequence))
        missing = sequence.units_missing(self._cache, self._held(sequence))
        if missing + self._spare > pool.units_available:
            sequence.drop_blocks(self._cache)
            self._no_room = state
            return False
        sequence.take_blocks(self._cache, self._held(sequence))
        if sequence.started is None:
            sequence.started = now
            sequence.cached_tokens = sequence.num_computed
        return True

    def _draft(self, sequence: Sequence) -> tuple[int, ...]:
        """Draft tokens that fit into the sequence's blocks and the spare blocks, with a spare block
        left for each active sequence.
        """
        if self._drafter is None or len(self._active) > self._drafter.max_batch:
            return ()
        length = len(sequence.tokens)
        pool = self._cache.pool
        spare = max(0, pool.units_available - self._spare) // pool.units.all
        room = (len(sequence.blocks) + spare) * self._cache.block_size
        room -= length - sequence.num_dropped
        if self._token_budget is not None:
            room = min(room, self._token_budget.most_drafts(sequence))
        draft = self._drafter.draft(sequence, room)
        sequence.take_blocks(self._cache, length + len(draft))
        return draft

    @property
    def _spare(self) -> int:
        """Units of memory of a block for each active sequence."""
        return len(self._active) * self._cache.pool.units.all

    def _held(self, sequence: Sequence) -> int:
        """The tokens up to which the sequence needs blocks."""
        budget = self._token_budget
        return len(sequence.tokens) if budget is None else budget.held(sequence)

    def _computable(self, sequence: Sequence) -> int:
        """The tokens that one step may compute, if it has time for them."""
        budget = self._token_budget
        if budget is None:
            return sequence.uncomputed
        return min(sequence.uncomputed, budget.step_end(sequence) - sequence.num_computed)

    def _activate(self, sequence: Sequence) -> None:
        self._active.append(sequence)
        self._active.sort(key=_age)
