"""`kvrelay plan`: what a model takes on a device, and which cluster serves a workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvrelay.cli.loadtest.options import Html, can_be_written
from kvrelay.cli.options.output import AsJson
from kvrelay.cli.plan import options

if TYPE_CHECKING:
    from kvrelay.planning.device import Device
    from kvrelay.planning.step_cost_model import StepCostModel

_DEFAULT_DEVICE = "h100"
# Bytes of a file of step costs.
_MAX_COSTS = 2**20


def plan(
    model: options.ModelName,
    device: options.DeviceName = None,
    devices: options.Devices = None,
    memory: options.Memory = None,
    tflops: options.Tflops = None,
    bandwidth: options.Bandwidth = None,
    link: options.Link = None,
    memory_share: options.MemoryShare = None,
    compute_efficiency: options.ComputeEfficiency = 0.6,
    bandwidth_efficiency: options.BandwidthEfficiency = 0.75,
    link_efficiency: options.LinkEfficiency = 0.8,
    price: options.Price = None,
    costs: options.Costs = None,
    weights: options.Weights = None,
    weight_memory: options.WeightMemory = None,
    draft: options.Draft = None,
    kv_dtype: options.KvDtype = None,
    kv_form: options.KvForm = "native",
    kv_budget: options.KvBudget = 0,
    chunk_tokens: options.Chunk = 512,
    users: options.Users = None,
    context: options.Context = None,
    ttft_ms: options.Ttft = 2000.0,
    itl_ms: options.Itl = 100.0,
    attainment: options.Attainment = 0.9,
    rate: options.RateOption = None,
    prompt_tokens: options.PromptTokens = None,
    output_tokens: options.OutputTokens = None,
    burstiness: options.Burstiness = None,
    cached_share: options.CachedShare = None,
    trace: options.Trace = None,
    trace_format: options.TraceFormat = None,
    trace_start: options.TraceStart = 0.0,
    duration: options.Duration = None,
    num_requests: options.NumRequests = None,
    record: options.Record = None,
    step_costs: options.StepCostsFile = None,
    formulas: options.Formulas = False,
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Plan a cluster: KV memory, contexts and users that fit, step times, hand-off, and for a
    workload the pools that meet latency objectives. Starts nothing and measures nothing.

    Exits with 1 if the model does not fit, no cluster serves the workload, or a file is damaged.

    Example: kvrelay plan llama-3.1-70b --memory 320GB --weight-memory 140GB --users 50

    Example: kvrelay plan llama-3.1-8b --device h100 --rate 20 --prompt-tokens
    lognormal:median=2000,sigma=1 --output-tokens 300 --ttft-ms 500 --itl-ms 30 --price 3 --html
    plan.html
    """
    from kvrelay.cli.plan.model_input import planned_model
    from kvrelay.cli.plan.view import plan_view, print_plan
    from kvrelay.cli.plan.workload_input import WorkloadOptions, read_workload
    from kvrelay.planning.device import Efficiency
    from kvrelay.planning.plan import Question, make_plan
    from kvrelay.planning.plan_json import plan_to_json
    from kvrelay.planning.quantity import check_number, parse_bytes
    from kvrelay.planning.sizing.demand import LatencySlo

    can_be_written(html, step_costs)
    if kv_form not in ("native", "compact"):
        raise typer.BadParameter(
            f"--kv-form {kv_form!r:.40} is unknown; allowed are native and compact."
        )
    check_number(ttft_ms, "--ttft-ms", 0.001, 1e8)
    check_number(itl_ms, "--itl-ms", 0.001, 1e8)
    check_number(attainment, "--attainment", 0.01, 0.9999)
    if price is not None:
        check_number(price, "--price", 0, 1e9)
    if memory_share is not None:
        check_number(memory_share, "--memory-share", 0.01, 1)
    efficiency = Efficiency(
        check_number(compute_efficiency, "--compute-efficiency", 0.001, 1),
        check_number(bandwidth_efficiency, "--bandwidth-efficiency", 0.001, 1),
        check_number(link_efficiency, "--link-efficiency", 0.001, 1),
    )
    chosen = _device(device, memory, tflops, bandwidth, link)
    workload = read_workload(
        WorkloadOptions(
            rate,
            prompt_tokens,
            output_tokens,
            burstiness,
            cached_share,
            trace,
            trace_format,
            trace_start,
            duration,
            num_requests,
            record,
        )
    )
    share = (0.9 if memory is None else 1.0) if memory_share is None else memory_share
    question = Question(
        model=planned_model(model, weights, weight_memory),
        device=chosen,
        slo=LatencySlo(ttft_ms / 1000, itl_ms / 1000, attainment),
        devices=devices,
        memory_share=share,
        kv_dtype=kv_dtype,
        kv_form="compact" if kv_form == "compact" else "native",
        kv_budget=kv_budget,
        efficiency=efficiency,
        chunk_tokens=chunk_tokens,
        users=users,
        context=context,
        link=None if link is None else parse_bytes(link, "--link") * link_efficiency,
        workload=workload,
        price=price,
        costs=None if costs is None else _costs(costs),
        draft=None if draft is None else planned_model(draft, None, None),
    )
    found = make_plan(question)
    if as_json:
        print(json.dumps(plan_to_json(found), indent=2, allow_nan=False))
    else:
        print_plan(plan_view(found, formulas=formulas, device_by_default=device is None))
    from kvrelay.loadtest.report.report_file import write

    if step_costs is not None:
        write(step_costs, json.dumps(found.step_costs.to_json(), indent=2) + "\n")
    if html is not None:
        from kvrelay.cli.plan.page import plan_page

        write(html, plan_page(found))
    for file in (step_costs, html):
        if file is not None:
            typer.echo(f"written: {file}", err=True)


def _device(
    name: str | None,
    memory: str | None,
    tflops: float | None,
    bandwidth: str | None,
    link: str | None,
) -> Device:
    """Returns a device of the table, with the figures that are given instead of its own."""
    from dataclasses import replace

    from kvrelay.planning.device import find_device
    from kvrelay.planning.quantity import check_number, parse_bytes

    found = find_device(name or _DEFAULT_DEVICE)
    given = {
        "memory": None if memory is None else parse_bytes(memory, "--memory"),
        "bandwidth": None if bandwidth is None else parse_bytes(bandwidth, "--bandwidth"),
        "link": None if link is None else parse_bytes(link, "--link"),
        "rate": tflops if tflops is None else check_number(tflops, "--tflops", 1e-6, 1e9),
    }
    told = [key for key, value in given.items() if value]
    if not told:
        return found
    return replace(
        found,
        name="custom",
        full_name=f"{found.full_name} with other {', '.join(told)}",
        memory_bytes=given["memory"] or found.memory_bytes,
        bandwidth=given["bandwidth"] or found.bandwidth,
        flops=found.flops if given["rate"] is None else {"bf16": given["rate"] * 1e12},
        network=given["link"] or found.network,
        source=f"options; the rest: {found.source}",
    )


def _costs(file: Path) -> StepCostModel:
    from kvrelay.errors import FailedPrecondition, InvalidArgument
    from kvrelay.planning.step_cost_model import StepCostModel

    try:
        if file.exists() and not file.is_file():
            raise typer.BadParameter(f"--costs {file} is not a regular file.")
        if file.stat().st_size > _MAX_COSTS:
            raise FailedPrecondition(f"{file}: too large for step costs")
        return StepCostModel.parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"--costs {file}: {error.strerror}.") from None
    except (InvalidArgument, UnicodeDecodeError) as error:
        raise FailedPrecondition(f"{file}: {error}") from None
