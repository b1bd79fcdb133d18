"""How long to wait before replacing a worker of a pool whose workers keep dying."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 300.0  # deaths longer ago are forgotten
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class Deaths:
    """Times of a pool's last unexpected deaths, monotonic seconds, oldest first."""

    times: tuple[float, ...] = ()

    def and_at(self, now: float) -> Deaths:
        return Deaths((*(time for time in self.times if time > now - WINDOW_S), now))

    @property
    def replace_at(self) -> float:
        """The first death is made good at once, each further one after twice the delay before."""
        if len(self.times) < 2:
            return self.times[-1] if self.times else 0.0
        exponent = min(len(self.times) - 2, 30)
        return self.times[-1] + min(FIRST_DELAY_S * 2.0**exponent, MAX_DELAY_S)
