"""Waiting in front of several servers. Pure.

- Erlang's formulas: Erlang (1917); Cooper, "Introduction to Queueing Theory" (1981), chapter 3.
- Other than exponential times: the wait of M/M/c times (arrival SCV + service SCV) / 2, from Allen,
  "Probability, Statistics, and Queueing Theory" (1990), chapter 5, and Whitt, "Approximations for
  the GI/G/m Queue" (1993); its tail is exponential (Kingman 1961, heavy traffic).
- Square-root staffing: Halfin and Whitt, "Heavy-Traffic Limits for Queues with Many Exponential
  Servers" (1981), proposition 1.
"""

from __future__ import annotations

import math
from statistics import NormalDist

_NORMAL = NormalDist()
# Servers above which the limit of many servers replaces the recursion.
_MANY = 2000


def erlang_c(servers: int, offered: float) -> float:
    """Returns the probability that an arrival waits, with Poisson arrivals and exponential service.

    offered: arrival rate times mean service time. 1 if the servers cannot serve it.
    """
    if offered >= servers:
        return 1.0
    if offered <= 0:
        return 0.0
    if servers > _MANY:
        beta = (servers - offered) / math.sqrt(offered)
        if beta > 30:
            return 0.0
        return 1.0 / (1.0 + beta * _NORMAL.cdf(beta) / _NORMAL.pdf(beta))
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    share = offered / servers
    return blocked / (1.0 - share * (1.0 - blocked))


def square_root_servers(offered: float, wait_share: float) -> int:
    """Returns the servers at which about `wait_share` of the arrivals wait: offered + beta
    sqrt(offered). 0 < wait_share < 1.
    """
    low, high = 0.0, 40.0
    for _ in range(60):
        beta = (low + high) / 2
        pdf = _NORMAL.pdf(beta)
        waits = 1.0 / (1.0 + beta * _NORMAL.cdf(beta) / pdf) if pdf else 0.0
        low, high = (beta, high) if waits > wait_share else (low, beta)
    return max(1, math.ceil(offered + high * math.sqrt(offered)))


class Wait:
    """The wait of an arrival for the first free of several equal servers."""

    def __init__(
        self, servers: int, rate: float, service_s: float, arrival_scv: float, service_scv: float
    ) -> None:
        """rate: arrivals per second. scv: variance over squared mean."""
        offered = rate * service_s
        self.share = offered / servers
        self.probability = erlang_c(servers, offered)
        spread = max(1e-6, (arrival_scv + service_scv) / 2)
        free = servers / service_s - rate if service_s else math.inf
        # Mean wait of those that wait.
        self.scale_s = spread / free if free > 0 else math.inf

    @property
    def mean_s(self) -> float:
        """Mean wait of all arrivals, in seconds."""
        return self.probability * self.scale_s

    def beyond(self, seconds: float) -> float:
        """Returns the probability that an arrival waits longer than `seconds`."""
        if seconds < 0 or math.isinf(self.scale_s):
            return 1.0
        if not self.scale_s:
            return 0.0
        return self.probability * math.exp(-seconds / self.scale_s)
