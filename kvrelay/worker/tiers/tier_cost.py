"""Predicts whether blocks come back from a tier sooner than they can be computed. Pure: the time is
an argument, in monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

# Seconds of a read without its bytes: two changes of thread, and the opening of files.
_LATENCY_S = 0.002
# The same for stores: a search, and a call to each.
REMOTE_LATENCY_S = 0.005
# Bytes per second, until there is a measurement: that of an SSD. A first read that is slower than
# this is given up after the time of computing.
FIRST_GUESS = 2e9
# The same for stores: that of a network.
REMOTE_GUESS = 0.5e9
# Weight of the newest measurement, of computing and of reading.
_WEIGHT, _READ_WEIGHT = 0.3, 0.5
# The fastest rate that is believed, since a short time is measured inexactly: that of memory.
_MOST = 2e10
# Seconds in which the expected rate doubles without a new measurement, up to FIRST_GUESS. So a disk
# that was slow for a moment is tried again soon, and one that is always slow is tried rarely.
DOUBLING_S = 30.0


@dataclass(slots=True)
class TierCost:
    """Learns the rate of computing on this worker, and the rate of reading from its tiers."""

    # Prompt tokens per second; 0 until measured.
    tokens_per_second: float = 0.0
    # Bytes per second at the last measurement; 0 until measured.
    bytes_per_second: float = 0.0
    # Time of the last measurement of reading.
    measured_at: float = 0.0
    # Bytes per second until there is a measurement, and seconds of a read without its bytes.
    first_guess: float = FIRST_GUESS
    latency_s: float = _LATENCY_S

    def expected_rate(self, now: float) -> float:
        """The rate of reading that is expected now, in bytes per second."""
        if not self.bytes_per_second:
            return self.first_guess
        doublings = min(max(0.0, now - self.measured_at) / DOUBLING_S, 64.0)
        most = max(self.bytes_per_second, self.first_guess)
        return min(self.bytes_per_second * 2**doublings, most)

    def read_s(self, num_bytes: int, now: float) -> float:
        """Seconds that a read is predicted to take; 0 for no bytes."""
        return self.latency_s + num_bytes / self.expected_rate(now) if num_bytes else 0.0

    def is_read_faster(
        self, tokens: int, num_bytes: int, now: float, besides_s: float = 0.0
    ) -> bool:
        """True if reading `num_bytes`, which include reads under way, is predicted to end sooner
        than computing. Also true before the first measurement of computing, and false for no
        tokens. besides_s: seconds of reads from elsewhere, which come before or after.
        """
        if not tokens:
            return False
        if not self.tokens_per_second:
            return True
        seconds = besides_s + self.read_s(num_bytes, now)
        return seconds < tokens / self.tokens_per_second

    def add_compute(self, tokens: int, seconds: float) -> None:
        """Adds a measurement of computing."""
        if tokens > 0 and seconds > 0:
            self.tokens_per_second = _mean(self.tokens_per_second, tokens / seconds)

    def add_read(self, num_bytes: int, seconds: float, now: float, *, wanted: int) -> None:
        """Adds a measurement of reading. wanted: bytes that were asked for. If fewer came, the read
        counts as if all of them had taken twice as long: how long is not known.

        The mean is that of the logarithms, so that neither a very fast read nor a very slow one
        hides those after it.
        """
        if num_bytes < wanted:
            num_bytes, seconds = wanted, 2 * seconds
        rate = min(max(num_bytes, 1) / max(seconds - self.latency_s, 1e-6), _MOST)
        old = self.bytes_per_second or rate
        self.bytes_per_second = old ** (1 - _READ_WEIGHT) * rate**_READ_WEIGHT
        self.measured_at = now


def _mean(old: float, new: float) -> float:
    return new if not old else (1 - _WEIGHT) * old + _WEIGHT * new
