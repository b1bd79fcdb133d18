"""Options of the commands that measure an engine."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

ModelToMeasure = Annotated[
    str,
    typer.Option(
        metavar="DIR|HUB_ID|demo|m200",
        help="Model. m200 is generated on first use: 0.4 GiB in the cache folder.",
    ),
]
DeviceKind = Annotated[Literal["cpu", "cuda"], typer.Option(help="Device; cuda uses one GPU.")]
WeightFormat = Annotated[
    Literal["auto", "int8"],
    typer.Option(help="Format of the weights; auto keeps the dtype of the model."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Engine threads, one per core. Default: 1, or all cores with --device cuda.",
    ),
]
ChunkTokens = Annotated[
    int, typer.Option(min=1, metavar="N", help="Prompt tokens per prefill step.")
]
Runs = Annotated[
    int,
    typer.Option(
        min=1, max=100, metavar="N", help="Number of repetitions; the median is reported."
    ),
]
