"""Scheduling of all requests of one router on its known workers. Pure, like the lifecycles that it
drives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import count

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.kvcache.block_hashes import HASH_BYTES, BlockHasher
from kvrelay.errors import FailedPrecondition, KvRelayError
from kvrelay.tenants import Tenant
from kvrelay.types.workers import WorkerInfo
from kvrelay.worker_messages import (
    DRAINING,
    CacheUpdate,
    Event,
    Failed,
    HandedOff,
    Refused,
    Renew,
    Reserved,
    ResyncCache,
    TokenBatch,
)
from router.core.admission import Admission
from router.core.effects import Effect, Notice, Send
from router.core.lifecycle import Lifecycle, Settings
from router.core.model_versions import check_model, model_gone_error, model_is_gone
from router.core.placement import Placement
from router.core.prefixes.prefix_index import PrefixIndex
from router.core.queueing.fair_queue import Share, Ticket
from router.core.recent_requests import RecentRequests
from router.core.request import Request
from router.core.request_record import Entry
from router.core.request_table import Requests
from router.core.retry_budget import RetryBudget
from router.core.workers.blame import blame, went_well
from router.core.workers.quarantine import Quarantine
from router.core.workers.worker_health import Sickness


class Dispatcher:
    """Owns every request from `submit` to its End. Requests wait in a bounded queue until workers
    have room.

    Each method takes the time in seconds and returns effects. The caller carries out the effects in
    order.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        hash_bytes: int = HASH_BYTES,
        hasher_of: Callable[[Request, int], BlockHasher] | None = None,
    ) -> None:
        """`hasher_of` returns the hasher of a request for a block size, so that a simulation hashes
        each prompt once. Default: a new hasher with `hash_bytes`.
        """
        self._config = config
        self._hash_bytes = hash_bytes
        self._hasher_of = hasher_of
        self._settings = Settings(
            config.router.max_attempts, config.transfer.lease_s, config.transfer.transport
        )
        self._requests = requests = Requests(config)
        self._settle = requests.settle
        self._entries, self._running = requests.entries, requests.running
        self._workers, self._queue = requests.workers, requests.queue
        self._throughput = requests.throughput
        self.admission = Admission(self._queue, self._throughput, config.router.max_queue)
        self._placement = Placement(config, requests, self.admission)
        self._numbers = count(1)
        self._renew_at = 0.0
        self.quarantine = Quarantine()
        self.retries = RetryBudget()

    # State for observers.

    @property
    def preemptions(self) -> int:
        """Number of preemptions so far."""
        return self._placement.preemptions

    @property
    def unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._entries)

    @property
    def running(self) -> int:
        """Number of requests with workers."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the requests in the queue."""
        return self._queue.tokens

    @property
    def recent(self) -> RecentRequests:
        """The requests that have begun on a worker, and the tokens of the last ones."""
        return self._requests.recent

    @property
    def prompts_wait(self) -> bool:
        """Whether requests wait for a prefill worker that is about to need one."""
        return self._placement.wait.for_prefill

    @property
    def waiting_for_prefill(self) -> tuple[int, int]:
        """Number and tokens of the requests in the queue that wait for a prefill worker. They are
        counted in proportion to the time in which decode workers had room.
        """
        share = self._placement.bottleneck.prefill_share
        requests, tokens = self._queue.deferred
        return round(requests * share), round(tokens * share)

    @property
    def waiting_at_limit(self) -> tuple[int, int]:
        """Number and tokens of the requests in the queue that no worker would serve sooner, because
        their tenant has reached its limit on running requests.
        """
        return self._queue.capped

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """Entries of all known workers."""
        return tuple(one.info for one in self._workers)

    @property
    def index(self) -> PrefixIndex:
        """What the workers' prefix caches hold."""
        return self._workers.index

    @property
    def sick(self) -> tuple[Sickness, ...]:
        """The workers that this router currently treats as sick."""
        return tuple(self._workers.health.sick())

    # Requests

    def submit(self, request: Request, now: float) -> tuple[Lifecycle, list[Effect]]:
        """Admits a request and tries to place it. Returns its lifecycle and the effects.

        Raises FailedPrecondition if the request id is in use, the request is quarantined, or no
        worker serves the model version of its tokens. Raises ResourceExhausted if admission control
        rejects the request.
        """
        if request.request_id in self._entries:
            raise FailedPrecondition(
                f"request_id {request.client_id!r} is used by a request in progress; choose "
                "another",
                field="request_id",
            )
        self._check_quarantine(request, now)
        check_model(request, self._workers)
        share = self._queue.share(request.tenant)
        life = Lifecycle(request, self._settings, self.retries)
        life.timeline.mark("tokenize", now)
        ticket = Ticket(next(self._numbers), request.request_id, request.priority, life.num_tokens)
        entry = Entry(life, ticket, share, partial(self._hasher, request))
        effects: list[Effect] = []
        if request.complete is None and not self._placement.overtakes(entry, now):
            effects = self._make_room(request, share, now)
        self._entries[request.request_id] = entry
        if request.complete is not None:
            return life, self._settle(entry, life.complete(request.complete, now), now)
        effects += self._settle(entry, [], now)
        # Nothing else has changed since the last pump, and a request of the same tenant is first.
        if self._placement.blocked and self._queue.is_behind(ticket, share):
            return life, effects
        return life, effects + self.pump(now)

    def check_room(self, tenant: Tenant, priority: int = 0, requests: int = 1) -> None:
        """Raises ResourceExhausted if the queue is full and one of so many requests of this tenant
        and priority would be rejected.
        """
        self.admission.check_room(self._queue.share(tenant), priority, requests)

    def cancel(self, request_id: str, error: KvRelayError, now: float) -> list[Effect]:
        """Ends the request with the error. Does nothing if the request has ended."""
        entry = self._entries.get(request_id)
        if entry is None:
            return []
        was_behind = self._placement.blocked and self._queue.is_behind(entry.ticket, entry.share)
        effects = self._settle(entry, entry.life.cancel(error), now)
        return effects if was_behind else effects + self.pump(now)

    def stop(self, request_id: str, now: float) -> list[Effect]:
        """Ends the request as finished, with reason "stop". Does nothing if the request has
        ended.
        """
        entry = self._entries.get(request_id)
        return (
            []
            if entry is None
            else self._settle(entry, entry.life.complete("stop", now), now) + self.pump(now)
        )

    # Workers

    def worker_found(self, info: WorkerInfo, now: float) -> list[Effect]:
        """Adds a reachable worker. A worker with a known id replaces the old worker, which is
        lost.
        """
        effects = self.worker_lost(info.worker_id, now) if info.worker_id in self._workers else []
        self._workers.add(info)
        self._throughput.forget_rate()
        return effects + self.pump(now)

    def worker_lost(self, worker_id: str, now: float, expected: bool = False) -> list[Effect]:
        """Removes the worker and retries its requests on other workers. An `expected` loss counts
        against neither the requests nor the worker.
        """
        if worker_id not in self._workers:
            return []
        expected = self._workers.remove(worker_id).info.state == "draining" or expected
        self._throughput.forget_rate()
        effects: list[Effect] = []
        begun = float("-inf")
        for entry in list(self._running.values()):
            if worker_id in entry.life.holders:
                begun = max(begun, entry.attempt_begun)
            effects += self._settle(entry, entry.life.worker_lost(worker_id, expected, now), now)
            if entry.life.crashes.is_poison:
                self.quarantine.add(entry.life.request, now)
        if not expected:
            effects += _notices(
                (
                    worker_id,
                    self._workers.health.failed(worker_id, begun, "it was lost", now),
                )
            )
        return effects + self.pump(now)

    def workers_changed(self, infos: Iterable[WorkerInfo], now: float) -> list[Effect]:
        """Updates the state and load of known workers."""
        self._workers.update(infos)
        return self.pump(now)

    def stepped(self, worker_id: str, size: int, seconds: float, now: float) -> None:
        """Records a decode step of `size` sequences that took `seconds`, for a simulation, which
        reports the tokens of several steps at once.
        """
        if worker_id in self._workers:
            self._workers.health.worked(worker_id, size, seconds, now)

    def on_event(self, worker_id: str, event: Event, now: float) -> list[Effect]:
        """Handles a worker's event. Events of unknown workers are dropped."""
        if worker_id not in self._workers:
            return []
        if isinstance(event, CacheUpdate):
            lost = self._workers.index.apply(worker_id, event, now)
            return [Send(worker_id, ResyncCache())] if lost else []
        if isinstance(event, TokenBatch):
            effects = self._on_tokens(worker_id, event, now)
        else:
            effects = self._on_event(worker_id, event, now)
        return effects + self.pump(now) if self._requests.freed and self._queue else effects

    def tick(self, now: float) -> list[Effect]:
        """Handles timeouts. Call it several times within the shortest of lease, deadline and retry
        delay.
        """
        effects: list[Effect] = []
        for entry in list(self._entries.values()):
            if now >= entry.life.request.deadline:
                effects += self._placement.expire(entry, now)
            elif model_is_gone(entry, self._workers, now):
                effects += self._settle(entry, entry.life.cancel(model_gone_error(entry.life)), now)
            else:
                effects += self._settle(entry, entry.life.tick(now), now)
        if now >= self._renew_at:
            self._renew_at = now + self._settings.lease_seconds / 4
            effects += self._renewals()
        return effects + _notices(*self._workers.health.judge(now)) + self.pump(now)

    def pump(self, now: float) -> list[Effect]:
        """Places waiting requests.

        While `prompts_wait`, call it as often as a prefill worker may come to need a prompt.
        """
        return self._placement.pump(now)

    # Events

    def _on_tokens(self, worker_id: str, batch: TokenBatch, now: float) -> list[Effect]:
        effects: list[Effect] = []
        self._workers.stepped(worker_id, batch, now)
        troubled = self._workers.health.troubled(worker_id)
        for sequence in batch.sequences:
            entry = self._entries.get(sequence.request_id)
            if entry is None:
                continue
            if sequence.prefill is not None or troubled:
                effects += _notices(*went_well(self._workers, worker_id, entry, sequence, now))
            life = entry.life
            decoding = life.state == "decoding"
            effects += life.on_event(worker_id, sequence, now)
            if decoding and life.state == "decoding":
                self._requests.charge(entry, now)
            else:
                self._settle(entry, [], now)
        return effects

    def _on_event(
        self, worker_id: str, event: Reserved | Refused | HandedOff | Failed, now: float
    ) -> list[Effect]:
        entry = self._entries.get(event.request_id)
        if entry is None or not entry.life.is_live(worker_id, event.attempt):
            return []
        placed = entry.life.assignment
        assert placed is not None, "a live attempt has workers"
        effects = self._settle(entry, entry.life.on_event(worker_id, event, now), now)
        if isinstance(event, Failed) and event.drains:
            self._workers.drains(worker_id, closed=True)
        elif isinstance(event, Refused) and event.reason == DRAINING:
            self._workers.drains(worker_id, closed=bool(entry.life.tokens))
        elif isinstance(event, Refused):
            self._workers.refused(worker_id, now)
        elif isinstance(event, Reserved):
            self._workers.accepted(worker_id)
        elif isinstance(event, HandedOff):
            self._workers.link_health.worked(placed.prefill, placed.decode)
            self._workers.remember(placed.decode, entry.blocks)
        elif isinstance(event, Failed) and event.of_sequence:
            # The next attempt shows whether the worker or the request is at fault.
            entry.fault_begun = entry.attempt_begun
        elif isinstance(event, Failed):
            effects += _notices(*blame(self._workers, worker_id, placed, entry, event, now))
        return effects

    def _hasher(self, request: Request, block_size: int, layout_hash: str) -> BlockHasher:
        if self._hasher_of is not None:
            return self._hasher_of(request, block_size)
        return BlockHasher(
            block_size,
            request.salt,
            model=layout_hash,
            adapter=request.adapter,
            hash_bytes=self._hash_bytes,
        )

    # Accounting

    def _check_quarantine(self, request: Request, now: float) -> None:
        try:
            self.quarantine.check(request, now)
        except FailedPrecondition:
            self.admission.rejected["quarantined"] += 1
            raise

    def _make_room(self, request: Request, share: Share, now: float) -> list[Effect]:
        """Makes room in the queue for the request and returns the effects of a displaced request.
        Raises ResourceExhausted if the request itself has to go.
        """
        if not self._placement.wait.no_worker:
            max_tokens, time_left = request.planned_tokens, request.deadline - now
            self.admission.check_time(share, request.priority, max_tokens, time_left)
        displaced = self.admission.check_room(share, request.priority)
        return (
            []
            if displaced is None
            else self._placement.turn_away(
                displaced,
                "queue_full",
                "requests of higher priority or smaller share filled the queue; retry later",
                now,
            )
        )

    def _renewals(self) -> list[Effect]:
        leases: dict[str, list[int]] = {}
        for entry in self._running.values():
            life = entry.life
            if life.lease_id is not None and life.assignment is not None:
                leases.setdefault(life.assignment.decode, []).append(life.lease_id)
        return [
            Send(worker, Renew(tuple(ids), self._settings.lease_seconds))
            for worker, ids in leases.items()
        ]


def _notices(*found: tuple[str, str]) -> list[Effect]:
    """Returns a notice for each pair with a text."""
    return [Notice(worker_id, text) for worker_id, text in found if text]
