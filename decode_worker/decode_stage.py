"""The decode stage: leases blocks, receives hand-offs, and streams tokens from a continuous
batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from decode_worker.draft_model import draft_proposer
from decode_worker.drafter import Drafter
from decode_worker.scheduler import DecodeScheduler
from decode_worker.token_budget import TokenBudget
from decode_worker.token_eviction import Eviction, evictor_of
from kv_transfer.lease import Lease
from kv_transfer.transports.vllm_nixl import VllmReads
from kvrelay.engine.sampling.matcher import Matcher
from kvrelay.errors import Code
from kvrelay.types.requests import PrefillTimings
from kvrelay.types.token_eviction import WINDOW
from kvrelay.worker.batches import DecodeBatch
from kvrelay.worker.context import Key, WorkerContext
from kvrelay.worker.inbound_kv import InboundKv
from kvrelay.worker.sequence import Sequence
from kvrelay.worker.session import RouterSession
from kvrelay.worker.stage import Stage, StageLoad, Start
from kvrelay.worker.steps.busy_share import RecentMean
from kvrelay.worker.steps.measured_step_cost import utilisation
from kvrelay.worker.steps.step_loop import Reporter, StepLoop, Steps
from kvrelay.worker.tiers.tier_fetcher import TierFetcher
from kvrelay.worker_messages import Refused, Renew, Reserve, Reserved, RunLocal


class DecodeStage(Stage):
    """Events of a sequence: Reserved or Refused, tokens, Failed."""

    commands = (Reserve, RunLocal, Renew)
    scheduler: DecodeBatch

    def __init__(self, context: WorkerContext) -> None:
        config = context.config.decode
        self._context = context
        self._drafter: Drafter | None = None
        # Drops tokens of long sequences; None if they keep all.
        self._eviction: Eviction | None = None
        self.scheduler, self._build_steps = self._batch()
        self.inbound = InboundKv(context, self._join, self._vllm_reads())
        self._leases = self.inbound.leases
        self._max_batch = config.max_batch
        self._slots_taken = RecentMean(context.clock.now())
        # 1 while sequences decode, else 0.
        self._answering = RecentMean(context.clock.now())
        # Sequences that wait for their KV.
        self._reserved: dict[Key, tuple[Sequence, Reserved]] = {}
        self._decoding: dict[Key, Sequence] = {}
        self._tiers = None if context.tiers is None else TierFetcher(context, context.tiers)
        # Sequences whose prefix is read from a tier.
        self._fetching: dict[Key, tuple[Sequence, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def _batch(self) -> tuple[DecodeBatch, Callable[[Reporter], Steps]]:
        """The sequences, and the loop that runs them."""
        context, config = self._context, self._context.config.decode
        drafter = None
        if config.speculation is not None:
            proposer = draft_proposer(context)
            drafter = Drafter(config.speculation, context.runner.max_model_len, proposer)
        self._drafter = drafter
        slo = context.config.slo
        itl_s = None if slo is None else slo.itl_s
        budget = self._token_budget()
        scheduler = DecodeScheduler(context.cache, config.chunk_tokens, drafter, itl_s, budget)
        if budget is not None:
            self._eviction = Eviction(context, budget, scheduler.preempt, self._evicted_badly)

        async def prepare() -> None:
            await scheduler.prepare()
            # Awaited last: the queries of a sequence that joins later would not be kept.
            if self._eviction is not None:
                await self._eviction.prepare(lambda: scheduler.active)

        needed = budget is not None or drafter is not None
        return scheduler, lambda reporter: StepLoop(
            context, scheduler, reporter, prepare if needed else None
        )

    def _vllm_reads(self) -> VllmReads | None:
        """The KV that vLLM reads by itself; None if it is pushed to leased blocks."""
        return None

    def _token_budget(self) -> TokenBudget | None:
        context, config = self._context, self._context.config.kv.eviction
        if config is None:
            return None
        window = WINDOW if evictor_of(context).needs_queries else 0
        return TokenBudget(config.budget_tokens, context.cache.block_size, window)

    def _evicted_badly(self, sequence: Sequence, error: Exception) -> None:
        text = f"dropping tokens of the KV failed at token {len(sequence.tokens)}: {error}"
        self.abort(sequence.spec.key)
        self._context.fail(sequence.spec.key, Code.INTERNAL, text)

    def check_integrity(self) -> None:
        """Checks the memory of the drafts. Raises IntegrityError."""
        if self._drafter is not None:
            self._drafter.check_integrity(len(self.scheduler))

    def steps(self, reporter: Reporter) -> Steps:
        """The loop that runs the batch."""
        return self._build_steps(reporter)

    def start(self, command: Start, session: RouterSession, matcher: Matcher | None) -> None:
        """Leases blocks for a sequence, or prefills it here. Refuses it if all batch slots are
        taken.
        """
        spec = command.spec
        if self._is_full(spec.key):
            session.send(Refused(*spec.key, "full"))
        elif isinstance(command, Reserve):
            sequence = self._context.sequence(spec, matcher)
            self._reserve(sequence, command.lease_seconds, command.prefill_worker, session)
        else:
            self._run_local(self._context.sequence(spec, matcher), session)

    def repeat(self, key: Key, session: RouterSession) -> None:
        """Gives a repeated Reserve the same answer."""
        if key in self._reserved:
            session.send(self._reserved[key][1])

    def renew(self, command: Renew) -> None:
        """Renews leases."""
        self._leases.renew(command.lease_ids, command.lease_seconds, self._context.clock.now())

    def _join(self, lease: Lease, first_token: int, num_tokens: int) -> None:
        """Handles the commit of a reserved sequence: the sequence joins the batch with the token
        that the prefill worker sampled.
        """
        cache, runner = self._context.cache, self._context.runner
        sequence, _ = self._reserved.pop(lease.key)
        expected = len(sequence.tokens)
        if num_tokens != expected or not 0 <= first_token < runner.vocab_size:
            sequence.drop_blocks(cache)
            self._context.work.set()
            text = (
                f"received KV of {num_tokens} tokens and first token {first_token} for a "
                f"sequence of {expected} tokens"
            )
            self._context.fail(lease.key, Code.DATA_LOSS, text)
            return
        sequence.advance(cache, num_tokens - sequence.num_computed)
        sequence.append(first_token, runner.eos_token_ids, runner.max_model_len)
        self._decoding[lease.key] = sequence
        self.scheduler.join(sequence, self._context.clock.now())
        self._context.work.set()

    def abort(self, key: Key) -> None:
        """Ends a sequence, and the push to its lease if it is reserved."""
        if key in self._fetching:
            sequence, fetching = self._fetching.pop(key)
            sequence.ended = True
            fetching.cancel()
        elif key in self._decoding:
            self.scheduler.remove(self._decoding.pop(key))
        elif key in self._reserved:
            lease_id = self._reserved[key][1].target.lease_id
            self._leases.close(lease_id)
            self.inbound.receiver.revoke(lease_id)
            self._release_leases()
        self._context.work.set()

    def _release_leases(self) -> None:
        """Frees the blocks of ended leases without a running copy."""
        for lease in self._leases.release():
            sequence, _ = self._reserved.pop(lease.key)
            sequence.drop_blocks(self._context.cache)
            self._context.work.set()

    def load(self) -> StageLoad:
        """The current counts, with leases and preemptions."""
        waiting, blocks = self.scheduler.waiting, self._context.cache.pool
        now = self._context.clock.now()
        leased = sum(len(lease.writable) for lease in self._leases)
        return StageLoad(
            running=len(self.scheduler) - len(waiting) + len(self._tasks),
            waiting=waiting,
            leases=len(self._leases),
            blocks_leased=leased,
            busy_share=self._busy_share(
                (blocks.units_held - leased * blocks.units.all) / blocks.capacity
            ),
            preemptions=self.scheduler.preemptions,
            dropped_tokens=0 if self._eviction is None else self._eviction.tokens_dropped,
            prompt_tokens_per_second=self.scheduler.prompt_tokens_per_second(
                self._answering.mean(now), now
            ),
        )

    def _busy_share(self, blocks: float) -> float:
        """Returns the utilisation, given the share of the blocks that are in use.

        The busy time of the engine is no measure, since the engine computes whenever any sequence
        decodes.
        """
        now = self._context.clock.now()
        fill = max(self._slots_taken.mean(now), blocks)
        return utilisation(self._context.engine.cost.added(now), fill)

    def sequences(self) -> Iterator[Sequence]:
        """Decoding, fetching and reserved sequences."""
        yield from self._decoding.values()
        yield from (sequence for sequence, _ in self._fetching.values())
        yield from (sequence for sequence, _ in self._reserved.values())

    def keep_house(self, now: float) -> None:
        """Measures the batch, and ends leases past their time."""
        self._slots_taken.is_now(len(self.scheduler) / self._max_batch, now)
        self._answering.is_now(float(self.scheduler.decodes), now)
        self.scheduler.expects_answers = bool(self._reserved)
        for lease in self._leases.expire(now):
            self.inbound.receiver.revoke(lease.lease_id)
            if lease.key in self._context.sessions:
                text = "the lease ended before its KV arrived"
                self._context.fail(lease.key, Code.FAILED_PRECONDITION, text)
        self._release_leases()

    async def close(self) -> None:
        """Ends all fetches and pushes, and closes the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().close()
        await self._context.sender.close()

    def _is_full(self, key: Key) -> bool:
        """Whether no batch slot is free for another sequence. An ended lease of the same key counts
        as a batch slot until the last copy into its blocks is over.
        """
        taken = len(self.scheduler) + len(self._leases) + len(self._tasks)
        return taken >= self._max_batch or key in self._reserved

    def _reserve(
        self, sequence: Sequence, lease_seconds: float, prefill_worker: str, session: RouterSession
    ) -> None:
        cache, spec = self._context.cache, sequence.spec
        # The prefill worker sends them.
        sequence.scores = None
        sequence.take_prefix(cache, receives=True)
        cached_blocks = len(sequence.blocks)
        num_tokens = len(sequence.tokens)
        # Checked before, because taking blocks evicts cached ones.
        missing = sequence.units_missing(cache, num_tokens, num_tokens)
        if missing + self.scheduler.units_awaited(spec.priority) > cache.pool.units_available:
            sequence.drop_blocks(cache)
            session.send(Refused(*spec.key, "full"))
            return
        sequence.take_blocks(cache, num_tokens, num_tokens)
        now = self._context.clock.now()
        lease = self._leases.grant(
            spec.key,
            sequence.blocks,
            cached_blocks,
            lease_seconds,
            now,
            adapter=spec.adapter,
            num_tokens=num_tokens,
        )
        target = self.inbound.target(lease, sequence.num_computed, prefill_worker)
        answer = Reserved(*spec.key, target)
        self._context.sessions[spec.key] = session
        self._reserved[spec.key] = sequence, answer
        session.send(answer)

    def _run_local(self, sequence: Sequence, session: RouterSession) -> None:
        spec = sequence.spec
        self._context.sessions[spec.key] = session
        # Its steps have to end where it evicts.
        evicts = self._eviction is not None and spec.num_emitted > 0
        if self._tiers is None or evicts:
            self._decoding[spec.key] = sequence
            self.scheduler.add(sequence)
            self._context.work.set()
            return
        fetching = asyncio.create_task(self._fetch(sequence, self._tiers))
        self._fetching[spec.key] = sequence, fetching
        self._tasks.add(fetching)
        fetching.add_done_callback(self._tasks.discard)

    async def _fetch(self, sequence: Sequence, tiers: TierFetcher) -> None:
        """Reads a prefix from the tiers, if that leaves the active and the waiting sequences their
        blocks. Then the sequence runs.
        """
        spare = len(self.scheduler) + self.scheduler.units_awaited(sequence.spec.priority)
        try:
            await tiers.fetch(sequence, spare_blocks=spare)
        finally:
            self._context.work.set()
        if not sequence.ended:
            key = sequence.spec.key
            del self._fetching[key]
            self._decoding[key] = sequence
            self.scheduler.resume(sequence)

    def prompt_computed(self, sequence: Sequence, timings: PrefillTimings) -> None:
        """Measures how fast prompts are computed here."""
        if self._tiers is not None:
            computed = len(sequence.spec.token_ids) - timings.cached_tokens
            self._tiers.cost.add_compute(computed, timings.compute_seconds)
