"""The implementation of `kvrelay bench engine`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.bench.cases import all_cases, quick_cases, that_fit
from kvrelay.bench.cost import model_cost, shape_cost
from kvrelay.bench.engine_bench import Measured, measure, tokens_beyond
from kvrelay.bench.engine_process import KVRELAY, EngineProcess
from kvrelay.bench.environment import first_cores, model_folder
from kvrelay.bench.gpu_limits import FULL, QUICK, measure_gpu_limits
from kvrelay.bench.limits import Limits, measure_limits
from kvrelay.bench.peers import peer_command
from kvrelay.bench.reference_model import NAME
from kvrelay.bench.report import EngineReport
from kvrelay.engine.base.device import find_device
from kvrelay.process.machine import processor_name
from kvrelay.types.workers import POOLS, PoolName

# Room beyond the largest batch: sequences end within blocks, and engines reserve some blocks.
_KV_SLACK = 1.25

Progress = Callable[[str, int], Callable[[], None]]
"""Called with a label and a total; returns a function to call after each unit."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `kvrelay bench engine`."""

    model: str = NAME
    # The shape of a model with random weights, which replaces `model`.
    shape: str | None = None
    # cpu or cuda.
    device: str = "cpu"
    # auto, or a dtype to which the engine can convert the weights.
    weights: str = "auto"
    # None: one thread, or with a GPU one per available core.
    threads: int | None = None
    chunk_tokens: int = 512
    runs: int = 5
    peer: str | None = None
    quick: bool = False

    def load(self, pool: PoolName) -> dict[str, Any]:
        """Returns the arguments that a worker of the pool passes to `ModelRunner.of`, in addition
        to those that every engine gets.
        """
        return {} if self.weights == "auto" else {"weights": self.weights}

    @property
    def on_gpu(self) -> bool:
        """Whether the engines run on a GPU."""
        return self.device != "cpu"

    def cores(self) -> tuple[int, ...]:
        """Returns the cores to use, one thread on each. Raises InvalidArgument if there are too
        few.
        """
        return first_cores(self.threads or (len(os.sched_getaffinity(0)) if self.on_gpu else 1))


def run(options: Options, progress: Progress) -> EngineReport:
    """Runs the benchmark. Raises InvalidArgument for a bad option, ModelRefused for the model, and
    Unavailable if an engine cannot run the model.
    """
    find_device(options.device)
    cores = options.cores()
    peer = (
        None
        if options.peer is None
        else peer_command(options.peer, has_checkpoint=options.shape is None)
    )
    path = None
    if options.shape is not None:
        cost = shape_cost(options.shape)
    else:
        path = model_folder(options.model)
        cost = model_cost(path)
    beyond = tokens_beyond(options.runs)
    cases = that_fit(quick_cases() if options.quick else all_cases(), cost.max_model_len - beyond)
    kv_tokens = int(_KV_SLACK * (cases.most_tokens + cases.most_batch * beyond))
    settings = {
        "model": path,
        "shape": options.shape,
        "device": options.device,
        "dtype": cost.dtype,
        "threads": len(cores),
        "cores": cores,
        "chunk_tokens": options.chunk_tokens,
        "max_model_len": cases.longest + beyond,
        "most_batch": cases.most_batch,
        "kv_tokens": kv_tokens,
        "kv_bytes": cost.kv_token_bytes() * kv_tokens,
    }
    before = _limits(options, cores, progress)
    results: list[Measured] = []
    facts: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        peers = []
        if peer is not None:
            peers.append(stack.enter_context(_start(peer, settings, progress)))
        for pool in POOLS:
            some = cases.prefill if pool == "prefill" else cases.decode
            with _start(KVRELAY, settings | {"load": options.load(pool)}, progress) as ours:
                engines = (ours, *peers)
                results += measure(
                    some, engines, options.runs, cost.vocab_size, progress(pool, len(some))
                )
            facts = facts or {
                one.name: {**one.facts, "ready_seconds": one.ready_seconds} for one in engines
            }
    return EngineReport(
        model=options.shape or options.model,
        machine=_machine(options),
        device=options.device,
        cores=cores,
        limits=before.best(_limits(options, cores, progress)),
        cost=cost,
        weights=cost.dtype if options.weights == "auto" else options.weights,
        chunk_tokens=options.chunk_tokens,
        engines=facts,
        results=tuple(results),
    )


def _start(command: tuple[str, ...], settings: dict[str, Any], progress: Progress) -> EngineProcess:
    started = progress(f"starting {'kvrelay' if command is KVRELAY else 'the peer'}", 1)
    engine = EngineProcess(command, settings)
    started()
    return engine


def _limits(options: Options, cores: tuple[int, ...], progress: Progress) -> Limits:
    """Measures the GPU or the cores that the engines run on. Called before and after the engines;
    the better result counts.
    """
    measured = progress("limits of this machine", 1)
    if options.on_gpu:
        limits = measure_gpu_limits(
            find_device(options.device), len(cores), QUICK if options.quick else FULL
        )
    else:
        limits = _core_limits(cores, quick=options.quick)
    measured()
    return limits


def _core_limits(cores: tuple[int, ...], *, quick: bool) -> Limits:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        return measure_limits(len(cores), quick=quick)
    finally:
        os.sched_setaffinity(0, allowed)


def _machine(options: Options) -> str:
    return str(torch.cuda.get_device_name(options.device)) if options.on_gpu else processor_name()
