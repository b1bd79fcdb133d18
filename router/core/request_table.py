"""The requests of one router that have not ended, and what they have of workers, queue and tenants.
Pure.
"""

from __future__ import annotations

from itertools import count

from kvrelay.config.schema import ClusterConfig
from router.core.effects import Effect
from router.core.path_policy import Assignment
from router.core.queueing.fair_queue import FairQueue
from router.core.recent_requests import RecentRequests
from router.core.request_record import Entry
from router.core.throughput import Throughput
from router.core.workers.worker_table import Workers


class Requests:
    """The requests that have not ended, with the accounting of what they use.

    Call `settle` after each step of a lifecycle.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.workers = Workers(config)
        self.queue = FairQueue()
        self.throughput = Throughput()
        self.recent = RecentRequests()
        # Whether a request has left its workers, or a prefill worker has ended a prompt, since the
        # last run of the queue.
        self.freed = False
        self.entries: dict[str, Entry] = {}
        # Entries with workers.
        self.running: dict[str, Entry] = {}
        # Running entries that may have killed a worker.
        self.suspects: dict[str, Entry] = {}
        # Attempt numbers are unique in this router, so an event cannot match an attempt of an
        # earlier request with the same id.
        self._attempts = count(1)

    def place(self, entry: Entry, assignment: Assignment, now: float) -> list[Effect]:
        """Starts an attempt of a waiting request on workers."""
        request_id = entry.life.request.request_id
        self.queue.serve(entry.ticket)
        self.running[request_id] = entry
        entry.share.running += 1
        entry.attempt_begun = now
        if entry.begun is None:
            entry.begun = now
            entry.share.charge(entry.ticket.tokens)
            self.throughput.left_queue()
            self.recent.begun += 1
        if entry.preempted_at is not None:
            entry.begun += now - entry.preempted_at
            entry.preempted_at = None
        if entry.life.crashes.suspected:
            self.suspects[request_id] = entry
        effects = entry.life.assign(assignment, next(self._attempts), now)
        entry.claim = self.workers.place(entry.life, assignment, entry.blocks, now)
        return self.settle(entry, effects, now)

    def settle(self, entry: Entry, effects: list[Effect], now: float) -> list[Effect]:
        """Updates the accounting after a step of the entry's lifecycle. Returns the effects
        unchanged.
        """
        life = entry.life
        request_id = life.request.request_id
        if entry.claim is not None:
            self.charge(entry, now)
            if not life.holders:
                self.workers.leave(entry.claim, now)
                entry.claim = None
                entry.share.running -= 1
                del self.running[request_id]
                self.suspects.pop(request_id, None)
                self.freed = True
        if life.state == "queued":
            if request_id not in self.queue:
                preempted = entry.preempted_at is not None
                returned = entry.begun is not None and not preempted
                self.queue.add(entry.ticket, entry.share, returned, preempted)
        elif life.ended:
            self.queue.remove(request_id)
            self.entries.pop(request_id, None)
            if entry.begun is not None:
                prompt, output = len(life.request.token_ids), len(life.tokens)
                output -= len(life.request.resume)
                self.recent.ended(prompt, life.cached_tokens, output, now)
            if (
                life.state == "finished"
                and life.last_assignment is not None
                and entry.begun is not None
            ):
                # An answer of one token has no hand-off.
                if life.path == "local" or life.handoff is not None:
                    # The next turn of the conversation may reuse these blocks.
                    self.workers.remember(life.last_assignment.decode, entry.blocks)
                resumed, most = len(life.request.resume), life.request.planned_tokens
                self.throughput.finished(
                    now - entry.begun,
                    len(life.request.token_ids),
                    len(life.tokens) - resumed,
                    None if most is None else most - resumed,
                )
        return effects

    def charge(self, entry: Entry, now: float) -> None:
        """Charges new tokens of a running request to its workers and its tenant."""
        assert entry.claim is not None, "a running request has workers"
        if self.workers.prompt_ended(entry.claim, entry.life, now):
            self.freed = True
        tokens = self.workers.grown(entry.claim, entry.life)
        if tokens:
            entry.share.charge(tokens)
