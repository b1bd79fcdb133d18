"""Rates and waits that a worker reports with its heartbeat."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from kvrelay.clock import Clock
from kvrelay.percentiles import percentile

_WAIT_WINDOW_S = 30.0
_MIN_RATE_WINDOW_S = 0.5
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Meter:
    """Counts tokens per second, queueing times of sequences, and drafts with their acceptances."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock.now()
        self._tokens = 0
        self._rate = 0.0
        self._waits: deque[tuple[float, float]] = deque()
        self.draft_tokens = 0
        self.accepted_tokens = 0

    def count(self, tokens: int) -> None:
        """Adds computed tokens."""
        self._tokens += tokens

    def drafted(self, tokens: int, accepted: int) -> None:
        """Adds draft tokens, and how many of them were accepted."""
        self.draft_tokens += tokens
        self.accepted_tokens += accepted

    def waited(self, seconds: float) -> None:
        """Adds the queueing time of a sequence, in seconds."""
        self._waits.append((self._clock.now(), seconds))

    def tokens_per_second(self) -> float:
        """Rate since the last reading. Readings closer than half a second repeat the last value."""
        now = self._clock.now()
        if now - self._since >= _MIN_RATE_WINDOW_S:
            self._rate = self._tokens / (now - self._since)
            self._since, self._tokens = now, 0
        return self._rate

    def queue_wait_p95_ms(self) -> float:
        """95th percentile (nearest rank) of the queueing time, in ms, of the sequences that began
        in the last 30 s; 0 if there are none.
        """
        while self._waits and self._waits[0][0] < self._clock.now() - _WAIT_WINDOW_S:
            self._waits.popleft()
        waits = sorted(seconds for _, seconds in self._waits)
        return 1e3 * percentile(waits, 95) if waits else 0.0


def resident_bytes(pids: Iterable[int] = ()) -> tuple[int, int]:
    """(resident set, its shared or file-backed part) in bytes, of this process and the given ones,
    from /proc/PID/statm.
    """
    resident = shared = 0
    for pid in ("self", *pids):
        with suppress(FileNotFoundError), open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            _, more_resident, more_shared, *_ = map(int, statm.read().split())
            resident, shared = resident + more_resident, shared + more_shared
    return resident * _PAGE_BYTES, shared * _PAGE_BYTES
