"""The workers that a router knows, and what it has given each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvrelay.config.schema import ClusterConfig
from kvrelay.messages import SequenceTokens, TokenBatch
from kvrelay.types import ModelVersion, WorkerInfo
from router.core.lifecycle import Lifecycle
from router.core.path_policy import Assignment, WorkerView
from router.core.prefix_index import PrefixIndex
from router.core.queueing.preemption import Room
from router.core.workers.link_health import Links
from router.core.workers.worker_health import Health

# A worker that refused is asked again after that, or when it got rid of a sequence; doubles
FULL_FOR_S = (0.1, 2.0)
REFUSALS = 2  # one after the other: a worker has less room than this router's figures say
# After a preemption for that reason, since blocks come back with the end of a step
PREEMPT_AGAIN_S = 1.0
INDEX_BLOCKS = 65_536  # remembered of a worker that does not say how many it has
Hashes = Callable[[int], Sequence[bytes]]  # of a sequence, by block size


@dataclass(slots=True, eq=False)
class Worker:
    info: WorkerInfo
    sequences: int = 0  # of this router, that it decodes or will
    held_tokens: int = 0  # of these
    queued_tokens: int = 0  # of prompts, that it prefills
    full_until: float = 0.0
    refusals: int = 0  # one after the other
    preempted_at: float = -math.inf
    last_assigned: int = 0
    leader: tuple[str, int] | None = None  # first sequence of its last step
    stepped_at: float = 0.0


@dataclass(slots=True)
class Claim:
    """What one running request takes of its workers, as their figures have it."""

    decode: Worker
    prefill: Worker | None
    held_tokens: int
    queued_tokens: int


class Workers:
    """The figures are kept with each step of a request, so that placing one costs nothing for those
    that run.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._slots = config.decode.max_batch
        self._caches = config.kv.prefix_cache
        self.health = Health()
        self.links = Links()
        self._workers: dict[str, Worker] = {}
        self._index = PrefixIndex()
        self._assigned = 0

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def add(self, info: WorkerInfo) -> None:
        self._workers[info.worker_id] = Worker(info)
        self.health.found(info.worker_id, info.pool)

    def remove(self, worker_id: str) -> Worker:
        """Raises KeyError for one that is not known."""
        worker = self._workers.pop(worker_id)
        self._index.drop(worker_id)
        self.health.lost(worker_id)
        self.links.forget(worker_id)
        return worker

    def update(self, infos: Iterable[WorkerInfo]) -> None:
        """News of workers that are known."""
        for info in infos:
            worker = self._workers.get(info.worker_id)
            if worker is not None and worker.info.epoch == info.epoch:
                worker.info = info

    # What they were given

    def place(self, life: Lifecycle, assignment: Assignment, hashes: Hashes, now: float) -> Claim:
        self._assigned += 1
        self.links.used(assignment.prefill, assignment.decode, now)
        for worker_id in (assignment.prefill, assignment.decode):
            if worker_id:
                self._workers[worker_id].last_assigned = self._assigned
                # The other has it once that is handed over
                if worker_id == (assignment.prefill or assignment.decode):
                    self.remember(worker_id, hashes)
                self.health.placed(worker_id, now)
        decode = self._workers[assignment.decode]
        prefill = self._workers[assignment.prefill] if assignment.prefill else None
        claim = Claim(
            decode, prefill, life.num_tokens, assignment.uncached_tokens if prefill else 0
        )
        decode.sequences += 1
        decode.held_tokens += claim.held_tokens
        if prefill is not None:
            prefill.queued_tokens += claim.queued_tokens
        return claim

    def grown(self, claim: Claim, life: Lifecycle) -> int:
        """Brings the figures up to date; returns how many tokens have come."""
        if (
            claim.queued_tokens
            and claim.prefill is not None
            and life.state not in ("reserving", "prefilling")
        ):
            claim.prefill.queued_tokens -= claim.queued_tokens
            claim.queued_tokens = 0
        tokens = life.num_tokens - claim.held_tokens
        claim.held_tokens += tokens
        claim.decode.held_tokens += tokens
        return tokens

    def leave(self, claim: Claim) -> None:
        """The request has left its workers, so they may have room again."""
        claim.decode.sequences -= 1
        claim.decode.held_tokens -= claim.held_tokens
        claim.decode.full_until = 0.0
        if claim.prefill is not None:
            claim.prefill.queued_tokens -= claim.queued_tokens
            claim.prefill.full_until = 0.0

    def refused(self, worker_id: str, now: float) -> None:
        worker = self._workers[worker_id]
        worker.full_until = now + min(FULL_FOR_S[1], FULL_FOR_S[0] * 2.0**worker.refusals)
        worker.refusals = min(worker.refusals + 1, 10)

    def accepted(self, worker_id: str) -> None:
        self._workers[worker_id].refusals = 0

    def drains(self, worker_id: str) -> None:
        """It says so, ahead of the registry."""
        worker = self._workers[worker_id]
        worker.info = replace(worker.info, state="draining")

    def serves(self, model: ModelVersion) -> bool:
        """Whether a decode worker has that version of the model, in whatever state it is."""
        return any(
            one.info.pool == "decode" and one.info.model.is_same(model)
            for one in self._workers.values()
        )

    def all_serve(self, model: ModelVersion) -> bool:
        """Whether no worker has another version of the model."""
        return all(one.info.model.is_same(model) for one in self._workers.values())

    @property
    def any_decodes(self) -> bool:
        """Whether a decode worker is ready, of any version of the model."""
        return any(
            one.info.pool == "decode" and one.info.state == "ready"
            for one in self._workers.values()
        )

    # How they do

    def stepped(self, worker_id: str, batch: TokenBatch, now: float) -> None:
        """Times decode steps: from a batch to the next, if one sequence leads both."""
        worker = self._workers[worker_id]
        leader = (
            (batch.sequences[0].request_id, batch.sequences[0].attempt) if batch.sequences else None
        )
        if worker.info.pool == "decode" and leader is not None and leader == worker.leader:
            self.health.worked(worker_id, len(batch.sequences), now - worker.stepped_at, now)
        worker.leader = leader
        worker.stepped_at = now

    def prefilled(self, worker_id: str, life: Lifecycle, first: SequenceTokens, now: float) -> None:
        """Takes the account of a prefill worker."""
        if (
            first.prefill is not None
            and life.assignment is not None
            and worker_id == life.assignment.prefill
        ):
            computed = max(1, life.num_tokens - first.prefill.cached_tokens)
            self.health.worked(worker_id, computed, first.prefill.compute_seconds, now)

    def remember(self, worker_id: str, hashes: Hashes) -> None:
        """The worker's cache will hold this sequence, or does."""
        worker = self._workers.get(worker_id)
        if worker is not None and self._caches:
            info = worker.info
            self._index.add(
                worker_id, hashes(info.block_size), info.load.blocks_total or INDEX_BLOCKS
            )

    def preempted(self, worker_id: str, hashes: Hashes, now: float) -> None:
        """A request gives its place on the worker up. What it computed stays in the prefix cache
        for its return.
        """
        self._workers[worker_id].preempted_at = now
        self.remember(worker_id, hashes)

    # As the policy sees them

    def room(self, worker_id: str, now: float, soon_s: float) -> Room | None:
        """What is left of a decode worker; None for one that refused lately, and not often enough
        to be believed.
        """
        worker = self._workers[worker_id]
        tokens = worker.info.load.blocks_total * worker.info.block_size
        room = Room(
            worker_id,
            self._slots,
            self._slots - worker.sequences,
            tokens,
            tokens - worker.held_tokens,
            soon_s,
        )
        if now >= worker.full_until:
            return room
        if worker.refusals < REFUSALS or now < worker.preempted_at + PREEMPT_AGAIN_S:
            return None
        return replace(room, free_slots=min(room.free_slots, 0))

    def views(self, needed: int, hashes: Hashes, now: float) -> list[WorkerView]:
        """Of those that take new work, for a sequence of `needed` tokens."""
        views = []
        for worker_id, worker in self._workers.items():
            info = worker.info
            if info.state != "ready":
                continue
            room = info.load.blocks_total * info.block_size
            over = worker.sequences >= self._slots or bool(
                room and worker.held_tokens and worker.held_tokens + needed > room
            )
            # The last token is computed whatever the cache holds: its logits are wanted.
            names = hashes(info.block_size) if self._caches else []
            cached = min(self._index.match(worker_id, names) * info.block_size, needed - 1)
            views.append(
                WorkerView(
                    worker_id,
                    info.pool,
                    full=over or now < worker.full_until,
                    queued_tokens=worker.queued_tokens,
                    held_tokens=worker.held_tokens,
                    cached_tokens=cached,
                    last_assigned=worker.last_assigned,
                    address=info.address,
                    block_size=info.block_size,
                    sick=not self.health.fit(worker_id, now),
                    model=info.model,
                )
            )
        return views
