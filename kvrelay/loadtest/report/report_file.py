"""Reads and writes reports and sweeps as JSON files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvrelay.config.bounded_file import file_bytes
from kvrelay.errors import FailedPrecondition, InvalidArgument
from kvrelay.loadtest.report.row_json import row_from_json, row_to_json
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.report.timeline import Timeline
from kvrelay.loadtest.report.typed_json import read
from kvrelay.loadtest.reuse import Reuse
from kvrelay.loadtest.slo import Slo
from kvrelay.loadtest.sweep import Sweep
from kvrelay.loadtest.traces.replay import Cut

FORMAT = "kvrelay-loadtest-1"
SWEEP_FORMAT = "kvrelay-loadtest-sweep-1"
Json = dict[str, Any]
# Bytes of a report: those of some million requests.
_MAX_REPORT = 2**30


def save(result: Report | Sweep, file: Path) -> None:
    """Writes a report or a sweep as JSON. Raises FailedPrecondition like `write`."""
    document = sweep_to_json(result) if isinstance(result, Sweep) else report_to_json(result)
    write(file, json.dumps(document, allow_nan=False) + "\n")


def write(file: Path, text: str) -> None:
    """Writes a text file. Raises FailedPrecondition if the file cannot be written."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FailedPrecondition(f"{file} cannot be written: {error.strerror}") from error


def load(file: Path) -> Report | Sweep:
    """Reads a file that `save` wrote, and computes the figures again from the rows. Raises
    InvalidArgument.
    """
    try:
        document = json.loads(file_bytes(file, _MAX_REPORT), parse_constant=_refuse)
    except OSError as error:
        raise InvalidArgument(f"{file}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        document = None
    except ValueError as error:
        raise InvalidArgument(
            f"{file}: not a report of `kvrelay loadtest --json`: {error}"
        ) from None
    if not isinstance(document, dict) or "format" not in document:
        raise InvalidArgument(
            f"{file}: not a report of `kvrelay loadtest --json`; give a file that `run --json` or "
            "`sweep --json` wrote"
        )
    try:
        if document["format"] == SWEEP_FORMAT:
            return sweep_from_json(document)
        if document["format"] != FORMAT:
            raise ValueError(
                f"the format is {document['format']!r}; expected {FORMAT} or {SWEEP_FORMAT}"
            )
        return report_from_json(document)
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        RecursionError,
        InvalidArgument,
    ) as error:
        raise InvalidArgument(
            f"{file}: not a report of `kvrelay loadtest --json`: {error!s:.300}"
        ) from error


def load_report(file: Path) -> Report:
    """Reads the report of a single run. Raises InvalidArgument."""
    found = load(file)
    if isinstance(found, Sweep):
        raise InvalidArgument(
            f"{file}: the file is a sweep; give a file that `kvrelay loadtest run --json` wrote"
        )
    return found


def report_to_json(report: Report) -> Json:
    """Returns the report as plain data for JSON."""
    return {
        "format": FORMAT,
        "options": report.options,
        "slos": [asdict(slo) for slo in report.slos],
        "interrupted": report.interrupted,
        "in_flight": report.in_flight,
        "unsent": report.unsent,
        "row_every": report.row_every,
        "warnings": report.warnings,
        "duration_seconds": report.duration_s,
        "rates_per_second": report.rates(),
        "latencies_seconds": {
            name: one and asdict(one) for name, one in report.latencies().items()
        },
        "good_share": report.good_share,
        "errors": report.errors,
        "paths": report.paths,
        "reuse": report.reuse and asdict(report.reuse) | {"shares": report.reuse.shares()},
        "timeline": report.timeline and asdict(report.timeline),
        "requests": [row_to_json(row) for row in report.rows],
    }


def report_from_json(document: Json) -> Report:
    """Reads the data that `report_to_json` returned. Raises AttributeError, KeyError, TypeError or
    ValueError if the data is not a report.
    """
    reuse, timeline = document.get("reuse"), document.get("timeline")
    return Report(
        options=_options(document["options"]),
        slos=read(tuple[Slo, ...], document["slos"]),
        rows=tuple(row_from_json(row) for row in document["requests"]),
        timeline=None if timeline is None else read(Timeline, timeline),
        reuse=None
        if reuse is None
        else read(Reuse, {k: value for k, value in reuse.items() if k != "shares"}),
        interrupted=read(bool, document.get("interrupted", False)),
        in_flight=max(0, read(int, document.get("in_flight", 0))),
        unsent=read(int | None, document.get("unsent")),  # type: ignore[arg-type]
        row_every=max(1, read(int, document.get("row_every", 1))),
    )


def _options(found: object) -> Json:
    """Checks the options that later computations use. Other options are only displayed."""
    options = read(dict[str, Any], found)
    read(float | None, options.get("duration"))  # type: ignore[arg-type]
    if options.get("cut") is not None and read(Cut, options["cut"]).of_tokens < 1:
        raise ValueError("cut.of_tokens must be at least 1")
    return options


def sweep_to_json(sweep: Sweep) -> Json:
    """Returns the sweep as plain data for JSON."""
    return {
        "format": SWEEP_FORMAT,
        "attainment": sweep.attainment,
        "best_rate": sweep.best_rate,
        "warnings": sweep.warnings,
        "runs": [{"rate": rate, **report_to_json(report)} for rate, report in sweep.runs],
    }


def sweep_from_json(document: Json) -> Sweep:
    """Reads the data that `sweep_to_json` returned. Raises AttributeError, KeyError, TypeError or
    ValueError if the data is not a sweep.
    """
    runs = tuple((read(float, run["rate"]), report_from_json(run)) for run in document["runs"])
    if not all(report.slos for _, report in runs):
        raise ValueError("runs without objectives")
    return Sweep(read(float, document["attainment"]), runs)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")
