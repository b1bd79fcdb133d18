"""Runs load tests for the command line, with a progress bar and Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvrelay.cli.loadtest.options import Load
from kvrelay.cli.terminal.notes import note
from kvrelay.client.connection import Connection
from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.measure import Run, measure
from kvrelay.loadtest.rate import constant
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.senders.target import Target, open_target
from kvrelay.loadtest.slo import Slo
from kvrelay.loadtest.sweep import Sweep, bisect, try_rates
from kvrelay.loadtest.traces.replay import Replay
from kvrelay.loadtest.workload import PlannedRequest, Workload
from kvrelay.planning.profile import LARGEST_VOCABULARY
from kvrelay.planning.quantity import plain

# A list of rates, or the bounds of a search.
Rates = list[float] | tuple[float, float]
Plan = Sequence[PlannedRequest] | Iterator[PlannedRequest]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that all rates of a sweep share."""

    target: str
    timeout: float
    admin: str | None
    metrics: str | None
    vocab_size: int | None
    slos: tuple[Slo, ...]
    connection: Connection
    model: str = ""


def run_test(
    settings: Settings, load: Load, concurrency: int | None, duration: float | None
) -> Report:
    """Runs one test. Ctrl-C ends the test, and the report says so. Raises KvRelayError if the
    target cannot be tested.
    """

    async def go() -> Report:
        async with _opened(settings) as (target, stop):
            if isinstance(load, Workload):
                load.check_fits(target.model.id, target.model.max_model_len)
            options = _options(settings, target, load) | {"concurrency": concurrency}
            plan: Plan = load.plan(_vocab_size(settings, target, load), target.model.max_model_len)
            endless = (
                concurrency is not None and isinstance(load, Workload) and load.num_requests is None
            )
            if not endless:
                # Planned now, so that planning does not delay requests.
                plan = list(plan)
            with _progress("requests", plan) as done:
                run = Run(plan, options, settings.slos, concurrency, duration)
                return await measure(target, run, done, stop)

    return asyncio.run(go())


def run_sweep(
    settings: Settings,
    load: Workload,
    rates: Rates,
    attainment: float,
    precision: float,
) -> Sweep:
    """Runs one test for each rate, or searches for the highest rate whose attainment suffices.
    Raises KvRelayError if the target cannot be tested.
    """

    async def go() -> Sweep:
        async with _opened(settings) as (target, stop):
            load.check_fits(target.model.id, target.model.max_model_len)
            tried = 0

            async def offer(rate: float) -> Report:
                nonlocal tried
                tried += 1
                one = replace(load, rate=constant(rate))
                vocab_size = _vocab_size(settings, target, one)
                plan = [request.variant(tried, vocab_size) for request in one.plan(vocab_size)]
                with _progress(f"{plain(rate, 3)} requests/s", plan) as done:
                    return await measure(
                        target,
                        Run(plan, _options(settings, target, one), settings.slos),
                        done,
                        stop,
                    )

            if isinstance(rates, tuple):
                return await bisect(offer, *rates, precision, attainment)
            return await try_rates(offer, rates, attainment)

    return asyncio.run(go())


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[tuple[Target, asyncio.Event]]:
    """Opens the target. The first Ctrl-C sets the event; the second one ends the program."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    async with open_target(
        settings.target,
        settings.timeout,
        settings.admin,
        settings.metrics,
        settings.connection,
        settings.model,
    ) as target:
        if target.note:
            note(target.note)
        loop.add_signal_handler(signal.SIGINT, interrupted)
        try:
            yield target, stop
        finally:
            loop.remove_signal_handler(signal.SIGINT)


def _vocab_size(settings: Settings, target: Target, load: Load) -> int:
    found = settings.vocab_size or target.model.vocab_size
    if not found and not (isinstance(load, Workload) and load.text):
        raise InvalidArgument(
            f"{settings.target} does not report its vocabulary size; give --vocab-size or --text"
        )
    if found > LARGEST_VOCABULARY:
        raise InvalidArgument(
            f"the vocabulary size is {plain(found)}; a load test draws from at most "
            f"{LARGEST_VOCABULARY} token ids; give --vocab-size",
            field="vocab_size",
        )
    return found


def _options(settings: Settings, target: Target, load: Load) -> dict[str, Any]:
    found = {
        "target": settings.target,
        "model": target.model.id,
        "timeout": settings.timeout,
        **load.options(),
    }
    return found | (
        {"cut": asdict(load.cut(target.model.max_model_len))} if isinstance(load, Replay) else {}
    )


@contextmanager
def _progress(what: str, plan: Plan) -> Iterator[Callable[[Row], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task(what, total=len(plan) if isinstance(plan, Sequence) else None)
        yield lambda _: progress.advance(bar)
