"""Requests that are cancelled in one of the seven states that a request can be in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from faults.client import Asking
from faults.fleet import Fleet
from faults.history import Case, RequestHistory
from faults.prompts import LONG, OTHER, tokens

# By state: at which point of a worker the request is held, and how many tokens the client has to
# have by then.
STATES = {
    "queued": ("", 0),
    "reserved": ("hold@unstarted", 0),
    "prefilling": ("hold@chunk", 0),
    "handing off": ("hold@committing", 1),
    "waiting to decode": ("hold@joined", 1),
    "decoding": ("tell@token:3", 4),
    "finishing": ("hold0.2@committed", 2),
}
FINISHED_WITH = 2  # tokens, so that an answer can be complete before its hand-off is accounted for
ENDLESS = 2000
FILLER = tokens(2040, 4)  # leaves too few of a decode worker's blocks for LONG


async def cancelled_in(
    fleet: Fleet, case: Case, state: str, times: int
) -> AsyncIterator[RequestHistory]:
    """Yields each request when its client has left it."""
    async with prepared(fleet, case, state):
        for _ in range(times):
            asked = await held_in(fleet, case, state)
            asked.cancel()
            yield await asked.ended()


@asynccontextmanager
async def prepared(fleet: Fleet, case: Case, state: str) -> AsyncIterator[None]:
    """Around `held_in`: a request waits in the queue while the decode workers are full."""
    if state == "queued":
        async with filled(fleet, case):
            yield
    else:
        yield


@asynccontextmanager
async def filled(fleet: Fleet, case: Case, hold: str = "unstarted") -> AsyncIterator[None]:
    """While no decode worker has room for LONG: for requests that are held in prefill, or, with
    `joined`, in decode.
    """
    fillers = [await _fill(fleet, case, hold) for _ in fleet.pool("decode")]
    yield
    for filler in fillers:
        filler.cancel()
        await filler.ended()


async def held_in(fleet: Fleet, case: Case, state: str) -> Asking:
    """A request that is in the state now."""
    hold, count = STATES[state]
    max_tokens = FINISHED_WITH if state == "finishing" else ENDLESS
    prompt = LONG if state == "queued" else OTHER
    asked = fleet.ask(
        case, f"cancel!{hold}" if hold else "cancel", prompt, max_tokens=max_tokens if hold else 1
    )
    if hold:
        await fleet.reached(asked.history.request_id, hold.partition("@")[2])
        await asked.tokens(count)
    else:
        await fleet.router.waiting(1)
    return asked


async def _fill(fleet: Fleet, case: Case, hold: str) -> Asking:
    """Takes the room of a decode worker."""
    asked = fleet.ask(
        case,
        f"filler!tell@reserved!hold@{hold}",
        FILLER,
        max_tokens=1 if hold == "unstarted" else 2,
    )
    await fleet.reached(asked.history.request_id, "reserved" if hold == "unstarted" else hold)
    return asked
