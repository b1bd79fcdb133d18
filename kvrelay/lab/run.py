"""Runs all experiments."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.bench.environment import model_folder
from kvrelay.bench.run import Progress
from kvrelay.errors import KvRelayError
from kvrelay.lab.engine_experiment import measure_engine
from kvrelay.lab.figures import EngineFigures, LabFigures, NeighbourFigures
from kvrelay.lab.noisy_neighbour import FORMS, cluster_form, measure_neighbour
from kvrelay.models.model_files import check_model_files
from kvrelay.process.machine import QUIET_CORES, OtherPrograms, processor_name

# Share of the time for each experiment: the engine, the engine with int8 weights, and the streams
# of each form of the cluster.
_ENGINE, _INT8, _FORM = 0.4, 0.2, 0.2
# Part of a form's time in which the streams are alone.
_ALONE = 0.35
# Time that one of the neighbour's prompts should take alone, in seconds.
_PROMPT_S = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `kvrelay lab`."""

    model: str = "demo"
    # Seconds of measuring, besides the starts of two engines and two clusters.
    seconds: float = 90.0


def run_lab(
    options: Options,
    overrides: Mapping[str, object],
    progress: Progress,
    run: Callable[[Coroutine[Any, Any, NeighbourFigures]], NeighbourFigures] = asyncio.run,
) -> LabFigures:
    """Measures everything. An experiment that this machine or model cannot run is left out with
    its reason; the first one must run.

    overrides: of the cluster's configuration. run: as asyncio.run. Raises InvalidArgument for the
    model, Unavailable if the engine cannot run it, and FailedPrecondition if its context is too
    short.
    """
    path = model_folder(options.model)
    others = OtherPrograms()
    engine = measure_engine(path, "auto", _ENGINE * options.seconds, progress)
    int8: EngineFigures | str
    try:
        int8 = measure_engine(path, "int8", _INT8 * options.seconds, progress)
    except KvRelayError as error:
        int8 = error.message
    disturbance = _disturbance(others.cores())
    prompt_tokens = _prompt_tokens(engine)
    share = _FORM * options.seconds
    seconds = (_ALONE * share, (1 - _ALONE) * share)
    neighbour: tuple[NeighbourFigures, ...] | str
    try:
        found = []
        for form in FORMS:
            config = cluster_form(form, {**overrides, "model.path": path})
            measuring = measure_neighbour(
                config, form, engine.vocab_size, prompt_tokens, seconds, progress
            )
            found.append(run(measuring))
        neighbour = tuple(found)
    except KvRelayError as error:
        neighbour = error.message
    return LabFigures(
        model=options.model,
        machine=processor_name(),
        weight_bytes=sum(one.num_bytes for one in check_model_files(Path(path))),
        engine=engine,
        int8=int8,
        prompt_tokens=prompt_tokens,
        neighbour=neighbour,
        disturbance=disturbance,
    )


def _disturbance(busy: float) -> str:
    if busy <= QUIET_CORES:
        return ""
    return (
        f"other programs kept {busy:.1f} of {os.cpu_count()} cores busy while the engine was "
        "measured, and the figures are worse for it; run the lab again when they are done"
    )


def _prompt_tokens(engine: EngineFigures) -> int:
    """Returns the tokens of a prompt that takes about _PROMPT_S, as far as the context allows."""
    tokens, seconds = max(engine.prefill.items())
    return max(64, min(int(tokens * _PROMPT_S / seconds), engine.model_len - 2))
