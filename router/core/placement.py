"""Placement of waiting requests on workers, in the order of the queue. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from kvrelay.config.schema import ClusterConfig
from kvrelay.types.token_eviction import WINDOW
from router.core.admission import Admission, Rejection
from router.core.effects import Effect, Preempted
from router.core.lifecycle import Lifecycle
from router.core.model_versions import model_gone_error
from router.core.path_policy import Assignment, Wait, assign
from router.core.path_prediction import Outlook, outlook_of
from router.core.queueing.batch_slots import make_way, views_for
from router.core.queueing.bottleneck import Bottleneck
from router.core.queueing.fair_queue import Ticket
from router.core.queueing.preemption import Preemption
from router.core.queueing.prefill_gate import PrefillGate
from router.core.request_demands import Demand, demands, limiting, unsupported
from router.core.request_record import Entry
from router.core.request_table import Requests
from router.core.worker_view import WorkerView

# Delay before the next search for a preemption for a tenant, after a search without a victim. In
# seconds.
PREEMPT_POLL_S = 0.1


class Placement:
    """Places waiting requests where they find room, and preempts running ones for them.

    Each method takes the time in seconds and returns effects.
    """

    def __init__(self, config: ClusterConfig, requests: Requests, admission: Admission) -> None:
        self._config = config
        self._requests = requests
        self._settle = requests.settle
        self._entries, self._running = requests.entries, requests.running
        self._workers, self._queue = requests.workers, requests.queue
        self._throughput = requests.throughput
        self._admission = admission
        # Time of the next allowed search for a preemption by tenant, after a search without a
        # victim. Its cost is linear in the number of requests.
        self._preempt_at: dict[str, float] = {}
        # Why the first request in the queue waits.
        self.wait = Wait("no decode worker is ready", no_worker=True)
        self.bottleneck = Bottleneck()
        # Whether the last pump ended at a request for which no decode worker has room.
        self.blocked = False
        self.preemptions = 0

    def pump(self, now: float) -> list[Effect]:
        """Places waiting requests in queue order until a request finds no room. Later requests do
        not overtake that request, unless it waits for a prefill worker and they need none.

        While `prompts_wait`, call it as often as a prefill worker may come to need a prompt.
        """
        effects: list[Effect] = []
        self._requests.freed = False
        wait = Wait("it may have killed a worker, so it waits for its turn alone")
        queued = self.blocked = False
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
                effects += self.expire(entry, now)
                continue
            if self._too_late(entry, now):
                text = "its turn has come so late that it would not be through by its deadline"
                effects += self.turn_away(ticket.request_id, "deadline", text, now)
                continue
            tenant = entry.life.request.tenant.name
            decision = self._decide(entry, broken, now, self._outlook(entry, now))
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
                self.blocked = not wait.for_prefill
                break
            effects += self._requests.place(entry, decision, now)
        else:
            if gate.wait is not None:
                wait, queued = gate.wait, True
        self.wait = wait
        self._requests.freed = self._requests.freed or gate.full
        self.bottleneck.note(queued, wait.for_prefill, now)
        self._throughput.watch(now, queued)
        return effects

    def _decide(
        self,
        entry: Entry,
        broken: frozenset[tuple[str, str]],
        now: float,
        outlook: Outlook | None = None,
    ) -> Assignment | Wait:
        views = views_for(entry, self._workers, now)
        return self._assign(entry.life, broken, outlook, views)

    def _assign(
        self,
        life: Lifecycle,
        broken: frozenset[tuple[str, str]],
        outlook: Outlook | None,
        views: Sequence[WorkerView],
    ) -> Assignment | Wait:
        return assign(
            views,
            life.num_tokens,
            life.avoid,
            self._config.router,
            broken,
            life.model,
            outlook,
            drops_tokens=self._drops_tokens(life),
            has_answer=bool(life.tokens),
        )

    def _drops_tokens(self, life: Lifecycle) -> bool:
        """Whether the decode worker of the sequence has dropped tokens of its KV, or has computed
        tokens whose queries tell which it will drop. A hand-off brings no queries.
        """
        eviction = self._config.kv.eviction
        if eviction is None or not life.tokens:
            return False
        return life.num_tokens > eviction.budget_tokens - WINDOW

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

    def overtakes(self, entry: Entry, now: float) -> bool:
        """Whether a new request can run at once, since those in the queue wait for prefill workers
        and it needs none.
        """
        if not self.wait.for_prefill or entry.share.capped:
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
            one.life.proven for one in self._requests.suspects.values()
        )

    def _too_late(self, entry: Entry, now: float) -> bool:
        """Whether a waiting request without tokens would miss its deadline."""
        if entry.begun is not None or not self._throughput.queued:
            return False
        request = entry.life.request
        return self._admission.too_late(request.planned_tokens, request.deadline - now)

    def _preempt(self, heads: Callable[[], list[Ticket]], now: float) -> list[Effect]:
        """Places a request without room by preempting other requests. Returns no effects if no
        request has to be preempted. `heads` returns the requests that may be placed.
        """
        if not self._config.router.preemption:
            return []
        self._preempt_at = {name: at for name, at in self._preempt_at.items() if at > now}
        broken = self._workers.link_health.broken(now)
        for entry in (self._entries[one.request_id] for one in heads()):
            tenant = entry.life.request.tenant.name
            if tenant in self._preempt_at:
                continue
            way = make_way(
                entry,
                self._running.values(),
                self._workers,
                self._queue.shares,
                partial(self._assign, entry.life, broken, None),
                now,
            )
            if way is not None:
                preemption, assignment = way
                gone = [
                    self._give_way(self._entries[one], preemption, now)
                    for one in preemption.victims
                ]
                return [*chain.from_iterable(gone), *self._requests.place(entry, assignment, now)]
            self._preempt_at[tenant] = now + PREEMPT_POLL_S
        return []

    def _give_way(self, entry: Entry, why: Preemption, now: float) -> list[Effect]:
        self.preemptions += 1
        self._workers.preempted(why.worker_id, entry.blocks, now)
        entry.preempted_at = now
        effects = self._settle(entry, entry.life.preempt(now), now)
        return [Preempted(entry.life.request.request_id, why.worker_id, why.why), *effects]

    def turn_away(self, request_id: str, reason: Rejection, text: str, now: float) -> list[Effect]:
        """Ends a waiting request with ResourceExhausted."""
        entry = self._entries[request_id]
        error = self._admission.refusal(reason, text, None)
        return self._settle(entry, entry.life.cancel(error), now)

    def expire(self, entry: Entry, now: float) -> list[Effect]:
        """Ends a request at its deadline, with the reason if no worker could serve it."""
        why = self.wait.why if self.wait.no_worker else ""
        if entry.lone_since is not None:
            why = model_gone_error(entry.life).message
        return self._settle(entry, entry.life.expire(why), now)
