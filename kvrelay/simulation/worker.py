"""What the simulated workers of both pools have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.planning.profile import Profile
from kvrelay.protocol_version import FEATURES, KV_INDEX, ours
from kvrelay.simulation.agenda import Action, Agenda
from kvrelay.simulation.machine import Machine, Process
from kvrelay.simulation.prompts import SharedHashes
from kvrelay.simulation.scenario import Delays
from kvrelay.types.requests import SequenceSpec
from kvrelay.types.workers import PoolName, WorkerInfo, WorkerLoad, WorkerState
from kvrelay.worker.sequence import Sequence, Work
from kvrelay.worker.steps.measured_step_cost import StepCost
from kvrelay.worker_messages import Command, Event

_FEATURES = tuple(one for one in FEATURES if one != KV_INDEX)

Key = tuple[str, int]
# Times of a sequence's tokens, in seconds of the simulation.
Times = NDArray[np.float64]
# Sequences and seconds of a decode step.
StepTime = tuple[int, float]


class Cluster(Protocol):
    """What a worker reaches: its router and the other workers."""

    agenda: Agenda
    machine: Machine
    hashes: SharedHashes
    config: ClusterConfig
    delays: Delays

    def tell(
        self,
        worker: SimulatedWorker,
        event: Event,
        times: dict[str, Times],
        steps: SequenceOf[StepTime],
    ) -> None:
        """Sends an event to the router. `times`: of the tokens in it, by request. `steps`: the last
        steps, if the event is about a run of them.
        """
        ...

    def peer(self, worker_id: str) -> SimulatedWorker | None:
        """Returns a living worker, or None."""
        ...


class SimulatedWorker(ABC):
    """A worker: takes commands, runs steps of the time that its profile gives, sends events."""

    pool: PoolName

    def __init__(
        self, worker_id: str, epoch: int, profile: Profile, num_blocks: int, cluster: Cluster
    ) -> None:
        kv = cluster.config.pool_kv(self.pool)
        self.worker_id = worker_id
        self.profile = profile
        self.costs = profile.costs
        self.cluster = cluster
        self.cache = KvCache(num_blocks, kv.block_size, prefix_cache=kv.prefix_cache)
        self.block_bytes = kv.block_size * profile.kv_token_bytes
        self.alive = True
        self.draining = False
        self.started_at = cluster.agenda.now
        # Seconds of its steps.
        self.busy_s = 0.0
        self.process = Process(cluster.machine)
        self.step_cost = StepCost(cluster.agenda.now)
        self._info = WorkerInfo(
            worker_id=worker_id,
            pool=self.pool,
            epoch=epoch,
            state="ready",
            address=worker_id,
            model_id="simulated",
            layout_hash="",
            block_size=kv.block_size,
            block_bytes=self.block_bytes,
            host_id=worker_id,
            max_model_len=profile.max_model_len,
            load=WorkerLoad(blocks_total=num_blocks),
            # The router estimates the prefix caches. Updates of each would take most of the time.
            protocol=replace(ours(), features=_FEATURES),
        )

    @property
    def now(self) -> float:
        """Seconds of the simulation."""
        return self.cluster.agenda.now

    @property
    def state(self) -> WorkerState:
        """The state that the worker reports."""
        return "draining" if self.draining else "ready"

    def info(self) -> WorkerInfo:
        """The current heartbeat."""
        return replace(self._info, state=self.state, load=self.load())

    @abstractmethod
    def handle(self, command: Command) -> None:
        """Runs a command of the router."""

    @abstractmethod
    def load(self) -> WorkerLoad:
        """The load that the worker reports."""

    @abstractmethod
    def fail_all(self) -> None:
        """Hands all sequences back, at the end of a drain."""

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Whether the worker holds no sequence."""

    def tell(
        self,
        event: Event,
        times: dict[str, Times] | None = None,
        steps: SequenceOf[StepTime] = (),
    ) -> None:
        """Sends an event to the router."""
        self.cluster.tell(self, event, times or {}, steps)

    def while_alive(self, action: Action) -> Action:
        """Returns the action, which does nothing once the worker is dead."""

        def run() -> None:
            if self.alive:
                action()

        return run

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Runs an action of the worker later."""
        self.cluster.agenda.after(seconds, self.while_alive(action))

    def run_step(self, batch: list[Work], ended: Callable[[float], None]) -> None:
        """Runs a step. Calls `ended` with the seconds that it took."""
        begun = self.now
        kind: PoolName = "prefill" if any(_is_prompt(work) for work in batch) else "decode"
        (factor,) = self.process.step_factors(kind, 1)
        self.process.run(
            factor * self.step_seconds(batch),
            kind,
            self.while_alive(lambda: ended(self.now - begun)),
        )

    def sequence(self, spec: SequenceSpec) -> Sequence:
        """Returns a new sequence of this worker."""
        hasher = self.cluster.hashes.get(spec.request_id, self.cache.block_size)
        return Sequence(spec, self.now, hasher)

    def step_seconds(self, batch: list[Work]) -> float:
        """Returns the time of one step: the parts of all sequences, and the base of the dearest
        kind once, because a step reads the weights once.
        """
        costs = self.costs
        decoding = context = 0
        prompts_s = 0.0
        for work in batch:
            if not _is_prompt(work):
                decoding += 1
                context += len(work.sequence.tokens)
            else:
                more = costs.prefill_s(work.num_tokens, work.sequence.num_computed)
                prompts_s += more - costs.prefill_base_s
        base = max(
            costs.decode_base_s if decoding else 0.0,
            costs.prefill_base_s if decoding < len(batch) else 0.0,
        )
        answers_s = costs.decode_s(decoding, context) - costs.decode_base_s
        return base + answers_s + prompts_s + self.cluster.delays.step_s


def _is_prompt(work: Work) -> bool:
    return work.sequence.uncomputed != 1 or not work.sequence.num_emitted


def token_of(spec: SequenceSpec) -> int:
    """Returns the token that a sequence repeats as its answer. It differs between requests, so that
    equal prompts with different answers share no more than the prompt.
    """
    return spec.sampling.seed or 0
