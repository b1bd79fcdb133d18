"""Rows of the last requests, live and ended, for the status page: ids, sizes and times, no texts.
Pure.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from kvrelay.tenants import Tenant
from kvrelay.types.requests import Ledger
from router.core.lifecycle import Lifecycle
from router.runtime.stream import Stream

Json = dict[str, Any]
MAX_WHY = 300  # characters of a reason
# Time for a client to read the first token of an ended request.
HAND_S = 1.0
# The phase after each last known phase.
_NEXT = {"reserve": "prefill", "return": "decode", "decode": "decode"}


class Rows:
    """The newest requests as JSON. For an ended request it keeps the row instead of the stream with
    its tokens.
    """

    def __init__(self, ended: deque[Stream]) -> None:
        """`ended` is the driver's queue of ended requests. This class removes them from it."""
        self._ended = ended
        self._kept: deque[_Row] = deque(maxlen=ended.maxlen)

    def keep(self, now: float) -> None:
        """Converts ended requests to rows. Call it regularly."""
        later = []
        while self._ended:
            stream = self._ended.popleft()
            if stream.first_handed_at is None and now - stream.ended_at < HAND_S:
                # The row is not final yet.
                later.append(stream)
            else:
                self._kept.append(_Row.of(stream, now))
        self._ended.extend(later)

    def json(self, live: Iterable[Stream], viewer: Tenant, now: float, limit: int) -> str:
        """Returns a JSON list of the `limit` newest requests by arrival: the viewer's own, or all
        for an admin.
        """
        self.keep(now)
        rows = [
            _Row.of(one, now)
            for one in (*live, *self._ended)
            if may_see(viewer, one.request.tenant.name)
        ]
        rows += [one for one in self._kept if may_see(viewer, one.tenant)]
        rows.sort(key=lambda one: one.arrival, reverse=True)
        return f"[{','.join(one.text for one in rows[:limit])}]"


def may_see(viewer: Tenant, owner: str) -> bool:
    """Whether the viewer may see requests of the tenant `owner`: its own, or all for an admin."""
    return viewer.name == owner or "admin" in viewer.roles


def read_rows(text: str | bytes) -> list[Json]:
    """Reads what `Rows.json` returned. Raises ValueError, TypeError or KeyError for anything
    else.
    """
    return [row | {"at": float(row["at"])} for row in json.loads(text)]


def newest(lists: Iterable[list[Json]], limit: int) -> str:
    """Returns the `limit` newest of several lists of requests, whose clocks are the same."""
    rows = sorted(chain.from_iterable(lists), key=lambda one: one["at"], reverse=True)
    return json.dumps(rows[:limit], separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class _Row:
    arrival: float
    tenant: str
    text: str  # JSON

    @classmethod
    def of(cls, stream: Stream, now: float) -> _Row:
        text = json.dumps(row(stream, now), separators=(",", ":"))
        return cls(stream.request.arrival, stream.request.tenant.name, text)


def row(stream: Stream, now: float) -> Json:
    """Returns a request's row. Times are in milliseconds: `at` on the router's clock, `phases` as
    consecutive durations from `at`, `handoff_at` relative to `at`.
    """
    life, request = stream.life, stream.request
    end = now if stream.ended is None else stream.ended_at
    ledger = life.timeline.ledger(stream.first_handed_at, end, life.handoff, tuple(life.attempts))
    placed = stream.assignment
    phases = phases_of(life, end)
    return {
        "id": request.client_id,
        "tenant": request.tenant.name,
        "at": _ms(request.arrival),
        "state": life.state if stream.ended is None else stream.ended.finish_reason,
        "live": stream.ended is None,
        "phases": [(name, _ms(seconds)) for name, seconds in phases],
        "handoff_at": handoff_span(life),
        "path": life.path,
        "why": placed.why_for(request.tenant)[:MAX_WHY] if placed else "",
        "prefill": placed.prefill if placed else "",
        "decode": placed.decode if placed else "",
        "prompt_tokens": len(request.token_ids),
        "cached_tokens": life.cached_tokens,
        "tokens": stream.num_tokens - len(request.resume),
        "max_tokens": request.sampling.max_tokens,
        "ledger": _ledger(ledger),
    }


def _ledger(ledger: Ledger) -> Json:
    """Returns the ledger in the shape of the responses, rounded to microseconds."""
    return {
        "phases": _seconds(ledger.phases),
        "ttft_seconds": round(ledger.ttft_seconds, 6),
        "second_token_gap_seconds": round(ledger.second_token_gap_seconds, 6),
        "decode_seconds": round(ledger.decode_seconds, 6),
        "e2e_seconds": round(ledger.e2e_seconds, 6),
        "handoff": None if ledger.handoff is None else asdict(ledger.handoff),
        "attempts": [
            asdict(one)
            | {
                "why": one.why[:MAX_WHY],
                "outcome": one.outcome[:MAX_WHY],
                "phases": _seconds(one.phases),
            }
            for one in ledger.attempts
        ],
    }


def _seconds(phases: tuple[tuple[str, float], ...]) -> dict[str, float]:
    return {name: round(seconds, 6) for name, seconds in phases}


def phases_of(life: Lifecycle, end: float) -> list[tuple[str, float]]:
    """Returns (phase, seconds) pairs from the arrival to `end`, or to the last token of a finished
    answer.
    """
    phases: list[tuple[str, float]] = []
    marked = life.request.arrival
    handed_off = _handed_off(life)
    for phase, at in life.timeline.marks:
        if phase == "decode" and handed_off is not None and marked < handed_off < at:
            phases.append(("handoff", handed_off - marked))
            marked = handed_off
        phases.append((phase, at - marked))
        marked = at
    if life.state == "finished":
        return phases
    last = phases.pop() if phases else ("tokenize", 0.0)
    current = _current(life, last[0])
    rest = max(0.0, end - marked)
    return (
        [*phases, (current, last[1] + rest)]
        if current == last[0]
        else [*phases, last, (current, rest)]
    )


def _current(life: Lifecycle, last: str) -> str:
    if life.assignment is None:
        return "queue"
    if life.state == "handing_off":
        return "handoff"
    return _NEXT.get(last) or ("reserve" if life.path == "disaggregated" else "prefill")


def _prefilled(life: Lifecycle) -> float | None:
    """Returns the time at which the last attempt's prefill ended, or None."""
    return next((at for phase, at in reversed(life.timeline.marks) if phase == "prefill"), None)


def _handed_off(life: Lifecycle) -> float | None:
    """Returns the time at which the last attempt's KV was committed, or None."""
    computed = _prefilled(life)
    return (
        None
        if computed is None or life.handoff is None
        else computed + life.handoff.exposed_seconds
    )


def handoff_span(life: Lifecycle) -> tuple[float, float] | None:
    """Returns (start, end) of the last attempt's hand-off in milliseconds since the arrival. Most
    of it overlaps with the prefill.
    """
    done = _handed_off(life)
    if done is None or life.handoff is None:
        return None
    arrival = life.request.arrival
    return _ms(done - life.handoff.seconds - arrival), _ms(done - arrival)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)
