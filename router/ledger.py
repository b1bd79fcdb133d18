"""Where a request's time went, kept as it goes."""

from __future__ import annotations

from kvrelay.types import Attempt, Handoff, Ledger, PrefillTimings


class Timeline:
    """The moments of one request, in monotonic seconds of the router's clock.

    The time to first token is cut into phases that follow each other without gaps: each `mark` ends the
    phase that it names. A phase that comes again, in a new attempt, is added to its first part.
    """

    def __init__(self, arrival: float) -> None:
        self._arrival = arrival
        self._marked = arrival
        self._phases: dict[str, float] = {}
        self._first: float | None = None
        self._second: float | None = None
        self._last: float | None = None

    @property
    def has_first_token(self) -> bool:
        return self._first is not None

    def mark(self, phase: str, now: float) -> None:
        if self._first is None:
            self._phases[phase] = self._phases.get(phase, 0.0) + now - self._marked
            self._marked = now

    def tokens(self, now: float, count: int, prefill: PrefillTimings | None) -> None:
        """`count` tokens came. The worker's timings split the time since the last mark; the rest is `return`."""
        if self._first is None:
            if prefill is not None:
                computing = min(self._marked + prefill.queue_seconds, now)
                if prefill.fetch_seconds:
                    self.mark("fetch", min(self._marked + prefill.fetch_seconds, computing))
                self.mark("prefill_queue", computing)
                self.mark("prefill", min(computing + prefill.compute_seconds, now))
            self.mark("return", now)
            self._first = now
            count -= 1
        if self._second is None and count > 0:
            self._second = now
        self._last = now

    def ledger(
        self, emitted: float | None, ended: float, handoff: Handoff | None, attempts: tuple[Attempt, ...]
    ) -> Ledger:
        """`emitted` is when the first token was handed to the client's stream."""
        phases = dict(self._phases)
        if emitted is not None:
            phases["emit"] = emitted - self._marked
        first = self._first
        return Ledger(
            phases=tuple(phases.items()),
            ttft_seconds=sum(phases.values()) if emitted is not None else 0.0,
            second_token_gap_seconds=0.0 if first is None or self._second is None else self._second - first,
            decode_seconds=0.0 if first is None or self._last is None else self._last - first,
            e2e_seconds=ended - self._arrival,
            handoff=handoff,
            attempts=attempts,
        )
