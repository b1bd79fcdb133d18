"""What a dispatcher's running figures have to be, derived from its lifecycles."""

from __future__ import annotations

from collections import Counter

from router.core.dispatcher import Dispatcher


def check_books(dispatcher: Dispatcher) -> None:
    sequences: Counter[str] = Counter()
    held: Counter[str] = Counter()
    queued: Counter[str] = Counter()
    running: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for request_id, entry in dispatcher._entries.items():
        life = entry.life
        assert (
            (request_id in dispatcher._running) == (entry.claim is not None) == bool(life.holders)
        )
        assert (request_id in dispatcher._queue) == (life.state == "queued")
        running[life.request.tenant.name] += bool(life.holders)
        waiting[life.request.tenant.name] += life.state == "queued"
        if life.holders and life.assignment is not None:
            sequences[life.assignment.decode] += 1
            held[life.assignment.decode] += life.num_tokens
            if life.state in ("reserving", "prefilling"):
                prefiller = life.assignment.prefill or life.assignment.decode
                queued[prefiller] += life.assignment.uncached_tokens
    for worker in dispatcher._workers:
        name = worker.info.worker_id
        assert worker.sequences == sequences[name]
        assert worker.held_tokens == held[name]
        assert worker.queued_tokens == queued[name], name
    for share in dispatcher._queue._shares.values():
        assert share.running == running[share.tenant.name]
        assert share.waiting == waiting[share.tenant.name]
    assert len(dispatcher._queue) == sum(waiting.values())
