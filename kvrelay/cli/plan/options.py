"""Options of `kvrelay plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvrelay.cli.loadtest.options import (
    output_tokens_option,
    prompt_tokens_option,
    trace_format_option,
    trace_option,
    trace_start_option,
)

_DEVICE, _WORKLOAD, _ENGINE = "Device", "Workload", "Engine"

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder, config.json, Hugging Face hub id, or a name of the built-in table such as "
        "llama-3.1-8b; an unknown name, such as list, prints the known ones.",
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Device of the built-in table: a100, h100, h200, b200, l40s, l4, mi300x, xeon-8480, "
        "epyc-7763. Default: h100.",
        rich_help_panel=_DEVICE,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Model that drafts tokens (decode.speculation), named like MODEL; it takes memory for "
        "weights and KV.",
    ),
]
Devices = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=64,
        metavar="N",
        help="Devices of one worker. Default: the fewest that hold the weights, and all of 1, 2, 4 "
        "and 8 for a workload.",
        rich_help_panel=_DEVICE,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of a device, such as 80GB; all of it is used unless --memory-share is given.",
        rich_help_panel=_DEVICE,
    ),
]
MemoryShare = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Share of the memory for weights, activations and KV. Default: 0.9.",
        rich_help_panel=_DEVICE,
    ),
]
Tflops = Annotated[
    float | None,
    typer.Option(
        metavar="N",
        help="Dense bf16 rate of a device in TFLOP/s.",
        rich_help_panel=_DEVICE,
    ),
]
Bandwidth = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="Memory bandwidth of a device, such as 3.35TB; per second.",
        rich_help_panel=_DEVICE,
    ),
]
Link = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="Link of the hand-off, one way, such as 50GB; per second. Default: the network of the "
        "device.",
        rich_help_panel=_DEVICE,
    ),
]
ComputeEfficiency = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="Share of the matrix rate that is reached.",
        rich_help_panel=_DEVICE,
    ),
]
BandwidthEfficiency = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="Share of the memory bandwidth that is reached.",
        rich_help_panel=_DEVICE,
    ),
]
LinkEfficiency = Annotated[
    float,
    typer.Option(
        metavar="SHARE", help="Share of the links that is reached.", rich_help_panel=_DEVICE
    ),
]
Price = Annotated[
    float | None,
    typer.Option(
        metavar="AMOUNT",
        help="Price of one device for one hour, in any currency; costs are in the same.",
        rich_help_panel=_DEVICE,
    ),
]
Costs = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Measured step costs (JSON) of one worker, instead of the roofline.",
        rich_help_panel=_DEVICE,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Weights: float32, bf16, fp16, fp8, int8, int4 or mxfp4. Default: as published.",
        rich_help_panel=_ENGINE,
    ),
]
WeightMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of the weights, such as 140GB, instead of the computed one.",
        rich_help_panel=_ENGINE,
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="KV: bf16, fp16, float32, fp8, int8 or int4. Default: the dtype of the model.",
        rich_help_panel=_ENGINE,
    ),
]
KvBudget = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Tokens of a sequence that have KV, as kv.eviction.budget_tokens; 0 keeps all.",
        rich_help_panel=_ENGINE,
    ),
]
KvForm = Annotated[
    str,
    typer.Option(
        metavar="native|compact",
        help="native: as kvrelay's engine keeps it, on GPUs all tokens in all layers, and with "
        "tensor parallelism K and V of MLA. compact: latent vectors of MLA, and only the windows "
        "of sliding layers.",
        rich_help_panel=_ENGINE,
    ),
]
Chunk = Annotated[
    int,
    typer.Option(
        min=16,
        max=1_000_000,
        metavar="N",
        help="Prompt tokens of one prefill step.",
        rich_help_panel=_ENGINE,
    ),
]
Users = Annotated[
    int | None,
    typer.Option(min=1, max=10_000_000, metavar="N", help="Concurrent sequences to plan for."),
]
Context = Annotated[
    int | None,
    typer.Option(min=1, max=100_000_000, metavar="N", help="Tokens of each sequence."),
]
Ttft = Annotated[
    float,
    typer.Option(metavar="MS", help="Time to first token that requests must keep."),
]
Itl = Annotated[
    float,
    typer.Option(metavar="MS", help="Inter-token latency that requests must keep."),
]
Attainment = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="Share of the requests that must keep the latencies.",
    ),
]
RateOption = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        help="Requests per second. Default for a recording: its busiest minute.",
        rich_help_panel=_WORKLOAD,
    ),
]
PromptTokens = Annotated[str | None, prompt_tokens_option("Default: 1024.", _WORKLOAD)]
OutputTokens = Annotated[str | None, output_tokens_option("Default: 256.", _WORKLOAD)]
Burstiness = Annotated[
    float | None,
    typer.Option(
        metavar="B",
        help="Shape of the arrivals: 1 is Poisson, less is bursty. Default: 1.",
        rich_help_panel=_WORKLOAD,
    ),
]
CachedShare = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Share of the prompt tokens that prefix caches hold. Default: 0, or as recorded.",
        rich_help_panel=_WORKLOAD,
    ),
]
Trace = Annotated[Path | None, trace_option("read", _WORKLOAD)]
TraceFormat = Annotated[str | None, trace_format_option(_WORKLOAD)]
TraceStart = Annotated[float, trace_start_option(_WORKLOAD)]
Duration = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Time of the trace to read.", rich_help_panel=_WORKLOAD),
]
NumRequests = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Requests of the trace to read.", rich_help_panel=_WORKLOAD
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File that `kvrelay loadtest run --json` wrote.",
        rich_help_panel=_WORKLOAD,
    ),
]
StepCostsFile = Annotated[
    Path | None,
    typer.Option(
        "--step-costs",
        metavar="FILE",
        help="File to write the step costs of the roofline to, as JSON.",
    ),
]
Formulas = Annotated[bool, typer.Option("--formulas", help="Print the formulas and their sources.")]
