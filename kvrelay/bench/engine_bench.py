"""Measures several engines on the same inputs. The engines take turns; only one runs at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Protocol

from kvrelay.bench.cases import DecodeCase, PrefillCase

# Steps in one run.
DECODE_STEPS = 8
_SEED = 0


class Engine(Protocol):
    """The interface that `EngineProcess` implements."""

    @property
    def name(self) -> str:
        """Name and version of the engine, for the report."""
        ...

    def prefill(self, prompt: list[int]) -> float:
        """Prefills one prompt; returns seconds to its first token."""
        ...

    def open(self, prompts: list[list[int]]) -> None:
        """Prefills a batch of prompts and keeps it open for `decode`."""
        ...

    def decode(self, steps: int) -> float:
        """Runs `steps` decode steps on the open batch; returns seconds."""
        ...

    def close(self) -> None:
        """Drops the open batch."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """seconds: for each engine, one value per run, for a whole prompt or for one decode step."""

    case: PrefillCase | DecodeCase
    seconds: Mapping[str, tuple[float, ...]]

    def median(self, engine: str) -> float:
        """Returns the median of the engine's runs, in seconds."""
        return median(self.seconds[engine])


def tokens_beyond(runs: int) -> int:
    """Number of tokens by which the sequences of a decode case grow past the context of the
    case.
    """
    return DECODE_STEPS * (runs // 2 + 1)


def measure(
    cases: Sequence[PrefillCase | DecodeCase],
    engines: Sequence[Engine],
    runs: int,
    vocab_size: int,
    done: Callable[[], None],
) -> list[Measured]:
    """Measures each case `runs` times on each engine. The engines take turns. A first run of each
    engine does not count. Calls `done` after each case.
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
    """Measures a decode case. The sequences grow during the measurement, so they start shorter:
    `context` is the mean length.
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
