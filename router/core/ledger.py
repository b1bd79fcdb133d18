"""Latency breakdown of a request."""

from __future__ import annotations

from dataclasses import replace

from kvrelay.types.requests import Attempt, Fetch, Handoff, Ledger, PrefillTimings


class Timeline:
    """The moments of one request, in monotonic seconds of the router's clock.

    Each mark ends the phase that it names. Phases follow each other from the arrival without gaps.
    The ledger contains the phases up to the first token. It adds up the parts of a phase that
    occurs again in a new attempt.
    """

    def __init__(self, arrival: float) -> None:
        self._arrival = arrival
        self._marks: list[tuple[str, float]] = []
        # Number of marks up to the first token.
        self._marks_to_first = 0
        self._first: float | None = None
        self._second: float | None = None
        self._last: float | None = None
        self._fetch: Fetch | None = None
        self._dropped = 0
        # Number of marks up to the end of each attempt.
        self._attempt_ends: list[int] = []

    @property
    def has_first_token(self) -> bool:
        """Whether the request has a token."""
        return self._first is not None

    @property
    def first_token_at(self) -> float | None:
        """Time of the first token, or None."""
        return self._first

    @property
    def marks(self) -> tuple[tuple[str, float], ...]:
        """(phase, end of the phase) pairs, up to the last known moment."""
        return (*self._marks, *self._decoded)

    def mark(self, phase: str, now: float) -> None:
        """Ends a phase at `now`. A repetition of the last phase extends it."""
        self._marks += self._decoded
        begins = len(self._marks) in self._attempt_ends[-1:]
        if self._marks and not begins and self._marks[-1][0] == phase:
            # The request had no worker and is still queued.
            self._marks.pop()
        self._marks.append((phase, now))

    def end_attempt(self) -> None:
        """Ends an attempt: later marks belong to the next one."""
        self._marks += self._decoded
        self._attempt_ends.append(len(self._marks))

    def tokens(
        self, now: float, count: int, prefill: PrefillTimings | None, dropped: int = 0
    ) -> None:
        """Records the arrival of `count` tokens, which did not attend to `dropped` tokens. The
        worker's timings split the time since the last mark; the rest is the phase `return`.
        """
        self._dropped = dropped
        if self._first is None or prefill is not None:
            self._prefilled(now, prefill)
        if self._first is None:
            self._first = now
            self._marks_to_first = len(self._marks)
            count -= 1
        if self._second is None and count > 0:
            self._second = now
        self._last = now

    def _prefilled(self, now: float, prefill: PrefillTimings | None) -> None:
        self._marks += self._decoded
        if prefill is not None:
            self._fetch = self._fetch or prefill.fetch
            computing = min(self._marked + prefill.queue_seconds, now)
            if prefill.fetch_seconds:
                self.mark("fetch", min(self._marked + prefill.fetch_seconds, computing))
            self.mark("prefill_queue", computing)
            self.mark("prefill", min(computing + prefill.compute_seconds, now))
        self.mark("return", now)

    @property
    def _marked(self) -> float:
        return self._marks[-1][1] if self._marks else self._arrival

    @property
    def _decoded(self) -> tuple[tuple[str, float], ...]:
        """The decode phase of the tokens since the last mark, if there are any."""
        return (
            (("decode", self._last),)
            if self._last is not None and self._last > self._marked
            else ()
        )

    def ledger(
        self,
        emitted: float | None,
        ended: float,
        handoff: Handoff | None,
        attempts: tuple[Attempt, ...],
    ) -> Ledger:
        """Returns the ledger. `emitted` is the time at which the client's stream received the first
        token. TTFT ends there, and the times to the second and the last token begin there.
        """
        first = self._first
        to_first = len(self._marks) if first is None else self._marks_to_first
        phases = self._between(0, to_first)
        if emitted is not None:
            phases["emit"] = emitted - self._end_of(to_first)
        begun = None if first is None else max(first, emitted or first)
        return Ledger(
            phases=tuple(phases.items()),
            ttft_seconds=sum(phases.values()) if emitted is not None else 0.0,
            second_token_gap_seconds=_between(begun, self._second),
            decode_seconds=_between(begun, self._last),
            e2e_seconds=max(ended, emitted or ended) - self._arrival,
            handoff=handoff,
            attempts=self._with_phases(attempts) if len(attempts) > 1 else attempts,
            fetch=self._fetch,
            dropped_tokens=self._dropped,
        )

    def _with_phases(self, attempts: tuple[Attempt, ...]) -> tuple[Attempt, ...]:
        starts = (0, *self._attempt_ends)
        return tuple(
            replace(attempt, phases=tuple(self._between(start, end).items()))
            for attempt, start, end in zip(attempts, starts, self._attempt_ends, strict=False)
        )

    def _between(self, start: int, end: int) -> dict[str, float]:
        """Returns the seconds of each phase among the marks from `start` to before `end`."""
        phases: dict[str, float] = {}
        marked = self._end_of(start)
        for phase, at in self._marks[start:end]:
            phases[phase] = phases.get(phase, 0.0) + at - marked
            marked = at
        return phases

    def _end_of(self, count: int) -> float:
        """Returns the time of the last of the first `count` marks, or the arrival."""
        return self._marks[count - 1][1] if count else self._arrival


def _between(start: float | None, end: float | None) -> float:
    """Returns the seconds from `start` to `end`; 0 if either is missing or `end` is earlier."""
    return 0.0 if start is None or end is None else max(0.0, end - start)
