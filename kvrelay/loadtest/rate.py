"""The request rate over time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvrelay.errors import InvalidArgument
from kvrelay.planning.quantity import grouped, plain

_FORMS = (
    "give R requests per second, inf, or a comma-separated list of stages R:SECONDS and "
    "FROM-TO:SECONDS"
)
# Rates, and seconds of a stage, between which no sum or product overflows.
_LEAST, _MOST = 1e-9, 1e9
# A hyphen is a sign inside of an exponent.
_RANGE = re.compile(r"(.+?)(?<!e)-(.+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage in which the rate changes linearly from `first` to `last` requests per second."""

    first: float
    last: float
    seconds: float = math.inf

    @property
    def arrivals(self) -> float:
        """Expected number of arrivals in the whole stage."""
        mean = (self.first + self.last) / 2
        return mean * self.seconds if mean else 0.0

    def time_of(self, arrivals: float) -> float:
        """Returns the time in seconds after the start of the stage at which `arrivals` arrivals are
        expected. It solves rate t + slope t^2 / 2 = arrivals.
        """
        if arrivals == 0 or math.isinf(self.first):
            return 0.0
        slope = 0.0 if self.first == self.last else (self.last - self.first) / self.seconds
        return (
            2 * arrivals / (self.first + math.sqrt(max(0.0, self.first**2 + 2 * slope * arrivals)))
        )

    def __str__(self) -> str:
        rate = f"{self.first:g}" if self.first == self.last else f"{self.first:g}-{self.last:g}"
        return rate if math.isinf(self.seconds) else f"{rate}:{self.seconds:g}"


# Stages, one after the other.
Rate = tuple[Stage, ...]


def constant(rate: float) -> Rate:
    """Returns an endless constant rate, in requests per second."""
    return (Stage(rate, rate),)


def rate_text(rate: Rate) -> str:
    """Formats a rate so that `parse_rate` can read it."""
    return ",".join(map(str, rate))


def seconds_of(rate: Rate) -> float:
    """Returns the duration of all stages in seconds; infinite for an endless rate."""
    return sum(stage.seconds for stage in rate)


def arrivals(
    rate: Sequence[Stage], gap: Callable[[int], float], first: float = 0.0
) -> Iterator[float]:
    """Yields the arrival times in seconds after the start. The first arrival is at the time by
    which `first` arrivals are expected.

    gap(n) draws, for stage n, the number of expected arrivals between two consecutive arrivals,
    with mean 1. The rate scales each gap. A gap that spans the end of a stage continues in the next
    stage.
    """
    begin, due = 0.0, first
    for number, stage in enumerate(rate):
        while due < stage.arrivals:
            yield begin + stage.time_of(due)
            due += gap(number)
        due -= stage.arrivals
        begin += stage.seconds


def parse_rate(text: str) -> Rate:
    """Parses `4`, `inf`, `1:30,2:30` (steps) or `1-6:60` (a ramp). Raises InvalidArgument."""
    try:
        stages = tuple(_stage(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidArgument(f"--rate {text!r}: {error}; {_FORMS}", field="rate") from error
    if len(stages) > 1 and not math.isfinite(seconds_of(stages)):
        raise InvalidArgument(
            f"--rate {text!r}: each of several stages needs :SECONDS; {_FORMS}", field="rate"
        )
    if not sum(stage.arrivals for stage in stages) > 0:
        raise InvalidArgument(f"--rate {text!r} sends no request; {_FORMS}", field="rate")
    return stages


def _stage(text: str) -> Stage:
    rates, colon, seconds = text.partition(":")
    found = _RANGE.fullmatch(rates)
    first, last = found.groups() if found else (rates, rates)
    stage = Stage(_number(first), _number(last), _number(seconds) if colon else math.inf)
    ramp, bounded = stage.first != stage.last, math.isfinite(stage.seconds)
    if not (stage.first >= 0 and stage.last >= 0 and stage.seconds > 0):
        raise ValueError("rates must be 0 or more, and seconds more than 0")
    if ramp and not colon:
        raise ValueError("a ramp needs :SECONDS")
    if (ramp or colon) and not (bounded and math.isfinite(stage.first + stage.last)):
        raise ValueError("the rates and seconds of a stage must be finite")
    for number in (stage.first, stage.last, stage.seconds):
        if number and math.isfinite(number) and not _LEAST <= number <= _MOST:
            raise ValueError(
                f"{plain(number)} is outside of {plain(_LEAST)} to {grouped(_MOST, 1)}"
            )
    return stage


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r:.40} is not a number") from None
