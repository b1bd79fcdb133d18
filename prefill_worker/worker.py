"""A prefill worker: builds the KV of prompts chunk by chunk and pushes each chunk's KV to a decode
worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field

from kv_transfer.plan import Layers
from kv_transfer.prefix_export import PrefixExport
from kv_transfer.sender import Push, Sender
from kvrelay.clock import Clock
from kvrelay.engine.kvcache.prefix_cache import KvCache
from kvrelay.engine.runner import ModelRunner
from kvrelay.errors import KvRelayError, Unimplemented
from kvrelay.messages import (
    Abort,
    Command,
    Failed,
    HandedOff,
    HandoffTarget,
    Prefill,
    PrefixSource,
    SequenceTokens,
)
from kvrelay.types import WorkerLoad
from kvrelay.worker.base import Identity, Key, Worker
from kvrelay.worker.sequence import Sequence, Work
from kvrelay.worker.session import RouterSession
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
    # Blocks of the sequence that were given to the push, or that the target has cached.
    pushed: int = 0
    # Pushed layers of the blocks that the running step computes.
    layers: int = 0
    fetching: asyncio.Task[None] | None = None
    closing: asyncio.Task[None] | None = None


class PrefillWorker(Worker):
    """Commands: Prefill, Abort. Events: the first token, then HandedOff or Failed."""

    def __init__(
        self,
        identity: Identity,
        runner: ModelRunner,
        cache: KvCache,
        sender: Sender,
        fetcher: Fetcher | None = None,
        *,
        chunk_tokens: int,
        clock: Clock,
    ) -> None:
        self._scheduler = PrefillScheduler(cache, chunk_tokens)
        super().__init__(identity, runner, cache, self._scheduler, clock)
        self._sender = sender
        self.lending = PrefixExport(cache, sender, identity.epoch)
        self._fetcher = fetcher
        self._relays: dict[Key, Relay] = {}
        self._letting_go = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def lending_key(self) -> bytes:
        """The grant key of this worker's prefix export."""
        return self.lending.key

    def take(self, command: Command, session: RouterSession) -> None:
        """Runs a router's command; see the class for the commands. A repeated Prefill is
        ignored.
        """
        match command:
            case Prefill(spec):
                if spec.key not in self._relays and self.can_run(spec, session):
                    self._accept(command, session)
            case Abort(request_id, attempt):
                self.abort((request_id, attempt))
            case _:
                raise KvRelayError(f"a prefill worker does not accept {type(command).__name__}")

    def _accept(self, command: Prefill, session: RouterSession) -> None:
        spec, target = command.spec, command.target
        sequence = self.begin(spec)
        self.sessions[spec.key] = session
        self._relays[spec.key] = Relay(
            sequence, target, pushed=target.cached_tokens // self.cache.block_size
        )
        relay = self._relays[spec.key]
        if command.source is not None and self._fetcher is not None:
            relay.fetching = self._spawn(self._fetch(relay, command.source, self._fetcher))
        else:
            self._schedule(relay)

    async def _fetch(self, relay: Relay, source: PrefixSource, fetcher: Fetcher) -> None:
        await fetcher.fetch(relay.sequence, source, relay.target.transport)
        if not relay.sequence.ended:
            self._schedule(relay)

    def _schedule(self, relay: Relay) -> None:
        """Adds the sequence to the scheduler and opens its push. The two workers are then connected
        before the first blocks are computed.
        """
        relay.fetching = None
        self._scheduler.add(relay.sequence)
        try:
            relay.push = self._sender.open(relay.sequence.spec.key, relay.target)
        except Unimplemented as error:
            self.fail(relay.sequence.spec.key, error.code, error.message)
        self.steps.wake()

    def stored(self, batch: list[Work], layers: int) -> None:
        """Pushes the layers that large chunks have stored so far, by groups of layers."""
        group = -(-len(self.runner.layout.layers) // GROUPS)
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
            if (end - relay.pushed) * self.runner.layout.block_bytes >= LARGE:
                self._push(relay, relay.push, end, layers)

    def _filled(self, work: Work) -> int:
        """Blocks of the sequence that are complete, or as full as they will be, at the end of the
        step.
        """
        sequence = work.sequence
        return (
            len(sequence.blocks)
            if work.sample
            else (sequence.num_computed + work.num_tokens) // self.cache.block_size
        )

    def _push(self, relay: Relay, push: Push, end: int, layers: int) -> None:
        """Pushes the blocks up to `end` in the layers up to `layers` that were not pushed yet."""
        if not relay.held:
            self.cache.pool.hold(relay.sequence.blocks)
            relay.held = list(relay.sequence.blocks)
        if end > relay.pushed and layers > relay.layers:
            blocks = relay.sequence.blocks[relay.pushed : end]
            push.send(relay.pushed, blocks, Layers(relay.layers, layers - relay.layers))
            relay.layers = layers

    def advanced(self, sequence: Sequence, tokens: SequenceTokens | None) -> None:
        """Pushes the blocks that this step filled; after the last chunk, commits."""
        key = sequence.spec.key
        relay = self._relays[key]
        if tokens is not None and tokens.finish_reason is not None:
            # The answer is complete, so there is nothing to hand over.
            self.abort(key)
            return
        assert relay.push is not None, "a push is opened before the first step"
        if relay.push.error is not None:
            self.fail(key, relay.push.error.code, relay.push.error.message)
            return
        end = (
            sequence.num_computed // self.cache.block_size
            if tokens is None
            else len(sequence.blocks)
        )
        self._push(relay, relay.push, end, len(self.runner.layout.layers))
        relay.pushed, relay.layers = max(end, relay.pushed), 0
        if tokens is not None:
            self._learn(sequence, tokens)
            self._scheduler.remove(sequence)
            relay.closing = self._spawn(self._commit(relay, tokens.token_ids[0], self.clock.now()))

    def _learn(self, sequence: Sequence, tokens: SequenceTokens) -> None:
        if self._fetcher is not None and tokens.prefill is not None:
            computed = len(sequence.spec.token_ids) - tokens.prefill.cached_tokens
            self._fetcher.worth.computed(computed, tokens.prefill.compute_seconds)

    def abort(self, key: Key) -> None:
        """Ends a sequence, with its fetch, commit or push. The blocks stay held until the peer
        stops reading them.
        """
        relay = self._relays.pop(key, None)
        if relay is None:
            return
        del self.sessions[key]
        if relay.fetching is not None:
            relay.sequence.ended = True
            relay.fetching.cancel()
        elif not relay.sequence.ended:
            self._scheduler.remove(relay.sequence)
        if relay.closing is not None:
            relay.closing.cancel()
        if relay.push is not None:
            self._spawn(self._let_go(relay, relay.push))
        self.steps.wake()

    def sequences(self) -> Iterator[Sequence]:
        """All sequences, including those that fetch or wait for their commit."""
        return (relay.sequence for relay in self._relays.values())

    async def close(self) -> None:
        """Ends pushes and connections, then releases the KV memory."""
        if self._fetcher is not None:
            await self._fetcher.receiver.close()
        await self._sender.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().close()

    def load(self) -> WorkerLoad:
        """The current counts. Pushes that are being cancelled count as running."""
        waiting = [sequence for sequence in self._scheduler if sequence.started is None]
        return self.measured(
            running=len(self._relays) + self._letting_go - len(waiting),
            waiting=waiting,
            busy_share=self.steps.busy.share(self.clock.now()),
        )

    async def _commit(self, relay: Relay, first_token: int, prefill_done_at: float) -> None:
        assert relay.push is not None, "a commit follows the blocks"
        spec = relay.sequence.spec
        event: HandedOff | Failed
        try:
            handoff = await relay.push.commit(first_token, len(spec.token_ids), prefill_done_at)
            event = HandedOff(*spec.key, handoff)
        except KvRelayError as error:
            event = Failed(
                *spec.key, error.code, f"hand-off to {relay.target.worker_id}: {error.message}"
            )
        del self._relays[spec.key]
        session = self.sessions.pop(spec.key)
        self._release(relay)
        session.send(event)

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
        self.cache.release(relay.held)
        self.steps.wake()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
