"""The interface of the two stages of a request: prefill and decode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from kvrelay.engine.kvcache.block_pool import BlockPool
from kvrelay.engine.sampling.matcher import Matcher
from kvrelay.types.requests import PrefillTimings
from kvrelay.worker.cache_feed import FindableBlocks
from kvrelay.worker.context import Key, WorkerContext
from kvrelay.worker.inbound_kv import InboundKv
from kvrelay.worker.sequence import Sequence, Work
from kvrelay.worker.session import RouterSession
from kvrelay.worker.steps.step_loop import Reporter, Steps
from kvrelay.worker_messages import Command, Prefill, Renew, Reserve, RunLocal, SequenceTokens

Start = Reserve | Prefill | RunLocal
"""A command that brings a sequence."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """The KV blocks of an engine: all of them, those in use, and unused ones with cached KV."""

    total: int
    held: int
    cached: int

    def with_pool(self, pool: BlockPool) -> BlockCounts:
        """These blocks and those of the pool."""
        total, held, cached = pool.counts
        return BlockCounts(self.total + total, self.held + held, self.cached + cached)


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The part of a worker's load that its stage knows."""

    running: int
    waiting: tuple[Sequence, ...]
    # Utilisation in the last seconds: 0 to 1.
    busy_share: float
    leases: int = 0
    blocks_leased: int = 0
    preemptions: int = 0
    # Tokens whose KV sequences dropped since the start.
    dropped_tokens: int = 0
    # Rate at which a prompt would be computed now: 0 if answers leave no time, None if unknown.
    prompt_tokens_per_second: float | None = None
    # None: the blocks of the worker's cache.
    blocks: BlockCounts | None = None


class Stage(ABC):
    """What a worker of one pool does with its sequences.

    The worker calls the stage. The stage answers through the sessions of its context, and never
    calls the worker.
    """

    # The commands of the stage; Abort is a command of every stage.
    commands: ClassVar[tuple[type[Command], ...]]
    # Features of the protocol that the engine does not have.
    lacks: frozenset[str] = frozenset()
    inbound: InboundKv
    # The blocks of the engine's prefix cache; None: those of the worker's cache.
    findable: FindableBlocks | None = None

    @abstractmethod
    def steps(self, reporter: Reporter) -> Steps:
        """The loop that runs the steps of this stage."""

    def check_integrity(self) -> None:
        """Checks the accounting of what the worker's cache does not know. Raises IntegrityError."""
        return

    @abstractmethod
    def start(self, command: Start, session: RouterSession, matcher: Matcher | None) -> None:
        """Takes a new sequence, or refuses it through the session. matcher: of its guidance, if it
        has any.
        """

    def repeat(self, key: Key, session: RouterSession) -> None:
        """Answers a repeated command. Does nothing unless a stage says otherwise."""
        return

    def renew(self, command: Renew) -> None:
        """Renews leases. Does nothing if the stage grants none."""
        return

    @abstractmethod
    def abort(self, key: Key) -> None:
        """Ends a sequence and frees what it holds. Does nothing if the sequence is unknown."""

    def stored(self, batch: list[Work], layers: int) -> None:
        """Called when the first `layers` layers have stored the KV of the running step."""
        return

    def prompt_computed(self, sequence: Sequence, timings: PrefillTimings) -> None:
        """Called after the step that computed the rest of a prompt, for measurements."""
        return

    def computed(self, sequence: Sequence, tokens: SequenceTokens | None) -> None:
        """Called after a step computed a part of `sequence`, unless the answer is complete.
        `tokens` are the samples, or None. Raises the KvRelayError that ends the attempt.
        """
        return

    @abstractmethod
    def sequences(self) -> Iterable[Sequence]:
        """All sequences of the stage."""

    def keep_house(self, now: float) -> None:
        """Ends what has expired. Called often, also while the worker is idle."""
        return

    @abstractmethod
    def load(self) -> StageLoad:
        """The current load."""

    async def close(self) -> None:
        """Ends all transfers. After the return, nothing reads or writes the KV memory."""
        await self.inbound.receiver.close()


BuildStage = Callable[[WorkerContext], Stage]
