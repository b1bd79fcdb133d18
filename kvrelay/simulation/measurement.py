"""The measurements of one simulated request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from itertools import pairwise

from kvrelay.errors import KvRelayError
from kvrelay.loadtest.report.row import Row
from router.core.effects import End
from router.core.lifecycle import Lifecycle


@dataclass(slots=True)
class Measurement:
    """What the client of a request sees, in seconds of the simulation."""

    index: int
    scheduled_s: float
    prompt_tokens: int
    # Whether the times of all tokens are kept.
    detailed: bool
    life: Lifecycle | None = None
    first_s: float | None = None
    last_s: float | None = None
    output_tokens: int = 0
    # Times of the tokens, if they are kept.
    times: array[float] = field(default_factory=lambda: array("d"))

    def tokens(self, times: list[float]) -> None:
        """Adds tokens that arrived at these times."""
        if self.first_s is None:
            self.first_s = times[0]
        self.last_s = times[-1]
        self.output_tokens += len(times)
        if self.detailed:
            self.times.extend(times)

    def refused(self, error: KvRelayError, seconds: float) -> Row:
        """Returns the row of a request that the router did not accept."""
        return Row(
            scheduled_s=self.scheduled_s,
            late_s=0.0,
            e2e_s=seconds,
            error=error.code.name,
            message=error.message,
            request_id=str(self.index),
            index=self.index,
        )

    def row(self, end: End, now: float, message_s: float) -> Row:
        """Returns the row of a request that has ended at `now`. message_s: from the router to the
        client.
        """
        life = self.life
        assert life is not None, "a request that ended was admitted"
        last = now if self.last_s is None or end.error is not None else self.last_s
        gaps = tuple(after - before for before, after in pairwise(self.times))
        ttft_s = None if self.first_s is None else self.first_s + message_s - self.scheduled_s
        ledger = None
        if self.detailed:
            ledger = replace(
                life.timeline.ledger(self.first_s, last, life.handoff, tuple(life.attempts)),
                second_token_gap_seconds=gaps[0] if gaps else 0.0,
            )
        attempts = life.attempts
        return Row(
            scheduled_s=self.scheduled_s,
            late_s=0.0,
            ttft_s=ttft_s,
            itl_s=gaps,
            e2e_s=last + message_s - self.scheduled_s,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=life.cached_tokens,
            output_tokens=self.output_tokens,
            finish_reason=end.finish_reason,
            path=life.path or "",
            why=attempts[-1].why if attempts else "",
            error="" if end.error is None else end.error.code.name,
            message="" if end.error is None else end.error.message,
            request_id=str(self.index),
            ledger=ledger,
            index=self.index,
        )
