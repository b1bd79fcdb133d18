"""Counts of a Poisson process."""

from __future__ import annotations

import random


def poisson(rng: random.Random, mean: float) -> int:
    """The number of events in a unit of time that has `mean` on average."""
    number, at = -1, 0.0
    while at < 1:
        at, number = at + rng.expovariate(mean), number + 1
    return number
