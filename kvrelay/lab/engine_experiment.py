"""Measures the steps of an engine within a given time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from statistics import median

from kvrelay.bench.engine_bench import DECODE_STEPS, Engine
from kvrelay.bench.engine_process import native_engine
from kvrelay.bench.environment import first_cores
from kvrelay.bench.run import Progress
from kvrelay.errors import FailedPrecondition
from kvrelay.lab.figures import EngineFigures
from kvrelay.types.kv_layout import KvLayout

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
POSITIONS = (32, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32)
# Tokens of each sequence of a batch.
BATCH_CONTEXT = 128
CHUNK_TOKENS = 512
_RUNS = 5
# Times that the progress moves for a case: after its preparation, and after each run.
MOVES = 1 + _RUNS
# Tokens by which a sequence grows while it is measured.
_SPARE = DECODE_STEPS * (_RUNS + 2)
# Bytes of KV memory.
_KV_BYTES = 2**30


def measure_engine(path: str, weights: str, seconds: float, progress: Progress) -> EngineFigures:
    """Measures an engine on the first core for about `seconds` plus its start.

    path: folder of the model. weights: `auto` or `int8`. Raises Unavailable if the engine cannot
    run the model, and FailedPrecondition if the model's context is too short.
    """
    started = progress(f"starting the engine, weights {weights}", 1)
    with native_engine(
        path,
        cores=first_cores(1),
        chunk_tokens=CHUNK_TOKENS,
        max_model_len=POSITIONS[-1] + _SPARE,
        kv_bytes=_KV_BYTES,
        weights=weights,
    ) as engine:
        started()
        facts = engine.facts
        longest = min(int(facts["model_len"]), int(facts["kv_tokens"])) - _SPARE
        if longest < LENGTHS[1]:
            raise FailedPrecondition(
                f"a context of {facts['model_len']} tokens is too short for the lab; it needs at "
                f"least {LENGTHS[1] + _SPARE}"
            )
        lengths = [one for one in LENGTHS if one <= longest]
        positions = [one for one in POSITIONS if one <= longest]
        room = int(facts["kv_tokens"]) // (BATCH_CONTEXT + _SPARE + 64)
        batches = [one for one in BATCHES if one <= max(2, room)]
        cases = len(lengths) + len(positions) + len(batches)
        done = progress(f"prefill and decode, weights {weights}", cases * MOVES)
        steps = StepClock(engine, int(facts["vocab_size"]), done)
        part = seconds / 3
        prefill = steps.measured(lengths, steps.prefill, part)
        position = steps.measured(positions, lambda context: steps.decode(1, context), part)
        batch = steps.measured(batches, lambda size: steps.decode(size, BATCH_CONTEXT), part)
    return EngineFigures(
        weights=str(facts["engine"]),
        layout=KvLayout.of_fields(facts["layout"]),
        vocab_size=int(facts["vocab_size"]),
        model_len=longest,
        prefill=prefill,
        position=position,
        batch=batch,
        batch_context=BATCH_CONTEXT,
    )


class StepClock:
    """Times the steps of an engine as long as there is time left."""

    def __init__(self, engine: Engine, vocab_size: int, done: Callable[[], None]) -> None:
        """done: called MOVES times for each case."""
        self._engine = engine
        self._vocab_size = vocab_size
        self._done = done
        # Moves of the present case that are still to come.
        self._moves = 0
        self._random = Random(0)
        self._until = 0.0

    def measured(
        self, cases: Sequence[int], measure: Callable[[int], float], seconds: float
    ) -> dict[int, float]:
        """Returns what `measure` gives for the cases, which grow, for about `seconds`. The first
        two are measured however long they take.
        """
        self._until = time.monotonic() + seconds
        found: dict[int, float] = {}
        before = 0.0
        for case in cases:
            began = time.monotonic()
            self._moves = MOVES
            # A larger case takes longer than the one before.
            if len(found) < 2 or began + before < self._until:
                found[case] = measure(case)
                before = time.monotonic() - began
            while self._moves:
                self._move()
        return found

    def prefill(self, tokens: int) -> float:
        """Returns the median time to the first token of a prompt."""
        # The first run may compile, and does not count.
        self._engine.prefill(self._prompt(tokens))
        self._move()
        return self._median(lambda: self._engine.prefill(self._prompt(tokens)))

    def decode(self, batch: int, context: int) -> float:
        """Returns the median time of a step."""
        self._engine.open([self._prompt(context) for _ in range(batch)])
        self._engine.decode(DECODE_STEPS)
        self._move()
        found = self._median(lambda: self._engine.decode(DECODE_STEPS) / DECODE_STEPS)
        self._engine.close()
        return found

    def _median(self, run: Callable[[], float]) -> float:
        found = [self._moved(run)]
        # Most of the time is for the larger cases that follow.
        until = time.monotonic() + (self._until - time.monotonic()) / 4
        while len(found) < _RUNS and time.monotonic() < until:
            found.append(self._moved(run))
        return median(found)

    def _moved(self, run: Callable[[], float]) -> float:
        found = run()
        self._move()
        return found

    def _move(self) -> None:
        self._moves -= 1
        self._done()

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=tokens)
