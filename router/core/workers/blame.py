"""What the outcome of an attempt says about the health of workers. Each function records it and
returns notices: pairs of a worker and a text, which may be empty.
"""

from __future__ import annotations

from kvrelay.errors import Code
from kvrelay.worker_messages import Failed, SequenceTokens
from router.core.path_policy import Assignment
from router.core.request_record import Entry
from router.core.workers.link_health import handoff_failed
from router.core.workers.worker_table import Workers

Notices = list[tuple[str, str]]


def went_well(
    workers: Workers, worker_id: str, entry: Entry, sequence: SequenceTokens, now: float
) -> Notices:
    """Records a success of the worker: the first tokens of an attempt with their prefill timings,
    or any tokens while the worker's health is in doubt.
    """
    if not entry.life.is_live(worker_id, sequence.attempt):
        return []
    workers.accepted(worker_id)
    workers.prefilled(worker_id, entry.life, sequence, now)
    health, at_fault = workers.health, entry.life.fault
    notices = [(worker_id, health.succeeded(worker_id, entry.attempt_begun, now))]
    if at_fault and at_fault != worker_id and sequence.token_ids:
        text = f"it failed on a sequence that {worker_id} continued"
        notices.append((at_fault, health.failed(at_fault, entry.fault_begun, text, now)))
    return notices


def blame(
    workers: Workers, worker_id: str, placed: Assignment, entry: Entry, event: Failed, now: float
) -> Notices:
    """Records a failed attempt on the workers of `placed`: against the pair if the hand-off failed,
    otherwise against the worker that reported the failure.
    """
    begun = entry.attempt_begun
    if event.code in (Code.INVALID_ARGUMENT, Code.DEADLINE_EXCEEDED):
        # Neither the worker nor the link is at fault.
        return []
    if handoff_failed(placed, worker_id, event.code):
        if entry.life.is_due(now):
            # One of the workers gave up the hand-off at the deadline, so it failed at the other.
            return []
        seconds = workers.link_health.failed(
            placed.prefill, placed.decode, begun, event.message, now
        )
        text = f"hand-offs to {placed.decode} fail for {seconds} s: {event.message}"
        return [(placed.prefill, text if seconds is not None else "")]
    text = f"{event.code.name}: {event.message}"
    return [(worker_id, workers.health.failed(worker_id, begun, text, now))]
