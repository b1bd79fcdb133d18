"""The implementation of `kvrelay profile`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

from kvrelay.bench.engine_bench import DECODE_STEPS, Engine
from kvrelay.bench.engine_process import native_engine
from kvrelay.bench.environment import first_cores, model_folder
from kvrelay.bench.handoff.rates import measure_rates
from kvrelay.bench.profiling.fit import Fit, fit
from kvrelay.bench.run import Progress
from kvrelay.engine.base.device import find_device
from kvrelay.errors import FailedPrecondition
from kvrelay.planning.profile import Profile
from kvrelay.planning.step_cost_model import StepCostModel
from kvrelay.process.machine import processor_name
from kvrelay.types.kv_layout import KvLayout

LENGTHS = (8, 32, 96, 256, 512, 768, 1024, 1536, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (32, 256, 1024, 4096)
# Bytes of the hand-offs.
_SIZES = tuple(size * 2**20 for size in (1, 4, 16))
_MOST_RUNS = 9
# Most seconds that the prompts of one decode case take.
_OPEN_S = 6.0
# Seconds that a worker takes to change its pool: it allocates its KV memory again. Not measured.
ROLE_CHANGE_S = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `kvrelay profile`."""

    model: str
    # cpu or cuda.
    device: str = "cpu"
    weights: str = "auto"
    # None: one thread, or with a GPU one per available core.
    threads: int | None = None
    chunk_tokens: int = 512
    max_batch: int = 32
    # Bytes.
    kv_bytes: int = 2 * 2**30
    # The longest sequence that is measured.
    max_tokens: int = 8192
    # Seconds of the measurements of steps.
    seconds: float = 75.0


def run(options: Options, progress: Progress) -> Profile:
    """Measures and fits. Raises InvalidArgument for a bad option, ModelRefused for the model,
    Unavailable if an engine cannot run the model, and FailedPrecondition if there are too few
    measurements.
    """
    device = find_device(options.device)
    on_gpu = options.device != "cpu"
    cores = first_cores(options.threads or (len(os.sched_getaffinity(0)) if on_gpu else 1))
    path = model_folder(options.model)
    started = progress("starting the engine", 1)
    with native_engine(
        path,
        cores=cores,
        chunk_tokens=options.chunk_tokens,
        max_model_len=options.max_tokens,
        kv_bytes=options.kv_bytes,
        device=options.device,
        weights=options.weights,
    ) as engine:
        started()
        facts = engine.facts
        # On a CPU, workers are forked from a process that has imported all modules.
        start_s = engine.ready_seconds if on_gpu else facts["seconds_since_imports"]
        measuring = _Steps(engine, options, facts)
        prefill = measuring.prefill(progress("prefill", len(measuring.lengths)))
        decode, bends = measuring.decode(prefill, progress("decode", len(measuring.cases)))
    layout = KvLayout.of_fields(facts["layout"])
    handoff = asyncio.run(_handoff(layout, progress))
    name = _machine(str(device)) if on_gpu else processor_name()
    machine = f"{name}, {len(cores)} thread{'s' * (len(cores) > 1)}"
    (prefill_base, prefill_token, prefill_pair) = prefill.coefficients
    (decode_base, decode_sequence, decode_context, *more) = decode.coefficients
    (handoff_base, handoff_byte) = handoff.coefficients
    costs = StepCostModel(
        prefill_base_s=prefill_base,
        prefill_token_s=prefill_token,
        prefill_token_context_s=prefill_pair,
        decode_base_s=decode_base,
        decode_sequence_s=decode_sequence,
        decode_context_token_s=decode_context,
        handoff_base_s=handoff_base,
        handoff_byte_s=handoff_byte,
        start_s=start_s,
        role_change_s=ROLE_CHANGE_S,
        kind="measured",
        model=options.model[:200],
        device=machine[:200],
        source="fitted by `kvrelay profile`; start_s is the start of an engine"
        f"{'' if on_gpu else ' in a forked process'}, and role_change_s is assumed",
        decode_bends=tuple((bend, one) for bend, one in zip(bends, more, strict=True) if one),
    )
    parts = {"prefill": prefill, "decode": decode, "handoff": handoff}
    return Profile(
        costs=costs,
        kv_token_bytes=-(-int(facts["block_bytes"]) // layout.block_size),
        max_model_len=int(facts["model_len"]),
        vocab_size=int(facts["vocab_size"]),
        machine=machine[:500],
        kernels=str(facts["engine"])[:500],
        residuals={
            f"{name}_{kind}": getattr(one, kind)
            for name, one in parts.items()
            for kind in ("rms", "most")
        },
    )


class _Steps:
    """Measures steps within a time."""

    def __init__(self, engine: Engine, options: Options, facts: dict[str, Any]) -> None:
        self._engine = engine
        self._options = options
        self._vocab_size = int(facts["vocab_size"])
        # The sequences of a batch grow while they are measured.
        spare = DECODE_STEPS * (_MOST_RUNS + 2)
        self._longest = min(options.max_tokens, int(facts["model_len"])) - spare
        if self._longest < CONTEXTS[0]:
            raise FailedPrecondition(
                f"a context of {facts['model_len']} tokens is too short for a profile; the "
                f"shortest is {CONTEXTS[0] + spare}"
            )
        self._kv_tokens = int(facts["kv_tokens"])
        self._random = Random(0)
        most = min(self._longest, self._kv_tokens)
        self.lengths = [one for one in LENGTHS if one <= most] or [max(1, most)]
        # Small ones first. The essential ones determine the fit and its error, so they are measured
        # however slow the machine is.
        contexts = [one for one in CONTEXTS if one <= self._longest][:2]
        batches = (1, min(4, options.max_batch))
        self._essential = {(batch, context) for batch in batches for context in contexts}
        self.cases = sorted(
            (
                (batch, context)
                for context in CONTEXTS
                for batch in sorted({*BATCHES, min(4, options.max_batch)})
                if batch <= options.max_batch
                and context <= self._longest
                and batch * (context + spare + 64) <= self._kv_tokens
            ),
            key=lambda case: (case not in self._essential, case[0] * case[1]),
        )

    def prefill(self, done: Callable[[], None]) -> Fit:
        """Measures prompts of all lengths, short ones first, and fits."""
        until = time.monotonic() + self._options.seconds * 0.45
        seconds: dict[int, list[float]] = {}
        token_s = 0.0
        for tokens in self.lengths:
            # Twice, because the first run may compile and does not count. Four lengths at least
            # determine the fit of three coefficients and its error.
            if len(seconds) >= 4 and 2 * tokens * token_s > until - time.monotonic():
                break
            self._engine.prefill(self._prompt(tokens))
            seconds[tokens] = [self._engine.prefill(self._prompt(tokens))]
            token_s = seconds[tokens][0] / tokens
            done()
        for _ in range(_MOST_RUNS - 1):
            for tokens, found in seconds.items():
                if time.monotonic() + found[-1] < until:
                    found.append(self._engine.prefill(self._prompt(tokens)))
        chunk = self._options.chunk_tokens
        rows = [(-(-tokens // chunk), tokens, tokens * (tokens + 1) / 2) for tokens in seconds]
        return fit(rows, [median(found) for found in seconds.values()], "prefill")

    def decode(self, prefill: Fit, done: Callable[[], None]) -> tuple[Fit, tuple[int, ...]]:
        """Measures steps of all batches whose prompts do not take too long, and fits. Returns also
        the batches at which the times may bend.
        """
        until = time.monotonic() + self._options.seconds * 0.55
        base, token, pair = prefill.coefficients
        chunk = self._options.chunk_tokens
        rows, seconds = [], []
        for batch, context in self.cases:
            one_s = base * -(-context // chunk) + token * context + pair * context**2 / 2
            too_long = batch * one_s > min(_OPEN_S, until - time.monotonic())
            if too_long and (batch, context) not in self._essential:
                done()
                continue
            self._engine.open([self._prompt(context) for _ in range(batch)])
            self._engine.decode(DECODE_STEPS)
            found: list[float] = []
            while len(found) < _MOST_RUNS and (not found or time.monotonic() < until):
                found.append(self._engine.decode(DECODE_STEPS) / DECODE_STEPS)
            self._engine.close()
            # Tokens before the step in the middle of the measured ones.
            grown = context + DECODE_STEPS * (1 + len(found) / 2)
            rows.append((1.0, float(batch), batch * grown))
            seconds.append(median(found))
            done()
        bends = _bends([int(batch) for _, batch, _ in rows])
        bent = [(*row, *(max(0.0, row[1] - bend) for bend in bends)) for row in rows]
        return fit(bent, seconds, "decode"), bends

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=tokens)


def _bends(batches: list[int]) -> tuple[int, ...]:
    """Batches between the smallest and the largest of the measured ones: as many as leave the fit
    of all coefficients one measurement more than there are coefficients.
    """
    spare = len(batches) - 1 - 3
    between = sorted(set(batches))[1:-1]
    return tuple(between[: max(0, spare)])


async def _handoff(layout: KvLayout, progress: Progress) -> Fit:
    """Measures hand-offs over shared memory between two processes of this machine."""
    core = first_cores(1)[0]
    sizes = tuple(max(one, layout.block_bytes) for one in _SIZES)
    rates = await measure_rates(layout, sizes, ("shm",), 2, core, progress)
    used = [one for one in rates if one.digests]
    return fit(
        [(1.0, float(one.num_bytes)) for one in used], [one.seconds for one in used], "hand-off"
    )


def _machine(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_name(device))
