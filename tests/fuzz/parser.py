"""What is fuzzed: a way to make inputs from numbers, and a parser that must take or refuse each of
them.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

Feed = Callable[[bytes], str]
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Parser:
    """`feeding` gives the function that takes one input in and names the outcome, such as the error
    it was refused with. Whatever that function raises is a finding: it catches the typed errors
    that are right by itself.

    An input may take `mib` MiB of memory and `mib_per_mib` times its own size.
    """

    name: str
    make: Callable[[random.Random], bytes]
    feeding: Callable[[], AbstractContextManager[Feed]]
    mib: int = 32
    mib_per_mib: int = 64

    def input(self, seed: int) -> bytes:
        return self.make(random.Random(f"{self.name} {seed}"))


class Finding(Exception):
    """An input that does harm; says which, and what it does."""


@dataclass(slots=True)
class Round:
    """What came of some inputs."""

    inputs: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0  # the most memory that one input took
    outcomes: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        rate = self.inputs / self.seconds if self.seconds else 0.0
        most = ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common(8))
        return (
            f"{self.inputs} inputs, {rate:.0f}/s, at most {self.peak_bytes / _MIB:.1f} MiB for "
            f"one: {most}"
        )


def refusal(message: str, *, names: str = "") -> str:
    """The outcome of an input that was refused with this message, which has to be short and to say
    where.
    """
    assert len(message) < 1500, f"too long for a log: {message[:3000]!r}"
    assert names in message, f"without its place: {message!r}"
    return "refused"


def fuzz(
    parser: Parser, seeds: Iterable[int], before_each: Callable[[int], None] = lambda seed: None
) -> Round:
    """Raises Finding. `before_each` is told which input comes next, for one who watches from
    outside.
    """
    found = Round()
    begin = time.monotonic()
    with _silence(), parser.feeding() as feed:
        with suppress(Exception):
            feed(parser.input(-1))  # what is made once, at the first input, is none's
        for seed in seeds:
            before_each(seed)
            data = parser.input(seed)
            resting = _restart_peak()
            try:
                found.outcomes[feed(data)] += 1
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic of a library's Rust is no Exception
                raise Finding(
                    f"{parser.name}, seed {seed}, {len(data)} bytes: {error!r}"
                ) from error
            taken = max(0, _status("VmHWM") - resting)
            allowed = parser.mib * _MIB + parser.mib_per_mib * len(data)
            if taken > allowed:
                raise Finding(
                    f"{parser.name}, seed {seed}, {len(data)} bytes: took {taken} bytes of memory"
                )
            found.inputs += 1
            found.peak_bytes = max(found.peak_bytes, taken)
    found.seconds = time.monotonic() - begin
    return found


@contextmanager
def _silence() -> Iterator[None]:
    """No logs: they would say the same for every input."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def _restart_peak() -> int:
    """Lets the kernel measure this process's peak of memory anew; returns what it holds now, in
    bytes.
    """
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not say {name}")
