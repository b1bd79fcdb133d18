"""What the worker and its stage share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

from kv_transfer.sender import Sender
from kvrelay.clock import Clock
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.matcher import Matcher
from kvrelay.engine.sampling.prompt_scores import PromptScores
from kvrelay.engine.sampling.thinking import thinking_budget
from kvrelay.errors import Code
from kvrelay.types.control_plane import Claim
from kvrelay.types.requests import SequenceSpec
from kvrelay.types.workers import PoolName
from kvrelay.worker.sequence import Sequence
from kvrelay.worker.served_model import ServedModel
from kvrelay.worker.session import RouterSession
from kvrelay.worker.steps.engine_thread import EngineThread
from kvrelay.worker.steps.step_thread import StepThread
from kvrelay.worker.tiers.tier_store import TierStore
from kvrelay.worker_messages import Event, Failed

Key = tuple[str, int]
"""Identifies one attempt of a request: request id, attempt."""


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


class WorkerContext:
    """Identity, engine, block cache and sessions of one worker. Lives on one event loop."""

    def __init__(
        self,
        identity: Identity,
        config: ClusterConfig,
        runner: ServedModel,
        cache: KvCache,
        sender: Sender,
        clock: Clock,
        tiers: TierStore | None = None,
        engine: StepThread | None = None,
        draft: ModelRunner | None = None,
    ) -> None:
        """engine: runs the steps; None for the native engine, whose `runner` is a ModelRunner.
        draft: the model that drafts tokens, which runs in the same thread.
        """
        self.draft = draft
        self.identity = identity
        self.config = config
        self.runner = runner
        self.cache = cache
        self.sender = sender
        self.clock = clock
        # Where evicted blocks go; None without tiers.
        self.tiers = tiers
        self.engine = engine or EngineThread(cast(ModelRunner, runner), clock)
        # The attempts on this worker, with the sessions of their routers. An attempt is in here
        # from the command that brings it until its last event.
        self.sessions: dict[Key, RouterSession] = {}
        # Set when there may be work for the step loop: a sequence arrived, or blocks were released.
        self.work = asyncio.Event()

    def sequence(self, spec: SequenceSpec, matcher: Matcher | None) -> Sequence:
        """Returns a new sequence that arrives now. matcher: of its guidance, if it has any."""
        count, scores = spec.sampling.prompt_logprobs, None
        if count is not None and not spec.num_emitted:
            scores = PromptScores(spec.token_ids, min(count, self.runner.vocab_size))
        hasher = self.cache.hasher(spec.salt, spec.adapter)
        thinking = thinking_budget(spec.sampling, spec.prompt_len)
        return Sequence(spec, self.clock.now(), hasher, matcher, thinking, scores)

    def finish(self, key: Key, event: Event) -> None:
        """Sends the last event of an attempt, and forgets its session."""
        self.sessions.pop(key).send(event)

    def fail(self, key: Key, code: Code, message: str) -> None:
        """Sends the error of an attempt, and forgets its session."""
        self.finish(key, Failed(*key, code, message))
