"""The router's view of its decode workers' batch slots, as input of
`router.core.queueing.preemption`. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from kvrelay.types.workers import WorkerInfo
from router.core.lifecycle import Lifecycle
from router.core.path_policy import Assignment, Wait
from router.core.prefixes.prompt_blocks import PromptBlocks
from router.core.queueing.fair_queue import Share, Ticket
from router.core.queueing.preemption import Preemption, Running, Shares, Standing, Waiting, preempt
from router.core.worker_view import WorkerView
from router.core.workers.worker_table import Claim, Workers


class Entry(Protocol):
    """A request of the dispatcher. `claim` is its claim on its workers, or None while it has
    none.
    """

    life: Lifecycle
    ticket: Ticket
    claim: Claim | None
    attempt_begun: float

    def blocks(self, info: WorkerInfo) -> PromptBlocks:
        """Returns the blocks of the sequence so far, with the worker's hashes."""
        ...


def views_for(entry: Entry, workers: Workers, now: float) -> list[WorkerView]:
    """Returns the workers as seen by the request. A worker that had no next token for the request
    counts as sick, so that another worker shows whether the request is at fault.
    """
    life = entry.life
    views = workers.views(life.request, life.num_tokens, entry.blocks, now, life.model)
    if not life.fault:
        return views
    return [replace(one, sick=one.sick or one.worker_id == life.fault) for one in views]


def make_way(
    entry: Entry,
    running: Iterable[Entry],
    workers: Workers,
    shares: Iterable[Share],
    assign: Callable[[Sequence[WorkerView]], Assignment | Wait],
    now: float,
) -> tuple[Preemption, Assignment] | None:
    """Returns the preemption that makes room for a waiting request, and the request's placement.

    `running`: all requests with workers. `assign`: chooses workers for the request. Returns None if
    the request's tenant has to wait, or if a decode worker has room and the request waits for
    another reason.
    """
    life = entry.life
    views = views_for(entry, workers, now)
    decoders = [
        one
        for one in views
        if one.pool == "decode" and (life.model is None or one.model.is_same(life.model))
    ]
    decoders = [one for one in decoders if not one.sick] or decoders
    if not all(one.full for one in decoders):
        return None
    decision = _decide(entry, running, {one.worker_id for one in decoders}, workers, shares, now)
    if decision is None:
        return None
    views = [replace(one, full=one.full and one.worker_id != decision.worker_id) for one in views]
    assignment = assign(views)
    return None if isinstance(assignment, Wait) else (decision, assignment)


def _decide(
    entry: Entry,
    running: Iterable[Entry],
    ids: set[str],
    workers: Workers,
    shares: Iterable[Share],
    now: float,
) -> Preemption | None:
    """Decides on a preemption. `ids`: the decode workers that may serve the request."""
    there = [
        one for one in running if one.claim is not None and one.claim.decode.info.worker_id in ids
    ]
    seen = [_seen(one, now) for one in there]
    soon = dict.fromkeys(ids, math.inf)
    for one, other in zip(seen, there, strict=True):
        soon[one.worker_id] = min(soon[one.worker_id], _ends_in_s(other, now))
    rooms = [room for one in sorted(ids) if (room := workers.room(one, now, soon[one])) is not None]
    tenants = {one.tenant.name: Standing(one.tenant.weight, one.counter) for one in shares}
    request = entry.life.request
    waiting = Waiting(
        request.request_id,
        request.tenant.name,
        entry.ticket.priority,
        workers.most_kv_tokens(request, entry.life.num_tokens, ids),
    )
    return preempt(waiting, Shares(rooms, seen, tenants))


def _seen(entry: Entry, now: float) -> Running:
    assert entry.claim is not None, "only a request with workers holds a slot"
    life, begun = entry.life, entry.attempt_begun
    return Running(
        request_id=life.request.request_id,
        number=entry.ticket.number,
        tenant=life.request.tenant.name,
        priority=entry.ticket.priority,
        worker_id=entry.claim.decode.info.worker_id,
        held_tokens=entry.claim.held_tokens,
        new_tokens=life.new_tokens,
        ran_s=now - begun,
        start_s=None if life.started_at is None else life.started_at - begun,
        preemptions=life.preemptions,
        fixed=life.crashes.suspected,
    )


def _ends_in_s(entry: Entry, now: float) -> float:
    """Returns the longest remaining time of the request in seconds, at its attempt's pace so
    far.
    """
    started, tokens = entry.life.started_at, entry.life.new_tokens - 1
    left = entry.life.request.sampling.max_tokens - len(entry.life.tokens)
    return math.inf if started is None or tokens < 1 else left * (now - started) / tokens
