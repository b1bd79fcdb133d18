"""When requests arrive in an open-loop test."""

from __future__ import annotations

import math
from random import Random


def arrival_times(
    rate: float, burstiness: float, count: int | None, duration: float | None, random: Random
) -> list[float]:
    """Seconds after the start, ascending, the first at 0; ends at `count` arrivals or `duration` seconds.

    The gaps are drawn from a gamma distribution with mean 1/rate and shape `burstiness`: 1 is a Poisson
    process, less comes in bursts, more is more even. An infinite rate lets all arrive at once.
    """
    assert count is not None or (duration is not None and math.isfinite(rate)), "an endless test"
    times: list[float] = []
    now = 0.0
    while (count is None or len(times) < count) and (duration is None or now < duration):
        times.append(now)
        if math.isfinite(rate):
            now += random.gammavariate(burstiness, 1 / (rate * burstiness))
    return times
