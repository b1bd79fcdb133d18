"""Measures engines beside each other: the same inputs, one engine at a time, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Protocol

from kvrelay.bench.cases import DecodeCase, PrefillCase

DECODE_STEPS = 8  # in one run
_SEED = 0


class Engine(Protocol):
    """What `EngineProcess` does."""

    @property
    def name(self) -> str: ...
    def prefill(self, prompt: list[int]) -> float: ...
    def open(self, prompts: list[list[int]]) -> None: ...
    def decode(self, steps: int) -> float: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """seconds: of a whole prompt, or of one decode step; by engine, one for each run."""

    case: PrefillCase | DecodeCase
    seconds: Mapping[str, tuple[float, ...]]

    def median(self, engine: str) -> float:
        return median(self.seconds[engine])


def tokens_beyond(runs: int) -> int:
    """How far a decode case's sequences grow past its context."""
    return DECODE_STEPS * (runs // 2 + 1)


def measure(
    cases: Sequence[PrefillCase | DecodeCase],
    engines: Sequence[Engine],
    runs: int,
    vocab_size: int,
    done: Callable[[], None],
) -> list[Measured]:
    """Each case `runs` times on each engine, in turns, after a run that does not count; `done` is
    called for each.
    """
    results = []
    random = Random(_SEED)
    for case in cases:
        if isinstance(case, PrefillCase):
            result = _prefill(case, engines, runs, vocab_size, random)
        else:
            result = _decode(case, engines, runs, vocab_size, random)
        results.append(result)
        done()
    return results


def _prefill(
    case: PrefillCase, engines: Sequence[Engine], runs: int, vocab_size: int, random: Random
) -> Measured:
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for _ in range(1 + runs):
        prompt = _prompt(case.tokens, vocab_size, random)
        for engine in engines:
            seconds[engine.name].append(engine.prefill(prompt))
    return _counted(case, seconds)


def _decode(
    case: DecodeCase, engines: Sequence[Engine], runs: int, vocab_size: int, random: Random
) -> Measured:
    """The sequences grow as they are measured; they begin shorter, so that `context` is the
    mean.
    """
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    before = max(1, case.context - DECODE_STEPS * (2 + runs) // 2)
    prompts = [_prompt(before, vocab_size, random) for _ in range(case.batch)]
    for engine in engines:
        engine.open(prompts)
    for _ in range(1 + runs):
        for engine in engines:
            seconds[engine.name].append(engine.decode(DECODE_STEPS) / DECODE_STEPS)
    for engine in engines:
        engine.close()
    return _counted(case, seconds)


def _counted(case: PrefillCase | DecodeCase, seconds: Mapping[str, list[float]]) -> Measured:
    return Measured(case, {name: tuple(every[1:]) for name, every in seconds.items()})


def _prompt(tokens: int, vocab_size: int, random: Random) -> list[int]:
    return random.choices(range(vocab_size), k=tokens)
