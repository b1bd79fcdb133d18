"""The prefill stage: builds the KV of prompts chunk by chunk and pushes each chunk's KV to a decode
worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from kv_transfer.blocks.plan import Layers
from kv_transfer.push import Push
from kvrelay.engine.sampling.matcher import Matcher
from kvrelay.errors import KvRelayError, Unimplemented
from kvrelay.types.requests import PrefillTimings
from kvrelay.wire.transfer import VllmBlocks
from kvrelay.worker.batches import PrefillBatch
from kvrelay.worker.context import Key, WorkerContext
from kvrelay.worker.sequence import Sequence, Work
from kvrelay.worker.session import RouterSession
from kvrelay.worker.stage import Stage, StageLoad, Start
from kvrelay.worker.steps.step_loop import Reporter, StepLoop, Steps
from kvrelay.worker.tiers.tier_fetcher import TierFetcher
from kvrelay.worker_messages import (
    Failed,
    HandedOff,
    HandoffTarget,
    Prefill,
    PrefixSource,
    SequenceTokens,
)
from prefill_worker.fetcher import Fetcher
from prefill_worker.scheduler import PrefillScheduler

# Bytes of a chunk's KV from which it is pushed in groups of layers while later layers are computed.
LARGE = 4 * 2**20
GROUPS = 4


@dataclass(slots=True, eq=False)
class Relay:
    """One prompt on this worker. `held` are the blocks that the push reads."""

    sequence: Sequence
    target: HandoffTarget
    push: Push | None = None
    held: list[int] = field(default_factory=list)
    # The places of those whose windowed parts are held, too.
    window: range = range(0)
    # Blocks of the sequence that were given to the push, or that the target has cached.
    pushed: int = 0
    # Pushed layers of the blocks that the running step computes.
    layers: int = 0
    fetching: asyncio.Task[None] | None = None
    closing: asyncio.Task[None] | None = None
    # The KV in vLLM's memory, which the target's vLLM reads. No block is pushed then.
    in_vllm: VllmBlocks | None = None


class PrefillStage(Stage):
    """Events of a prompt: the first token, then HandedOff or Failed."""

    commands = (Prefill,)
    scheduler: PrefillBatch
    # Whether prefixes are fetched from other workers' caches.
    fetches: ClassVar[bool] = True

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self.scheduler, self._build_steps = self._batch()
        self._fetcher = Fetcher(context)
        self._tiers = None if context.tiers is None else TierFetcher(context, context.tiers)
        self.inbound = self._fetcher.inbound
        self._relays: dict[Key, Relay] = {}
        # Pushes that are being cancelled.
        self._letting_go = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def _batch(self) -> tuple[PrefillBatch, Callable[[Reporter], Steps]]:
        """The sequences, and the loop that runs them."""
        context = self._context
        scheduler = PrefillScheduler(context.cache, context.config.prefill.chunk_tokens)
        return scheduler, lambda reporter: StepLoop(context, scheduler, reporter)

    def steps(self, reporter: Reporter) -> Steps:
        """The loop that runs the prompts."""
        return self._build_steps(reporter)

    def start(self, command: Start, session: RouterSession, matcher: Matcher | None) -> None:
        """Takes a prompt, and fetches its prefix first if this worker has tiers or the router names
        a source.
        """
        assert isinstance(command, Prefill)
        key, target = command.spec.key, command.target
        relay = Relay(
            self._context.sequence(command.spec, matcher),
            target,
            pushed=target.cached_tokens // self._context.cache.block_size,
        )
        self._context.sessions[key] = session
        self._relays[key] = relay
        # The scores of a prompt come from computing all of it.
        scored = relay.sequence.scores is not None
        # Other workers' blocks may lack their windowed parts.
        fetches = self.fetches and self._context.cache.shares
        if scored or not fetches or (command.source is None and self._tiers is None):
            self._schedule(relay)
        else:
            relay.fetching = self._spawn(self._fetch(relay, command.source))

    async def _fetch(self, relay: Relay, source: PrefixSource | None) -> None:
        """Fetches from the tiers, or from the source if it has more."""
        beyond = 0 if source is None else source.cached_tokens
        try:
            if self._tiers is not None:
                await self._tiers.fetch(relay.sequence, beyond=beyond)
            if source is not None and not relay.sequence.blocks and not relay.sequence.ended:
                await self._fetcher.fetch(relay.sequence, source, relay.target.transport)
        finally:
            # A sequence that waits for blocks may take those that the fetch has dropped.
            self._context.work.set()
        if not relay.sequence.ended:
            self._schedule(relay)

    def _schedule(self, relay: Relay) -> None:
        """Adds the sequence to the scheduler and opens its push. The two workers are then connected
        before the first blocks are computed.
        """
        relay.fetching = None
        spec = relay.sequence.spec
        key = spec.key
        self.scheduler.add(relay.sequence)
        try:
            relay.push = self._context.sender.open(
                key, relay.target, spec.adapter, len(spec.token_ids)
            )
        except Unimplemented as error:
            self.abort(key)
            self._context.fail(key, error.code, error.message)
        self._context.work.set()

    def stored(self, batch: list[Work], layers: int) -> None:
        """Pushes the layers that large chunks have stored so far, by groups of layers."""
        layout = self._context.runner.layout
        group = -(-len(layout.layers) // GROUPS)
        for work in batch:
            relay = self._relays.get(work.sequence.spec.key)
            if (
                relay is None
                or relay.push is None
                or relay.push.error is not None
                or layers - relay.layers < group
            ):
                continue
            end = self._filled(work)
            if (end - relay.pushed) * layout.block_bytes >= LARGE:
                self._push(relay, relay.push, end, layers)

    def _filled(self, work: Work) -> int:
        """Blocks of the sequence that are complete, or as full as they will be, at the end of the
        step.
        """
        sequence = work.sequence
        return (
            len(sequence.blocks)
            if work.sample
            else (sequence.num_computed + work.num_tokens) // self._context.cache.block_size
        )

    def _push(self, relay: Relay, push: Push, end: int, layers: int) -> None:
        """Pushes the blocks up to `end` in the layers up to `layers` that were not pushed yet."""
        if not relay.held:
            self._context.cache.pool.hold(relay.sequence.blocks)
            relay.held = list(relay.sequence.blocks)
        if end > relay.pushed and layers > relay.layers:
            self._hold_windows(relay, push.windows_from, end)
            blocks = relay.sequence.blocks[relay.pushed : end]
            push.send(relay.pushed, blocks, Layers(relay.layers, layers - relay.layers))
            relay.layers = layers

    def _hold_windows(self, relay: Relay, first: int, end: int) -> None:
        """Holds the windowed parts that the push reads, from block `first` on."""
        if self._context.cache.windows is None:
            return
        first = max(first, relay.pushed)
        held = relay.window or range(first, first)
        if end > held.stop:
            self._context.cache.pool.hold_windows(relay.held[held.stop : end])
            relay.window = range(held.start, end)

    def prompt_computed(self, sequence: Sequence, timings: PrefillTimings) -> None:
        """Measures how fast prompts are computed here."""
        computed = len(sequence.spec.token_ids) - timings.cached_tokens
        self._fetcher.cost_model.add_compute(computed, timings.compute_seconds)
        if self._tiers is not None:
            self._tiers.cost.add_compute(computed, timings.compute_seconds)

    def computed(self, sequence: Sequence, tokens: SequenceTokens | None) -> None:
        """Pushes the blocks that this step filled; after the last chunk, commits. Raises the error
        of the push.
        """
        relay = self._relays[sequence.spec.key]
        assert relay.push is not None, "a push is opened before the first step"
        if relay.push.error is not None:
            raise relay.push.error
        end = (
            sequence.num_computed // self._context.cache.block_size
            if tokens is None
            else len(sequence.blocks)
        )
        self._push(relay, relay.push, end, len(self._context.runner.layout.layers))
        relay.pushed, relay.layers = max(end, relay.pushed), 0
        if tokens is not None:
            self._finish(relay, tokens)

    def _finish(self, relay: Relay, tokens: SequenceTokens) -> None:
        """Starts the commit of a prompt that is computed."""
        self.scheduler.remove(relay.sequence)
        now = self._context.clock.now()
        relay.closing = self._spawn(self._commit(relay, tokens.token_ids[0], now))

    def abort(self, key: Key) -> None:
        """Ends a sequence, with its fetch, commit or push. The blocks stay held until the peer
        stops reading them.
        """
        relay = self._relays.pop(key, None)
        if relay is None:
            return
        if relay.fetching is not None:
            relay.sequence.ended = True
            relay.fetching.cancel()
        elif not relay.sequence.ended:
            self.scheduler.remove(relay.sequence)
        if relay.closing is not None:
            relay.closing.cancel()
        if relay.push is not None:
            self._spawn(self._let_go(relay, relay.push))
        self._context.work.set()

    def sequences(self) -> Iterator[Sequence]:
        """All sequences, including those that fetch or wait for their commit."""
        return (relay.sequence for relay in self._relays.values())

    async def close(self) -> None:
        """Ends pushes and connections."""
        await super().close()
        await self._context.sender.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def load(self) -> StageLoad:
        """The current counts. Pushes that are being cancelled count as running."""
        waiting = tuple(sequence for sequence in self.scheduler if sequence.started is None)
        now = self._context.clock.now()
        return StageLoad(
            running=len(self._relays) + self._letting_go - len(waiting),
            waiting=waiting,
            busy_share=self._context.engine.busy.share(now),
            prompt_tokens_per_second=self.scheduler.prompt_rate.per_second(now),
        )

    async def _commit(self, relay: Relay, first_token: int, prefill_done_at: float) -> None:
        assert relay.push is not None, "a commit follows the blocks"
        spec = relay.sequence.spec
        event: HandedOff | Failed
        try:
            handoff = await relay.push.commit(
                first_token, len(spec.token_ids), prefill_done_at, relay.in_vllm
            )
            event = HandedOff(*spec.key, handoff)
        except KvRelayError as error:
            event = Failed(
                *spec.key, error.code, f"hand-off to {relay.target.worker_id}: {error.message}"
            )
        del self._relays[spec.key]
        self._release(relay)
        self._context.finish(spec.key, event)

    async def _let_go(self, relay: Relay, push: Push) -> None:
        """Aborts the push and then releases the blocks, which must not change until the peer has
        stopped reading them.
        """
        self._letting_go += 1
        try:
            await push.abort()
        finally:
            self._letting_go -= 1
            self._release(relay)

    def _release(self, relay: Relay) -> None:
        self._context.cache.release(relay.held, relay.window)
        self._context.work.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
