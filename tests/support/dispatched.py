"""Small requests for a dispatcher, and what it did with them."""

from __future__ import annotations

from kvrelay.types.requests import SamplingParams
from kvrelay.worker_messages import HandoffTarget, Reserve, RunLocal
from router.core.dispatcher import Dispatcher
from router.core.effects import Effect, Send
from router.core.request import Request

TARGET = HandoffTarget("d0", "here:1", 1, 42, 7, 4, 0, "layout", "host")
LONG = tuple(range(100, 140))
SHORT = (1, 2, 3)


def request(
    request_id: str, token_ids: tuple[int, ...] = SHORT, priority: int = 0, deadline: float = 100.0
) -> Request:
    return Request(
        request_id, token_ids, SamplingParams(max_tokens=4, seed=1), 0.0, deadline, priority
    )


def submit(made: Dispatcher, one: Request, now: float = 0.0) -> list[Effect]:
    return made.submit(one, now)[1]


def placements(effects: list[Effect]) -> list[tuple[str, str]]:
    """(request, worker) of all that were sent to a decode worker."""
    return [
        (one.command.spec.request_id, one.worker_id)
        for one in effects
        if isinstance(one, Send) and isinstance(one.command, RunLocal | Reserve)
    ]


def attempt(made: Dispatcher, request_id: str) -> int:
    """Number of its live attempt."""
    return made._entries[request_id].life.attempt
