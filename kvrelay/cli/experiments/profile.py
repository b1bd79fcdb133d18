"""`kvrelay profile`: fits the step costs of a worker on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli.experiments.bench import progress_bars
from kvrelay.cli.loadtest.options import can_be_written
from kvrelay.cli.options.bench import (
    ChunkTokens,
    DeviceKind,
    ModelToMeasure,
    Threads,
    WeightFormat,
)
from kvrelay.cli.required_packages import requires_cluster_extra
from kvrelay.cli.terminal.notes import note
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
    console().print(profile_view(found))
    if file is not None:
        write(file, json.dumps(found.to_json(), indent=1) + "\n")
        note(f"saved {file}")


def profile_view(found: Profile) -> RenderableType:
    """Renders the step times and their errors for a terminal of 80 columns."""
    from rich.console import Group
    from rich.table import Table

    from kvrelay.planning.quantity import seconds

    costs = found.costs
    table = Table()
    for column in ("step", "time", "error, rms", "largest"):
        table.add_column(column)
    bends = (
        f" + {seconds(more)} x max(sequences - {least}, 0)" for least, more in costs.decode_bends
    )
    formulas = {
        "prefill": f"{seconds(costs.prefill_base_s)} + {seconds(costs.prefill_token_s)} x tokens + "
        f"{seconds(costs.prefill_token_context_s)} x tokens x context",
        "decode": f"{seconds(costs.decode_base_s)} + {seconds(costs.decode_sequence_s)} x "
        f"sequences + {seconds(costs.decode_context_token_s)} x context tokens" + "".join(bends),
        "handoff": f"{seconds(costs.handoff_base_s)} + {seconds(costs.handoff_byte_s)} x bytes",
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
