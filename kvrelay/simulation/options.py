"""Texts of `kvrelay simulate`: pools, failures and sweeps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvrelay.errors import InvalidArgument
from kvrelay.simulation.scenario import MAX_WORKERS, Failure
from kvrelay.types.workers import POOLS

# Most points of a sweep.
MAX_POINTS = 1000


@dataclass(frozen=True, slots=True)
class PoolPart:
    """Workers of a pool that have the same profile. `profile` is a file; empty for the default."""

    count: int
    profile: str = ""


def parse_pool(texts: Sequence[str], option: str) -> tuple[PoolPart, ...]:
    """Parses `4` or `4:FILE`, once for each kind of worker. Raises InvalidArgument."""
    parts = []
    for text in texts:
        number, _, file = text.partition(":")
        if not (number.isascii() and number.isdecimal()) or int(number[:9]) > MAX_WORKERS:
            raise InvalidArgument(
                f"{option} {text!r:.60}: give N or N:PROFILE, with N from 0 to {MAX_WORKERS}",
                field=option.lstrip("-"),
            )
        parts.append(PoolPart(int(number), file))
    return tuple(parts)


def parse_failures(texts: Sequence[str]) -> tuple[Failure, ...]:
    """Parses `decode-0@30`: the worker dies after 30 seconds. Raises InvalidArgument."""
    failures = []
    for text in texts:
        worker, at, seconds = text.partition("@")
        pool, dash, number = worker.rpartition("-")
        try:
            at_s = float(seconds)
        except ValueError:
            at_s = math.nan
        if not (at and dash and pool in POOLS and number.isdecimal() and 0 <= at_s < math.inf):
            raise InvalidArgument(
                f"--fail {text!r:.60}: give WORKER@SECONDS, such as decode-0@30", field="fail"
            )
        failures.append(Failure(f"{pool}-{int(number)}", at_s))
    return tuple(failures)


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a sweep: its values by key, as given."""

    values: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """The values as a text for people."""
        return " ".join(f"{key}={value}" for key, value in self.values)

    def get(self, key: str) -> str | None:
        """Returns the value of a key, or None."""
        return dict(self.values).get(key)

    def overrides(self) -> dict[str, object]:
        """Returns the values that are keys of the configuration."""
        return {key: _plain(value) for key, value in self.values if key not in ("pools", "rate")}


def parse_sweep(texts: Sequence[str]) -> tuple[Point, ...]:
    """Parses `KEY=V,V,...`, once for each key, to all combinations of values.

    A key is `pools` (values P:D), `rate`, or a key of the configuration such as
    prefill.chunk_tokens. Raises InvalidArgument.
    """
    axes: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        found = [one.strip() for one in values.split(",")]
        if not equals or not all(found) or key in axes:
            raise InvalidArgument(
                f"--sweep {text!r:.60}: give KEY=VALUE,VALUE,... once for each key", field="sweep"
            )
        if key not in ("pools", "rate") and "." not in key:
            raise InvalidArgument(
                f"--sweep {key!r:.60} is unknown; allowed are pools, rate, and keys of the "
                "configuration such as prefill.chunk_tokens",
                field="sweep",
            )
        axes[key] = list(dict.fromkeys(found))
    number = math.prod(map(len, axes.values()))
    if number > MAX_POINTS:
        raise InvalidArgument(
            f"--sweep has {number} combinations; the most is {MAX_POINTS}", field="sweep"
        )
    return tuple(_points(axes))


def _points(axes: dict[str, list[str]]) -> Iterator[Point]:
    for values in itertools.product(*axes.values()):
        yield Point(tuple(zip(axes, values, strict=True)))


def parse_ratio(text: str) -> tuple[int, int]:
    """Parses `3:1`, prefill and decode workers. Raises InvalidArgument."""
    prefill, colon, decode = text.partition(":")
    numbers = [one for one in (prefill, decode) if one.isascii() and one.isdecimal()]
    if not colon or len(numbers) != 2 or any(int(one[:9]) > MAX_WORKERS for one in numbers):
        raise InvalidArgument(
            f"--sweep pools={text!r:.60}: give PREFILL:DECODE, such as 3:1", field="sweep"
        )
    return int(prefill), int(decode)


def _plain(text: str) -> object:
    """Returns a number or a truth value where the text is one."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
