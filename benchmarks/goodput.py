"""Measures goodput under a mixed load: the highest request rate at which 90 % of the requests meet
every objective.

python benchmarks/goodput.py --system kvrelay --system vllm --system vllm-pair --vllm-python
/opt/vllm/bin/python
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from mixes import MIXES, plan
from rich.console import Console
from rich.table import Table
from systems import SYSTEMS, Setup

from kvrelay.bench.cost import model_cost
from kvrelay.bench.reference_model import NAME, reference_model
from kvrelay.loadtest.report.report_file import load_report, save
from kvrelay.loadtest.report.statistics import Summary
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.runner import Sender, run_load
from kvrelay.loadtest.slo import Slo, parse_slos

# Share of the requests that must meet every objective.
GOOD_SHARE = 0.9
# Requests before the first rate.
_WARM_UP = 4
# After this many consecutive rates that miss the objectives, higher rates are skipped.
_MISSES = 2

log = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Load:
    """The load. The same seed draws the same requests at each rate; only the gaps differ."""

    mix: str
    objectives: tuple[Slo, ...]
    rates: list[float]
    itl_rate: float
    num_requests: int
    seed: int
    vocab_size: int


def main(
    system: Annotated[
        list[str], typer.Option(metavar="|".join(SYSTEMS), help="System to measure; repeatable.")
    ],
    vllm_python: Annotated[
        Path | None, typer.Option(help="Python of an environment that has vLLM.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Configuration of kvrelay. Default: the default values.")
    ] = None,
    model: Annotated[str, typer.Option(help="Folder, or m200.")] = NAME,
    mix: Annotated[
        str, typer.Option(metavar="|".join(MIXES), help="Lengths of prompts and answers.")
    ] = "mixed",
    rates: Annotated[
        str, typer.Option(help="Requests per second, ascending.")
    ] = "0.25,0.5,0.75,1,1.5,2,3",
    itl_rate: Annotated[
        float, typer.Option(help="Rate at which ITL is reported; this rate is always measured.")
    ] = 2.0,
    num_requests: Annotated[int, typer.Option(min=10)] = 100,
    # typer requires a list as the default.
    slo: Annotated[list[str], typer.Option(help="Objective METRIC:MS; repeatable.")] = [  # noqa: B006
        "ttft:2000",
        "tpot:100",
    ],
    seed: int = 0,
    cores: Annotated[
        str, typer.Option(help="Two cores for all processes, including the load generator.")
    ] = "0,1",
    out: Annotated[
        Path, typer.Option(help="Folder for the rows of each test and for logs.")
    ] = Path("goodput"),
) -> None:
    """Offer each system the same requests at each rate, until two consecutive rates miss the
    objectives.
    """
    if vllm_python is None and any("vllm" in one for one in system):
        raise typer.BadParameter("--system vllm and --system vllm-pair require --vllm-python.")
    if unknown := set(system) - SYSTEMS.keys():
        raise typer.BadParameter(
            f"--system {unknown.pop()} is unknown; allowed are {', '.join(SYSTEMS)}."
        )
    if mix not in MIXES:
        raise typer.BadParameter(f"--mix {mix} is unknown; allowed are {', '.join(MIXES)}.")
    first, second = map(int, cores.split(","))
    # Child processes inherit the affinity.
    os.sched_setaffinity(0, (first, second))
    out.mkdir(parents=True, exist_ok=True)
    path = str(reference_model()) if model == NAME else model
    setup = Setup(path, config, vllm_python, out, (first, second))
    ascending = sorted(float(rate) for rate in rates.split(","))
    load = Load(
        mix, parse_slos(slo), ascending, itl_rate, num_requests, seed, model_cost(path).vocab_size
    )
    for one in system:
        for rate, report in asyncio.run(_measure(one, setup, load)).items():
            save(report, out / f"{one}-{rate:g}.json")
    files = sorted(out.glob("*.json"))
    reports = [(file.stem.rpartition("-")[0], load_report(file)) for file in files]
    Console(width=140).print(summary(reports))
    for name, rate in goodput(reports).items():
        print(f"goodput of {name}: {f'{rate:g} requests/s' if rate else 'below the lowest rate'}")


async def _measure(system: str, setup: Setup, load: Load) -> dict[float, Report]:
    """Returns the reports by rate."""
    log.print(f"{system}: starting")
    reports: dict[float, Report] = {}
    missed = 0
    async with SYSTEMS[system](setup) as sender:
        await offer(sender, system, load, rate=math.inf, num_requests=_WARM_UP)
        for rate in sorted({*load.rates, load.itl_rate}):
            if missed == _MISSES and rate != load.itl_rate:
                continue
            reports[rate] = report = await offer(sender, system, load, rate, load.num_requests)
            missed = 0 if report.good_share >= GOOD_SHARE else missed + 1
            log.print(f"{system}: {rate:g} requests/s, {report.good_share:.0%} within objectives")
    return reports


async def offer(sender: Sender, system: str, load: Load, rate: float, num_requests: int) -> Report:
    """Sends the requests at one rate and returns the report."""
    requests = plan(load.mix, rate, num_requests, load.seed, load.vocab_size)
    rows = await run_load(requests, sender, lambda _: None)
    options = {
        "target": system,
        "mix": load.mix,
        "rate": rate,
        "num_requests": num_requests,
        "seed": load.seed,
    }
    return Report(options, load.objectives, rows)


def goodput(reports: Sequence[tuple[str, Report]]) -> dict[str, float | None]:
    """Returns, by system, the highest rate at which GOOD_SHARE of the requests are good."""
    best: dict[str, float | None] = {system: None for system, _ in reports}
    for system, report in reports:
        if report.good_share >= GOOD_SHARE:
            best[system] = max(best[system] or 0.0, report.options["rate"])
    return best


def summary(reports: Sequence[tuple[str, Report]]) -> Table:
    """Returns a table with one line for each system and rate, in milliseconds."""
    table = Table(title="milliseconds", title_justify="left")
    for column in (
        "system",
        "requests/s",
        "good",
        "errors",
        "TTFT p50",
        "p90",
        "p99",
        "TPOT p50",
        "ITL p50",
        "p99",
    ):
        table.add_column(column, justify="left" if column == "system" else "right")
    for system, report in sorted(reports, key=lambda one: (one[0], one[1].options["rate"])):
        latencies = report.latencies()
        cells = [
            _milliseconds(latencies[name], quantile)
            for name, quantile in (
                ("TTFT", "median"),
                ("TTFT", "p90"),
                ("TTFT", "p99"),
                ("TPOT", "median"),
                ("ITL", "median"),
                ("ITL", "p99"),
            )
        ]
        errors = str(sum(report.errors.values()))
        table.add_row(
            system, f"{report.options['rate']:g}", f"{report.good_share:.0%}", errors, *cells
        )
    return table


def _milliseconds(summary: Summary | None, quantile: str) -> str:
    return "-" if summary is None else f"{getattr(summary, quantile) * 1000:.0f}"


if __name__ == "__main__":
    typer.run(main)
