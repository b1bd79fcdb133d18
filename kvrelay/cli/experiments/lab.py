"""`kvrelay lab`: experiments that show the two phases of inference on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli.experiments.bench import progress_bars
from kvrelay.cli.loadtest.options import can_be_written
from kvrelay.cli.loadtest.result_files import write_results
from kvrelay.cli.options.cluster import OWN_CLUSTER
from kvrelay.cli.required_packages import requires_cluster_extra
from kvrelay.cli.terminal import interrupt
from kvrelay.cli.terminal.notes import note
from kvrelay.cli.views.render import console
from kvrelay.errors import InvalidArgument, NotFound
from kvrelay.models import resolve_model

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvrelay.lab.experiments import Experiment


@requires_cluster_extra
def lab(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model to measure: folder, hub id, demo, or m200: 200 million random weights.",
        ),
    ] = "demo",
    seconds: Annotated[
        float,
        typer.Option(
            min=10,
            max=3600,
            metavar="SECONDS",
            help="Time for the measurements. Starts take about a minute more.",
        ),
    ] = 90.0,
    html: Annotated[
        Path, typer.Option(metavar="FILE", help="Page with the plots to write.")
    ] = Path("kvrelay-lab.html"),
    file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="File to write the figures to.")
    ] = None,
) -> None:
    """Measure prefill, decode, KV, int8 and a noisy neighbour on this machine, and explain them on
    one HTML page.

    Measures one engine on one core, then two clusters of two workers: with a prefill and a decode
    worker, and with two workers that do both. Run nothing else on the machine.

    Example: kvrelay lab --html lab.html
    """
    can_be_written(html)
    can_be_written(file)
    if model != "m200":
        try:
            resolve_model(model)
        except NotFound as error:
            raise InvalidArgument(error.message) from None
    from kvrelay.lab.experiments import experiments
    from kvrelay.lab.page import lab_page
    from kvrelay.lab.run import Options, run_lab
    from kvrelay.loadtest.report.report_file import write
    from kvrelay.process.telemetry import configure_logging

    configure_logging("error")
    with progress_bars() as progress:
        figures = run_lab(Options(model, seconds), OWN_CLUSTER, progress, interrupt.run)
    found = experiments(figures)
    console().print(_view(found))
    if figures.disturbance:
        note(figures.disturbance)
    content = {"figures": asdict(figures), "experiments": [asdict(one) for one in found]}
    if not write_results(
        (html, lambda path: write(path, lab_page(figures))),
        (file, lambda path: write(path, json.dumps(content, indent=1) + "\n")),
    ):
        raise typer.Exit(1)


def _view(found: tuple[Experiment, ...]) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    lines: list[RenderableType] = []
    for one in found:
        lines.append(Text(one.title, style="bold"))
        lines += [Padding(Text(sentence), (0, 0, 0, 2)) for sentence in one.findings]
    return Group(*lines)
