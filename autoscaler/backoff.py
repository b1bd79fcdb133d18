"""Backoff before the replacement of workers in a crash loop."""

from __future__ import annotations

from dataclasses import dataclass

# Older deaths are forgotten.
WINDOW_S = 300.0
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class Deaths:
    """Times of a pool's last unexpected deaths, in monotonic seconds, oldest first."""

    times: tuple[float, ...] = ()

    def and_at(self, now: float) -> Deaths:
        """Returns the deaths within WINDOW_S before `now`, with a new death at `now`."""
        return Deaths((*(time for time in self.times if time > now - WINDOW_S), now))

    @property
    def replace_at(self) -> float:
        """Time of the next allowed replacement, in monotonic seconds.

        The first death is replaced at once. The delay starts at FIRST_DELAY_S, doubles with each
        further death, and ends at MAX_DELAY_S.
        """
        if len(self.times) < 2:
            return self.times[-1] if self.times else 0.0
        exponent = min(len(self.times) - 2, 30)
        return self.times[-1] + min(FIRST_DELAY_S * 2.0**exponent, MAX_DELAY_S)
