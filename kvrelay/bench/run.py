"""The whole of `kvrelay bench engine`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.bench.cases import all_cases, quick_cases, that_fit
from kvrelay.bench.cost import model_cost
from kvrelay.bench.engine_bench import Measured, measure, tokens_beyond
from kvrelay.bench.engine_process import KVRELAY, EngineProcess, vllm_command
from kvrelay.bench.limits import Limits, measure_limits
from kvrelay.bench.reference_model import NAME, reference_model
from kvrelay.bench.report import EngineReport
from kvrelay.errors import InvalidArgument, NotFound
from kvrelay.models import resolve_model
from kvrelay.types import POOLS, PoolName

_KV_SLACK = 1.25  # over the largest batch: sequences end within blocks, and engines keep some blocks to themselves

Progress = Callable[[str, int], Callable[[], None]]
"""(what, of how many) to a function that is called after each."""


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    weights: str  # auto, or a dtype that the engine can turn them into
    cores: tuple[int, ...]  # one thread on each
    chunk_tokens: int
    runs: int
    peer_python: str | None
    quick: bool

    def load(self, pool: PoolName) -> dict[str, Any]:
        """What `ModelRunner.load` is given in a worker of that pool, beyond what every engine is told."""
        return {} if self.weights == "auto" else {"weights": self.weights}


def run(options: Options, progress: Progress) -> EngineReport:
    """Raises InvalidArgument for the model, ModelRefused too; Unavailable if an engine does not run it."""
    path = _model_folder(options.model)
    cost = model_cost(path)
    beyond = tokens_beyond(options.runs)
    cases = that_fit(quick_cases() if options.quick else all_cases(), cost.max_model_len - beyond)
    settings = {
        "model": path,
        "dtype": cost.dtype,
        "threads": len(options.cores),
        "cores": options.cores,
        "chunk_tokens": options.chunk_tokens,
        "max_model_len": cases.longest + beyond,
        "kv_bytes": int(_KV_SLACK * cost.kv_token_bytes() * (cases.most_tokens + cases.most_batch * beyond)),
    }
    before = _limits(options, progress)
    results: list[Measured] = []
    facts: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        peers = []
        if options.peer_python is not None:
            peers.append(stack.enter_context(_start(vllm_command(options.peer_python), settings, progress)))
        for pool in POOLS:
            some = cases.prefill if pool == "prefill" else cases.decode
            with _start(KVRELAY, settings | {"load": options.load(pool)}, progress) as ours:
                engines = (ours, *peers)
                results += measure(some, engines, options.runs, cost.vocab_size, progress(pool, len(some)))
            facts = facts or {one.name: {**one.facts, "ready_seconds": one.ready_seconds} for one in engines}
    return EngineReport(
        model=options.model,
        machine=_machine(),
        cores=options.cores,
        limits=before.best(_limits(options, progress)),
        cost=cost,
        weights=cost.dtype if options.weights == "auto" else options.weights,
        chunk_tokens=options.chunk_tokens,
        engines=facts,
        results=tuple(results),
    )


def _model_folder(model: str) -> str:
    if model == NAME:
        return str(reference_model())
    try:
        return resolve_model(model)
    except NotFound as error:
        raise InvalidArgument(f"{error.message}, or {NAME!r}", field="model") from error


def _start(command: tuple[str, ...], settings: dict[str, Any], progress: Progress) -> EngineProcess:
    started = progress(f"starting {'kvrelay' if command is KVRELAY else 'the peer'}", 1)
    engine = EngineProcess(command, settings)
    started()
    return engine


def _limits(options: Options, progress: Progress) -> Limits:
    """Of the cores that the engines run on. Measured before them and after them; the better counts."""
    measured = progress("limits of this machine", 1)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, options.cores)
    try:
        limits = measure_limits(len(options.cores), quick=options.quick)
    finally:
        os.sched_setaffinity(0, allowed)
    measured()
    return limits


def _machine() -> str:
    """The processor's name, as the kernel has it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
