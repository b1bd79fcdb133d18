"""What arrives at a cluster: its rate, its variability and its lengths. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

from kvrelay.errors import FailedPrecondition
from kvrelay.planning.quantity import plain

# Requests of which lengths are kept.
MAX_LENGTHS = 2000
# Tokens of a prompt or an answer.
_MAX_TOKENS = 10**8
# The busiest window has this part of a recording, and at least this length in seconds.
_PARTS = 60
_LEAST_PART_S = 60.0
# A gap is a hole if it is longer than this share of the trace, and longer than this time.
_HOLE_SHARE = 0.25
_HOLE_S = 300.0
_FEW = 10


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with their rate. `lengths` are (prompt, answer) in tokens, of a sample."""

    # Requests per second that the cluster must serve.
    rate: float
    # Mean rate of the whole recording; equal to `rate` without one.
    mean_rate: float
    # Squared coefficient of variation of the times between arrivals; 1 for Poisson arrivals.
    arrival_scv: float
    lengths: tuple[tuple[int, int], ...]
    # Share of the prompt tokens that prefix caches hold.
    cached_share: float = 0.0
    source: str = ""

    @property
    def mean_prompt(self) -> float:
        """Mean prompt length in tokens."""
        return fsum(prompt for prompt, _ in self.lengths) / len(self.lengths)

    @property
    def mean_answer(self) -> float:
        """Mean answer length in tokens."""
        return fsum(answer for _, answer in self.lengths) / len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(prompt + answer for prompt, answer in self.lengths)

    @property
    def decoded(self) -> float:
        """Mean tokens that decode workers generate for a request. The first one comes from the
        prefill.
        """
        return fsum(max(0, answer - 1) for _, answer in self.lengths) / len(self.lengths)

    def context(self) -> tuple[float, float]:
        """Returns mean and standard deviation of the tokens that a running sequence holds, over
        time: each request counts as often as it has tokens in its answer.
        """
        weight = fsum(answer for _, answer in self.lengths)
        mean = fsum(answer * (prompt + answer / 2) for prompt, answer in self.lengths) / weight
        # A uniform position within the answer has the variance answer ** 2 / 12.
        spread = fsum(
            answer * ((prompt + answer / 2 - mean) ** 2 + answer**2 / 12)
            for prompt, answer in self.lengths
        )
        return mean, (spread / weight) ** 0.5


def check_lengths(lengths: Sequence[tuple[int, int]], what: str) -> tuple[tuple[int, int], ...]:
    """Returns an even sample of at most MAX_LENGTHS. Raises FailedPrecondition for lengths that no
    request has.
    """
    if not lengths:
        raise FailedPrecondition(f"{what}: there are no requests; give a longer recording")
    for prompt, answer in lengths:
        if not 1 <= prompt <= _MAX_TOKENS or not 0 <= answer <= _MAX_TOKENS:
            raise FailedPrecondition(
                f"{what}: a request has {prompt} prompt tokens and {answer} answer tokens; allowed "
                f"are up to {_MAX_TOKENS:,}, and at least 1 prompt token"
            )
    # Evenly spaced over the sorted lengths, so that the extremes stay.
    ordered = sorted((prompt, max(1, answer)) for prompt, answer in lengths)
    if len(ordered) <= MAX_LENGTHS:
        return tuple(ordered)
    step = (len(ordered) - 1) / (MAX_LENGTHS - 1)
    return tuple(ordered[round(index * step)] for index in range(MAX_LENGTHS))


def recorded(
    times: Sequence[float],
    lengths: Sequence[tuple[int, int]],
    what: str,
    rate: float | None = None,
    cached_share: float = 0.0,
) -> Workload:
    """Returns the workload of recorded requests. times: seconds, ascending.

    The rate is that of the busiest minute, or of the busiest sixtieth of a recording of more than
    an hour, unless `rate` is given. Raises FailedPrecondition for a recording with a hole, whose
    rate is that of no workload.
    """
    kept = check_lengths(lengths, what)
    gaps = [after - before for before, after in pairwise(times)]
    span = times[-1] - times[0] if times else 0.0
    if rate is None and (len(times) < _FEW or span <= 0):
        raise FailedPrecondition(
            f"{what}: {len(times)} requests within {plain(span, 3)} s have no rate; give one "
            "with --rate"
        )
    if rate is None and max(gaps) > max(_HOLE_S, _HOLE_SHARE * span):
        at = times[gaps.index(max(gaps))]
        raise FailedPrecondition(
            f"{what}: there is no request from second {at:,.0f} on for {max(gaps):,.0f} s, more "
            "than a quarter of the recording; cut the recording, or give the rate with --rate"
        )
    mean_rate = (len(times) - 1) / span if span > 0 else rate or 0.0
    busiest, scv = _busiest(times, span) if span > 0 else (mean_rate, 1.0)
    return Workload(rate or busiest, rate or mean_rate, scv, kept, cached_share, what)


def _busiest(times: Sequence[float], span: float) -> tuple[float, float]:
    """Returns the rate of the busiest window, and the SCV of the times between its arrivals."""
    part = min(span, max(_LEAST_PART_S, span / _PARTS))
    best, first, after = (0, 0), 0, 0
    for first, at in enumerate(times):
        while after < len(times) and times[after] <= at + part:
            after += 1
        best = max(best, (after - first, first))
    number, first = best
    gaps = [later - before for before, later in pairwise(times[first : first + number])]
    # A window that begins with an arrival has one more than its rate says.
    rate = max(1, number - 1) / part
    mean = fsum(gaps) / len(gaps) if gaps else 0.0
    if len(gaps) < _FEW or mean <= 0:
        return rate, 1.0
    return rate, fsum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2
