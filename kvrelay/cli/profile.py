"""`kvrelay profile`: fits the step costs of a worker on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli.bench import progress_bars
from kvrelay.cli.bench_options import (
    ChunkTokens,
    DeviceKind,
    ModelToMeasure,
    Threads,
    WeightFormat,
)
from kvrelay.cli.cluster_extra import requires_cluster_extra
from kvrelay.cli.loadtest.options import can_be_written
from kvrelay.cli.notes import note
from kvrelay.cli.views.render import console

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvrelay.planning.profile import Profile


@requires_cluster_extra
def profile(
    model: ModelToMeasure = "demo",
    device: DeviceKind = "cpu",
    weights: WeightFormat = "auto",
    threads: Threads = None,
    chunk_tokens: ChunkTokens = 512,
    max_batch: Annotated[
        int, typer.Option(min=2, max=4096, metavar="N", help="Largest batch to measure.")
    ] = 32,
    max_tokens: Annotated[
        int, typer.Option(min=256, metavar="N", help="Longest sequence to measure.")
    ] = 8192,
    seconds: Annotated[
        float,
        typer.Option(
            min=5,
            max=3600,
            metavar="SECONDS",
            help="Time for the measurements of steps; a slow machine takes longer.",
        ),
    ] = 75.0,
    file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="File to write the profile to.")
    ] = None,
) -> None:
    """Fit the step costs of a worker with this model on this machine, for `kvrelay simulate`.

    Measures prefill by tokens and context, decode by batch and context, hand-offs over shared
    memory by bytes, and the start of an engine. Takes less than two minutes with the default
    --seconds. Run nothing else on the machine.

    Example: kvrelay profile --model demo --json profile.json
    """
    from kvrelay.bench.profiling.run import Options, run
    from kvrelay.loadtest.report.report_file import write

    can_be_written(file)
    options = Options(
        model=model,
        device=device,
        weights=weights,
        threads=threads,
        chunk_tokens=chunk_tokens,
        max_batch=max_batch,
        max_tokens=max_tokens,
        seconds=seconds,
    )
    with progress_bars() as progress:
        found = run(options, progress)
    console().print(_view(found))
    if file is not None:
        write(file, json.dumps(found.to_json(), indent=1) + "\n")
        note(f"saved {file}")


def _view(found: Profile) -> RenderableType:
    from rich.console import Group
    from rich.table import Table

    costs = found.costs
    table = Table()
    for column in ("step", "seconds", "error, rms", "largest"):
        table.add_column(column)
    formulas = {
        "prefill": f"{costs.prefill_base_s:.3g} + {costs.prefill_token_s:.3g} tokens + "
        f"{costs.prefill_token_context_s:.3g} tokens x context",
        "decode": f"{costs.decode_base_s:.3g} + {costs.decode_sequence_s:.3g} sequences + "
        f"{costs.decode_context_token_s:.3g} context tokens",
        "handoff": f"{costs.handoff_base_s:.3g} + {costs.handoff_byte_s:.3g} bytes",
    }
    for name, text in formulas.items():
        errors = (f"{found.residuals[f'{name}_{kind}']:.1%}" for kind in ("rms", "most"))
        table.add_row(name.replace("handoff", "hand-off"), text, *errors)
    lines = (
        f"{costs.model} on {found.machine}",
        f"kernels: {found.kernels}",
        f"KV: {found.kv_token_bytes} bytes per token; start: {costs.start_s:.1f} s",
    )
    return Group(*lines, table)
