"""Distributions of prompt and answer lengths, in tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import NormalDist
from typing import Protocol, TypeVar

from kvrelay.errors import InvalidArgument

N = TypeVar("N", int, float)

_NORMAL = NormalDist()
_FORMS = "write a number, LOW-HIGH, or lognormal:median=M,sigma=S,min=A,max=B"


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    @property
    def low(self) -> int:
        """Shortest length."""
        ...

    @property
    def longest(self) -> int:
        """Length that at most one draw in 10,000 exceeds."""
        ...

    @property
    def mean(self) -> float:
        """Expected length."""
        ...

    def draw(self, random: Random) -> int:
        """Draws one length."""
        ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """The uniform distribution over the lengths from low to high, both included."""

    low: int
    high: int

    @property
    def longest(self) -> int:
        """Longest length."""
        return self.high

    @property
    def mean(self) -> float:
        """Expected length."""
        return (self.low + self.high) / 2

    def draw(self, random: Random) -> int:
        """Draws one length."""
        return random.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}-{self.high}"


# Longest prompt or answer, in tokens. No context holds more.
_MOST = 10**8
# Largest standard deviation of a logarithm; exp of larger values is out of any range.
MAX_SIGMA = 10.0


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution: exp of a normal variable with mean ln(median) and standard
    deviation sigma, rounded and clamped to [low, high].
    """

    median: float
    sigma: float
    low: int
    high: int

    @property
    def longest(self) -> int:
        """Length that at most one draw in 10,000 exceeds."""
        drawn = self.median * math.exp(self.sigma * _NORMAL.inv_cdf(1 - 1e-4))
        return max(self.low, min(self.high, math.ceil(drawn)))

    @property
    def mean(self) -> float:
        """Expected length. The part between the bounds is exp(mu + sigma^2 / 2) (F(b - sigma) - F(a
        - sigma)). F is the standard normal distribution function; a and b are (ln x - mu) / sigma
        of low and high.
        """
        mu, sigma = math.log(self.median), self.sigma
        if not sigma:
            return min(max(self.median, self.low), self.high)
        low, high = ((math.log(cut) - mu) / sigma for cut in (self.low, self.high))
        below, above = _NORMAL.cdf(low), 1 - _NORMAL.cdf(high)
        within = math.exp(mu + sigma**2 / 2) * (
            _NORMAL.cdf(high - sigma) - _NORMAL.cdf(low - sigma)
        )
        return self.low * below + within + self.high * above

    def draw(self, random: Random) -> int:
        """Draws one length."""
        return max(
            self.low,
            min(self.high, round(random.lognormvariate(math.log(self.median), self.sigma))),
        )

    def __str__(self) -> str:
        text = f"lognormal:median={self.median:.12g},sigma={self.sigma:.12g},min={self.low}"
        return text if self.high == _MOST else f"{text},max={self.high}"


def parse_lengths(text: str, field: str) -> Lengths:
    """Parses `256`, `32-512` or `lognormal:median=400,sigma=0.8,min=32,max=2048`. Raises
    InvalidArgument.
    """
    try:
        lengths = _lognormal(text) if text.startswith("lognormal:") else _uniform(text)
    except ValueError as error:
        raise InvalidArgument(f"{field}: {text!r} ({error}); {_FORMS}", field=field) from error
    if not 1 <= lengths.low <= lengths.high <= _MOST:
        raise InvalidArgument(
            f"{field}: {text!r:.80} has a length below 1 or above {_MOST:,}, or a range in the "
            "wrong order",
            field=field,
        )
    return lengths


def _uniform(text: str) -> Uniform:
    low, dash, high = text.partition("-")
    return Uniform(_whole(low), _whole(high if dash else low))


def _whole(text: str) -> int:
    return _number(text, int, "a whole number")


def _number(text: str, kind: Callable[[str], N], name: str) -> N:
    """Raises ValueError in words for users."""
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r:.40} is not {name}") from None


def _lognormal(text: str) -> LogNormal:
    pairs = [part.partition("=")[::2] for part in text.removeprefix("lognormal:").split(",")]
    values = {"min": "1", "max": str(_MOST)} | dict(pairs)
    if values.keys() != {"median", "sigma", "min", "max"}:
        raise ValueError("median and sigma are required; min and max are optional")
    median, sigma = (_number(values[one], float, "a number") for one in ("median", "sigma"))
    if not (0 < median <= _MOST and 0 <= sigma <= MAX_SIGMA):
        raise ValueError(
            f"median must be above 0 and at most {_MOST:,}, and sigma from 0 to {MAX_SIGMA:g}"
        )
    return LogNormal(median, sigma, _whole(values["min"]), _whole(values["max"]))
