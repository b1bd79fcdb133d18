"""Scheduling of all requests of one router on its known workers. Pure, like the lifecycles that it
drives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, count

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.kvcache.block_hashes import HASH_BYTES, BlockHasher
from kvrelay.errors import FailedPrecondition, KvRelayError
from kvrelay.messages import (
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
from kvrelay.tenants import Tenant
from kvrelay.types.workers import WorkerInfo
from router.core.admission import Admission, Rejection
from router.core.effects import Effect, Notice, Preempted, Send
from router.core.lifecycle import Lifecycle, Settings
from router.core.limited_choice import Demand, demands, limiting, unsupported
from router.core.model_versions import check_model, model_gone_error, model_is_gone
from router.core.path_policy import Assignment, Wait, assign
from router.core.path_prediction import Outlook, outlook_of
from router.core.prefixes.prefix_index import PrefixIndex
from router.core.queueing.batch_slots import make_way, views_for
from router.core.queueing.fair_queue import FairQueue, Share, Ticket
from router.core.queueing.preemption import Preemption
from router.core.queueing.prefill_gate import PrefillGate
from router.core.request import Request
from router.core.request_record import Entry
from router.core.retry_budget import RetryBudget
from router.core.throughput import Throughput
from router.core.workers.blame import blame, went_well
from router.core.workers.quarantine import Quarantine
from router.core.workers.worker_health import Sickness
from router.core.workers.worker_table import Workers

# Delay before the next search for a preemption, after a search without a victim. In seconds.
PREEMPT_POLL_S = 0.1


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
        self._entries: dict[str, Entry] = {}
        # Entries with workers.
        self._running: dict[str, Entry] = {}
        # Running entries that may have killed a worker.
        self._suspects: dict[str, Entry] = {}
        self._workers = Workers(config)
        self._queue = FairQueue()
        self._throughput = Throughput()
        self._numbers = count(1)
        # Attempt numbers are unique in this router, so an event cannot match an attempt of an
        # earlier request with the same id.
        self._attempts = count(1)
        # Whether a request has left its workers, or a prefill worker has ended a prompt, since the
        # last run of the queue.
        self._freed = False
        self._renew_at = 0.0
        # Time of the next allowed search for a preemption. Its cost is linear in the number of
        # requests.
        self._preempt_at = 0.0
        self._wait = Wait("no decode worker is ready", no_worker=True)
        self.admission = Admission(self._queue, self._throughput, config.router.max_queue)
        self.preemptions = 0
        self.quarantine = Quarantine()
        self.retries = RetryBudget()

    # State for observers.

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
    def prompts_wait(self) -> bool:
        """Whether requests wait for a prefill worker that is about to need one."""
        return self._wait.for_prefill

    @property
    def waiting_for_prefill(self) -> tuple[int, int]:
        """Number and tokens of the requests in the queue that wait for a prefill worker. Zeros
        while decode workers have no room either.
        """
        return self._queue.deferred if self._wait.for_prefill else (0, 0)

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
        if request.complete is None and not self._overtakes(entry, now):
            effects = self._make_room(request, share, now)
        self._entries[request.request_id] = entry
        if request.complete is not None:
            return life, self._settle(entry, life.complete(request.complete, now), now)
        return life, effects + self._settle(entry, [], now) + self.pump(now)

    def check_room(self, tenant: Tenant, priority: int = 0) -> None:
        """Raises ResourceExhausted if the queue is full and a request of this tenant and priority
        would be rejected.
        """
        self.admission.check_room(self._queue.share(tenant), priority)

    def cancel(self, request_id: str, error: KvRelayError, now: float) -> list[Effect]:
        """Ends the request with the error. Does nothing if the request has ended."""
        entry = self._entries.get(request_id)
        return (
            []
            if entry is None
            else self._settle(entry, entry.life.cancel(error), now) + self.pump(now)
        )

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
                (worker_id, self._workers.health.failed(worker_id, begun, "it was lost", now))
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
        return effects + self.pump(now) if self._freed and self._queue else effects

    def tick(self, now: float) -> list[Effect]:
        """Handles timeouts. Call it several times within the shortest of lease, deadline and retry
        delay.
        """
        effects: list[Effect] = []
        for entry in list(self._entries.values()):
            if now >= entry.life.request.deadline:
                effects += self._expire(entry, now)
            elif model_is_gone(entry, self._workers, now):
                effects += self._settle(entry, entry.life.cancel(model_gone_error(entry.life)), now)
            else:
                effects += self._settle(entry, entry.life.tick(now), now)
        if now >= self._renew_at:
            self._renew_at = now + self._settings.lease_seconds / 4
            effects += self._renewals()
        return effects + _notices(*self._workers.health.judge(now)) + self.pump(now)

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
                self._charge(entry, now)
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
        if (isinstance(event, Failed) and event.drains) or (
            isinstance(event, Refused) and event.reason == DRAINING
        ):
            self._workers.drains(worker_id)
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
            begun = entry.attempt_begun
            effects += _notices(*blame(self._workers, worker_id, placed, event, begun, now))
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

    def _settle(self, entry: Entry, effects: list[Effect], now: float) -> list[Effect]:
        """Updates the accounting after a step of the entry's lifecycle. Returns the effects
        unchanged.
        """
        life = entry.life
        request_id = life.request.request_id
        if entry.claim is not None:
            self._charge(entry, now)
            if not life.holders:
                self._workers.leave(entry.claim, now)
                entry.claim = None
                entry.share.running -= 1
                del self._running[request_id]
                self._suspects.pop(request_id, None)
                self._freed = True
        if life.state == "queued":
            if request_id not in self._queue:
                preempted = entry.preempted_at is not None
                returned = entry.begun is not None and not preempted
                self._queue.add(entry.ticket, entry.share, returned, preempted)
        elif life.ended:
            self._queue.remove(request_id)
            self._entries.pop(request_id, None)
            if (
                life.state == "finished"
                and life.last_assignment is not None
                and entry.begun is not None
            ):
                # An answer of one token has no hand-off.
                if life.path == "local" or life.handoff is not None:
                    # The next turn of the conversation may reuse these blocks.
                    self._workers.remember(life.last_assignment.decode, entry.blocks)
                resumed, most = len(life.request.resume), life.request.planned_tokens
                self._throughput.finished(
                    now - entry.begun,
                    len(life.request.token_ids),
                    len(life.tokens) - resumed,
                    None if most is None else most - resumed,
                )
        return effects

    def _charge(self, entry: Entry, now: float) -> None:
        """Charges new tokens of a running request to its workers and its tenant."""
        assert entry.claim is not None, "a running request has workers"
        if self._workers.prompt_ended(entry.claim, entry.life, now):
            self._freed = True
        tokens = self._workers.grown(entry.claim, entry.life)
        if tokens:
            entry.share.charge(tokens)

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
        if not self._wait.no_worker:
            max_tokens, time_left = request.planned_tokens, request.deadline - now
            self.admission.check_time(share, request.priority, max_tokens, time_left)
        displaced = self.admission.check_room(share, request.priority)
        return (
            []
            if displaced is None
            else self._turn_away(
                displaced,
                "queue_full",
                "requests of higher priority or smaller share filled the queue; retry later",
                now,
            )
        )

    def _turn_away(self, request_id: str, reason: Rejection, text: str, now: float) -> list[Effect]:
        entry = self._entries[request_id]
        error = self.admission.refusal(reason, text, None)
        return self._settle(entry, entry.life.cancel(error), now)

    def _expire(self, entry: Entry, now: float) -> list[Effect]:
        why = self._wait.why if self._wait.no_worker else ""
        if entry.lone_since is not None:
            why = model_gone_error(entry.life).message
        return self._settle(entry, entry.life.expire(why), now)

    # The queue

    def pump(self, now: float) -> list[Effect]:
        """Places waiting requests in queue order until a request finds no room. Later requests do
        not overtake that request, unless it waits for a prefill worker and they need none.

        While `prompts_wait`, call it as often as a prefill worker may come to need a prompt.
        """
        effects: list[Effect] = []
        self._freed = False
        wait = Wait("it may have killed a worker, so it waits for its turn alone")
        queued = False
        self._throughput.advance(now)
        broken = self._workers.link_health.broken(now)
        # Demands that only workers without room meet. Requests without them continue.
        without_room: set[Demand] = set()

        def pausing(request_id: str) -> bool:
            limited = without_room and demands(self._entries[request_id].life) & without_room
            return bool(limited) or self._must_pause(request_id, now)

        gate = PrefillGate(self._workers)
        while not gate.full and (ticket := self._queue.next(pausing, gate.busy_for)) is not None:
            entry = self._entries[ticket.request_id]
            if now >= entry.life.request.deadline:
                effects += self._expire(entry, now)
                continue
            if self._too_late(entry, now):
                text = "its turn has come so late that it would not be through by its deadline"
                effects += self._turn_away(ticket.request_id, "deadline", text, now)
                continue
            tenant = entry.life.request.tenant.name
            # A tenant's prompts take the decode workers' help in order of arrival.
            outlook = None if gate.busy_for(tenant) else self._outlook(entry, now)
            decision = self._decide(entry, broken, now, outlook)
            if isinstance(decision, Wait):
                if (error := unsupported(entry.life, self._workers)) is not None:
                    effects += self._settle(entry, entry.life.cancel(error), now)
                    continue
                if missing := limiting(entry.life, self._workers):
                    without_room |= missing
                    continue
            if gate.holds(tenant, decision):
                self._queue.defer(ticket)
                continue
            if isinstance(decision, Wait):
                heads = partial(self._queue.heads, pausing, gate.busy_for)
                placed = [] if decision.no_worker else self._preempt(heads, now)
                if placed:
                    effects += placed
                    continue
                wait = decision
                queued = not wait.no_worker
                break
            effects += self._place(entry, decision, now)
        else:
            if gate.wait is not None:
                wait, queued = gate.wait, True
        self._wait = wait
        self._freed = self._freed or gate.full
        self._throughput.watch(now, queued)
        return effects

    def _decide(
        self,
        entry: Entry,
        broken: frozenset[tuple[str, str]],
        now: float,
        outlook: Outlook | None = None,
    ) -> Assignment | Wait:
        life = entry.life
        return assign(
            views_for(entry, self._workers, now),
            life.num_tokens,
            life.avoid,
            self._config.router,
            broken,
            life.model,
            outlook,
        )

    def _outlook(self, entry: Entry, now: float) -> Outlook | None:
        """Returns the outlook of a waiting request without tokens; None for another, and without a
        configured SLO.

        The prompts that wait behind it count too: if they would be late, one of them has to take
        the other path, and the oldest goes first.
        """
        common = self._config.slo
        if entry.begun is not None or common is None:
            return None
        request = entry.life.request
        ahead = self._queue.deferred_beside(entry.ticket, entry.share)
        return outlook_of(common, request.slo, now - request.arrival, ahead)

    def _overtakes(self, entry: Entry, now: float) -> bool:
        """Whether a new request can run at once, since those in the queue wait for prefill workers
        and it needs none.
        """
        if not self._wait.for_prefill or entry.share.capped:
            return False
        decision = self._decide(entry, self._workers.link_health.broken(now), now)
        return isinstance(decision, Assignment) and not decision.prefill

    def _must_pause(self, request_id: str, now: float) -> bool:
        """Whether the request is suspected of killing workers and has to wait. Unproven suspects
        never run side by side, so another death identifies the poison request.
        """
        crashes = self._entries[request_id].life.crashes
        if not crashes.suspected:
            return False
        return now < crashes.not_before or not all(
            one.life.proven for one in self._suspects.values()
        )

    def _too_late(self, entry: Entry, now: float) -> bool:
        """Whether a waiting request without tokens would miss its deadline."""
        if entry.begun is not None or not self._throughput.queued:
            return False
        request = entry.life.request
        return self.admission.too_late(request.planned_tokens, request.deadline - now)

    def _place(self, entry: Entry, assignment: Assignment, now: float) -> list[Effect]:
        request_id = entry.life.request.request_id
        self._queue.serve(entry.ticket)
        self._running[request_id] = entry
        entry.share.running += 1
        entry.attempt_begun = now
        if entry.begun is None:
            entry.begun = now
            entry.share.charge(entry.ticket.tokens)
            self._throughput.left_queue()
        if entry.preempted_at is not None:
            entry.begun += now - entry.preempted_at
            entry.preempted_at = None
        if entry.life.crashes.suspected:
            self._suspects[request_id] = entry
        effects = entry.life.assign(assignment, next(self._attempts), now)
        entry.claim = self._workers.place(entry.life, assignment, entry.blocks, now)
        return self._settle(entry, effects, now)

    # Batch slots

    def _preempt(self, heads: Callable[[], list[Ticket]], now: float) -> list[Effect]:
        """Places a request without room by preempting other requests. Returns no effects if no
        request has to be preempted. `heads` returns the requests that may be placed.
        """
        if now < self._preempt_at or not self._config.router.preemption:
            return []
        tickets = heads()
        for entry in (self._entries[one.request_id] for one in tickets):
            way = make_way(
                entry,
                self._running.values(),
                self._workers,
                self._queue.shares,
                self._config.router,
                now,
            )
            if way is not None:
                preemption, assignment = way
                gone = [
                    self._give_way(self._entries[one], preemption, now)
                    for one in preemption.victims
                ]
                return [*chain.from_iterable(gone), *self._place(entry, assignment, now)]
        if tickets:
            self._preempt_at = now + PREEMPT_POLL_S
        return []

    def _give_way(self, entry: Entry, why: Preemption, now: float) -> list[Effect]:
        self.preemptions += 1
        self._workers.preempted(why.worker_id, entry.blocks, now)
        entry.preempted_at = now
        effects = self._settle(entry, entry.life.preempt(now), now)
        return [Preempted(entry.life.request.request_id, why.worker_id, why.why), *effects]

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
