"""The worker table: the router's known workers and the load that it has placed on each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from kvrelay.config.schema import ClusterConfig
from kvrelay.protocol_version import KV_INDEX
from kvrelay.types.requests import SamplingParams
from kvrelay.types.workers import POOLS, ModelVersion, WorkerInfo
from kvrelay.worker_messages import SequenceTokens, TokenBatch
from router.core.compatibility import features_of, follows, offers
from router.core.lifecycle import Lifecycle
from router.core.path_policy import Assignment
from router.core.prefixes.prefix_index import PrefixIndex
from router.core.prefixes.prompt_blocks import PromptBlocks
from router.core.queueing.preemption import Room
from router.core.request import Request
from router.core.worker_view import WorkerView
from router.core.workers.link_health import LinkHealth
from router.core.workers.worker_health import Health

# Shortest and longest time that a worker counts as full after a refusal. The time doubles with each
# consecutive refusal and ends when a request leaves the worker.
FULL_FOR_S = (0.1, 2.0)
# Consecutive refusals after which the router trusts the refusals over its own load figures.
REFUSALS = 2
# Delay before another preemption for that reason, since blocks are freed at the end of a step.
PREEMPT_AGAIN_S = 1.0
# Chunks of a tenant that a prefill worker has to compute before it gets no further prompt of the
# tenant. So a prompt goes to the worker that is free first, even to one that joins later.
BACKLOG_CHUNKS = 2
# The backlog of a fast worker lasts at least this long, in seconds: the time between two looks of
# the driver, and until the prompt arrives.
BACKLOG_S = 0.03
# Tenants whose prompts a prefill worker has before it gets no prompt of another tenant.
BACKLOG_TENANTS = 4
# Prompt tokens per second that a worker may report. Other rates are errors.
RATES = (0.01, 1e9)
# Index size for a worker that does not report its number of blocks.
INDEX_BLOCKS = 65_536
# Blocks of a sequence, with the hashes of a worker.
Blocks = Callable[[WorkerInfo], PromptBlocks]


@dataclass(slots=True, eq=False)
class Worker:
    """A worker's entry and this router's load on it."""

    info: WorkerInfo
    # This router's sequences that the worker decodes or will decode.
    sequences: int = 0
    # Tokens of these sequences.
    held_tokens: int = 0
    # Claims whose prompts the worker has yet to prefill, oldest first, and the tokens of these
    # prompts.
    prompts: dict[Claim, None] = field(default_factory=dict)
    queued_tokens: int = 0
    # Time at which the last of its prompts ended, or at which it got the first.
    computing_since: float = 0.0
    full_until: float = 0.0
    # Consecutive refusals.
    refusals: int = 0
    preempted_at: float = -math.inf
    last_assigned: int = 0
    # Whether the draining worker takes nothing more, not even the rest of an answer.
    closed: bool = False
    # First sequence of the worker's last step.
    leader: tuple[str, int] | None = None
    stepped_at: float = 0.0

    @property
    def prompt_rate(self) -> float | None:
        """The worker's rate in prompt tokens per second; None if unknown or absurd."""
        rate = self.info.load.prompt_tokens_per_second
        return rate if rate is None or rate == 0 or RATES[0] <= rate <= RATES[1] else None

    def backlog(self, tenant: str, priority: int, num_tokens: int, now: float) -> int:
        """Returns the prompt tokens that the worker computes before it has computed another prompt
        of this tenant and priority, with `num_tokens`.
        """
        if not self.prompts:
            return 0
        own, others = 0, dict[str, int]()
        for one in self.prompts:
            if one.tenant == tenant:
                own += one.queued_tokens if one.priority <= priority else 0
            elif one.priority <= priority:
                others[one.tenant] = others.get(one.tenant, 0) + one.queued_tokens
        ahead = own + sum(min(one, own + num_tokens) for one in others.values())
        return ahead - int(min(self._computed(now), ahead))

    def has_prompt_of(self, tenant: str) -> bool:
        """Whether the worker has yet to prefill a prompt of the tenant."""
        return any(one.tenant == tenant for one in self.prompts)

    def takes_prompt(self, tenant: str, priority: int, most: int, now: float) -> bool:
        """Whether the worker is about to need a prompt of this tenant and priority. A prefill
        worker gives each tenant the same time, so it is busy for a tenant with `most` tokens of its
        own. Less urgent prompts do not count.
        """
        if not self.prompts:
            return True
        ahead = [one for one in self.prompts if one.priority <= priority]
        own = [one for one in ahead if one.tenant == tenant]
        tenants = {one.tenant for one in ahead}
        if not own:
            return len(tenants) < BACKLOG_TENANTS
        computed = min(self._computed(now) / len(tenants), own[0].queued_tokens)
        backlog = sum(one.queued_tokens for one in own) - computed
        return backlog < max(most, BACKLOG_S * (self.prompt_rate or 0.0))

    def _computed(self, now: float) -> float:
        """Returns the tokens that the worker has probably computed since its last prompt ended."""
        return (self.prompt_rate or 0.0) * (now - self.computing_since)

    def queue_prompt(self, claim: Claim, now: float) -> None:
        """Adds the claim's prompt."""
        if not self.prompts:
            self.computing_since = now
        self.prompts[claim] = None
        self.queued_tokens += claim.queued_tokens

    def end_prompt(self, claim: Claim, now: float) -> None:
        """Removes the claim's prompt, which is computed or abandoned."""
        if claim in self.prompts:
            del self.prompts[claim]
            self.queued_tokens -= claim.queued_tokens
            self.computing_since = now


@dataclass(slots=True, eq=False)
class Claim:
    """The load of one running request on its workers, as counted in the table."""

    decode: Worker
    # The prefill worker, or the decode worker on the local path.
    prefill: Worker
    # Tokens with KV on the decode worker.
    held_tokens: int
    # Prompt tokens that have to be computed.
    queued_tokens: int
    tenant: str
    priority: int
    # Blocks of the prompt; None without a prefix cache.
    blocks: PromptBlocks | None = None
    # Tokens of prompt and answer.
    num_tokens: int = 0


class Workers:
    """Owns the worker table. The load figures change with each step of a request, so placing a
    request costs nothing per running request.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._slots = config.decode.max_batch
        self._backlog = {pool: BACKLOG_CHUNKS * config.pool(pool).chunk_tokens for pool in POOLS}
        self._caches = config.kv.prefix_cache
        # Tokens of an answer that have KV on a decode worker.
        eviction = config.kv.eviction
        self._kv_budget = math.inf if eviction is None else eviction.budget_tokens
        self.health = Health()
        self.link_health = LinkHealth()
        self._workers: dict[str, Worker] = {}
        self.index = PrefixIndex()
        self._assigned = 0

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, worker_id: str) -> Worker | None:
        """Returns the worker, or None if it is unknown."""
        return self._workers.get(worker_id)

    def add(self, info: WorkerInfo) -> None:
        """Adds a worker, or replaces the worker with the same id."""
        self._workers[info.worker_id] = Worker(info)
        self.index.open(info.worker_id, KV_INDEX in info.protocol.features)
        self.health.found(info.worker_id, info.pool)

    def remove(self, worker_id: str) -> Worker:
        """Removes a worker and returns it. Raises KeyError if it is unknown."""
        worker = self._workers.pop(worker_id)
        self.index.drop(worker_id)
        self.health.lost(worker_id)
        self.link_health.forget(worker_id)
        return worker

    def update(self, infos: Iterable[WorkerInfo]) -> None:
        """Updates the entries of known workers with the same epoch."""
        for info in infos:
            worker = self._workers.get(info.worker_id)
            if worker is not None and worker.info.epoch == info.epoch:
                worker.info = info

    # Load

    def place(self, life: Lifecycle, assignment: Assignment, blocks: Blocks, now: float) -> Claim:
        """Adds the request's load to the assigned workers and returns its claim."""
        self._assigned += 1
        self.link_health.used(assignment.prefill, assignment.decode, now)
        for worker_id in (assignment.prefill, assignment.decode):
            if worker_id:
                self._workers[worker_id].last_assigned = self._assigned
                # Only the worker that prefills is recorded here. The decode worker is recorded
                # after the hand-off.
                if worker_id == (assignment.prefill or assignment.decode):
                    self.remember(worker_id, blocks)
                self.health.placed(worker_id, now)
        decode = self._workers[assignment.decode]
        prefill = self._workers[assignment.prefill or assignment.decode]
        claim = Claim(
            decode,
            prefill,
            self.kv_tokens(life.request, life.num_tokens, decode.info),
            assignment.uncached_tokens,
            life.request.tenant.name,
            life.request.priority,
            blocks(prefill.info) if self._caches else None,
            life.num_tokens,
        )
        decode.sequences += 1
        decode.held_tokens += claim.held_tokens
        prefill.queue_prompt(claim, now)
        return claim

    def prompt_ended(self, claim: Claim, life: Lifecycle, now: float) -> bool:
        """Whether the prompt of a running request has just ended, so that its worker may take
        another.
        """
        if claim not in claim.prefill.prompts or life.state in ("reserving", "prefilling"):
            return False
        claim.prefill.end_prompt(claim, now)
        return True

    def grown(self, claim: Claim, life: Lifecycle) -> int:
        """Updates the load of a running request. Returns the number of new tokens."""
        tokens = life.num_tokens - claim.num_tokens
        held = self.kv_tokens(life.request, life.num_tokens, claim.decode.info)
        claim.decode.held_tokens += held - claim.held_tokens
        claim.held_tokens, claim.num_tokens = held, life.num_tokens
        return tokens

    def kv_tokens(self, request: Request, num_tokens: int, info: WorkerInfo) -> int:
        """The tokens for which a request's sequence of `num_tokens` tokens takes KV memory of a
        decode worker. The worker drops tokens beyond its budget, after the prompt, and the KV of
        some layers behind their windows.
        """
        kept = int(min(num_tokens, max(self._kv_budget, len(request.token_ids))))
        return info.counted_tokens(kept)

    def most_kv_tokens(self, request: Request, num_tokens: int, ids: Iterable[str]) -> int:
        """The most of `kv_tokens` on these decode workers."""
        infos = (self._workers[one].info for one in ids)
        return max(self.kv_tokens(request, num_tokens, info) for info in infos)

    def leave(self, claim: Claim, now: float) -> None:
        """Removes the request's load. The workers may have room again."""
        claim.decode.sequences -= 1
        claim.decode.held_tokens -= claim.held_tokens
        claim.decode.full_until = 0.0
        claim.prefill.end_prompt(claim, now)
        claim.prefill.full_until = 0.0

    def refused(self, worker_id: str, now: float) -> None:
        """Records a refusal: the worker counts as full for a while."""
        worker = self._workers[worker_id]
        worker.full_until = now + min(FULL_FOR_S[1], FULL_FOR_S[0] * 2.0**worker.refusals)
        worker.refusals = min(worker.refusals + 1, 10)

    def accepted(self, worker_id: str) -> None:
        """Records an accepted request: resets the consecutive refusals."""
        self._workers[worker_id].refusals = 0

    def drains(self, worker_id: str, closed: bool) -> None:
        """Marks the worker as draining when the worker reports it, before the registry does.
        `closed`: it does not even continue an answer that has begun.
        """
        worker = self._workers[worker_id]
        worker.info = replace(worker.info, state="draining")
        worker.closed = worker.closed or closed

    def serves(self, model: ModelVersion) -> bool:
        """Whether a decode worker in any state has this model version."""
        return any(
            one.info.pool == "decode" and one.info.model.is_same(model)
            for one in self._workers.values()
        )

    def all_serve(self, model: ModelVersion) -> bool:
        """Whether no worker has another model version."""
        return all(one.info.model.is_same(model) for one in self._workers.values())

    def any_follows(self, sampling: SamplingParams) -> bool:
        """Whether a decode worker in any state does what the sampling parameters say."""
        return any(
            one.info.pool == "decode" and follows(one.info, sampling)
            for one in self._workers.values()
        )

    def any_offers(self, name: str) -> bool:
        """Whether a decode worker in any state has the feature or adapter."""
        return any(one.info.pool == "decode" and offers(one.info, name) for one in self)

    def all_have(self, name: str) -> bool:
        """Whether every worker has the feature or adapter."""
        return all(offers(one.info, name) for one in self._workers.values())

    @property
    def any_decodes(self) -> bool:
        """Whether a decode worker of any model version is ready."""
        return any(
            one.info.pool == "decode" and one.info.state == "ready"
            for one in self._workers.values()
        )

    def _decodes(self, model: ModelVersion) -> bool:
        """Whether a decode worker of this model version is ready."""
        return any(
            one.info.pool == "decode"
            and one.info.state == "ready"
            and one.info.model.is_same(model)
            for one in self._workers.values()
        )

    # Measurements

    def stepped(self, worker_id: str, batch: TokenBatch, now: float) -> None:
        """Measures decode steps: the time between two batches that start with the same sequence."""
        worker = self._workers[worker_id]
        leader = (
            (batch.sequences[0].request_id, batch.sequences[0].attempt) if batch.sequences else None
        )
        if worker.info.pool == "decode" and leader is not None and leader == worker.leader:
            self.health.worked(worker_id, len(batch.sequences), now - worker.stepped_at, now)
        worker.leader = leader
        worker.stepped_at = now

    def prefilled(self, worker_id: str, life: Lifecycle, first: SequenceTokens, now: float) -> None:
        """Records the prefill time that a prefill worker reports."""
        if (
            first.prefill is not None
            and life.assignment is not None
            and worker_id == life.assignment.prefill
        ):
            computed = max(1, life.num_tokens - first.prefill.cached_tokens)
            self.health.worked(worker_id, computed, first.prefill.compute_seconds, now)

    def remember(self, worker_id: str, blocks: Blocks) -> None:
        """Records that the worker's prefix cache holds this sequence, or soon will. A worker that
        tells what it holds needs no record.
        """
        worker = self._workers.get(worker_id)
        if worker is not None and self._caches and not self.index.is_exact(worker_id):
            info = worker.info
            self.index.expect(worker_id, blocks(info), info.load.blocks_total or INDEX_BLOCKS)

    def preempted(self, worker_id: str, blocks: Blocks, now: float) -> None:
        """Records that a request gave up its place on the worker. The computed blocks stay in the
        prefix cache for the request's return.
        """
        self._workers[worker_id].preempted_at = now
        self.remember(worker_id, blocks)

    # Input of the policies

    def room(self, worker_id: str, now: float, soon_s: float) -> Room | None:
        """Returns the free capacity of a decode worker. None for a worker that refused a request
        recently, unless it refused REFUSALS times in a row.
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

    def has_prompt_of(self, tenant: str) -> bool:
        """Whether a prefill worker has yet to prefill a prompt of the tenant."""
        return any(
            one.info.pool == "prefill" and one.has_prompt_of(tenant)
            for one in self._workers.values()
        )

    def views(
        self,
        request: Request,
        needed: int,
        blocks: Blocks,
        now: float,
        model: ModelVersion | None = None,
    ) -> list[WorkerView]:
        """Returns the ready workers that follow the request's sampling parameters and have its
        adapter, as seen by the request, whose sequence has `needed` tokens.

        If `model` began the answer and no ready decode worker has it, draining workers continue
        the answer.
        """
        views = []
        limited = bool(features_of(request.sampling))
        none_ready = model is not None and not self._decodes(model)
        for worker_id, worker in self._workers.items():
            info = worker.info
            usable = info.state == "ready" or (
                none_ready and info.state == "draining" and not worker.closed
            )
            if not usable or (limited and not follows(info, request.sampling)):
                continue
            if request.adapter and request.adapter not in info.adapters:
                continue
            room = info.load.blocks_total * info.block_size
            over = worker.sequences >= self._slots or bool(
                room
                and worker.held_tokens
                and worker.held_tokens + self.kv_tokens(request, needed, info) > room
            )
            takes_prompt = worker.takes_prompt(
                request.tenant.name, request.priority, self._backlog[info.pool], now
            )
            if info.pool == "prefill":
                over = over or not takes_prompt
            stored = coming = 0
            if self._caches and not request.scores_prompt:
                computing = [one.blocks for one in worker.prompts if one.blocks is not None]
                stored, coming = self.index.predict(worker_id, blocks(info), needed, computing)
            views.append(
                WorkerView(
                    worker_id,
                    info.pool,
                    full=over or now < worker.full_until,
                    queued_tokens=worker.backlog(
                        request.tenant.name, request.priority, needed, now
                    ),
                    takes_prompt=takes_prompt,
                    prompt_rate=worker.prompt_rate,
                    held_tokens=worker.held_tokens,
                    cached_tokens=stored + coming,
                    coming_tokens=coming,
                    exact=self.index.is_exact(worker_id),
                    last_assigned=worker.last_assigned,
                    address=info.address,
                    host_id=info.host_id,
                    block_size=info.block_size,
                    sick=not self.health.fit(worker_id, now),
                    model=info.model,
                    windows=info.windows,
                )
            )
        return views
