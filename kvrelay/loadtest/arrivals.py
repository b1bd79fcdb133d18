"""The arrival times of an open-loop test."""

from __future__ import annotations

import math
from itertools import islice, takewhile
from random import Random

from kvrelay.loadtest.rate import Rate, arrivals, seconds_of


def arrival_times(
    rate: Rate, burstiness: float, count: int | None, duration: float | None, random: Random
) -> list[float]:
    """Returns ascending times in seconds after the start. They end at `count` arrivals, after
    `duration` seconds, or with the rate.

    The gaps are drawn from a gamma distribution with mean 1/rate and shape `burstiness`. Shape 1 is
    a Poisson process; a smaller shape is burstier, a larger one more even, and infinity is
    constant. With an infinite rate, all requests arrive at once.
    """

    def gap(_stage: int) -> float:
        return 1.0 if math.isinf(burstiness) else random.gammavariate(burstiness, 1 / burstiness)

    end = min(math.inf if duration is None else duration, seconds_of(rate))
    assert count is not None or (math.isfinite(end) and math.isfinite(rate[0].first)), (
        "an endless test"
    )
    return list(islice(takewhile(lambda time: time < end, arrivals(rate, gap)), count))
