"""What the load harness reads: traces, reports, and what any server answers."""

from __future__ import annotations

import asyncio
import io
import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from fuzz.parser import Feed, Parser, refusal
from fuzz.spoil import garbled, json_bytes, spoiled, text
from rich.console import Console

from kvrelay.errors import InvalidArgument, KvRelayError
from kvrelay.loadtest.counters import PrefixCache
from kvrelay.loadtest.html_report import page
from kvrelay.loadtest.lengths import Uniform
from kvrelay.loadtest.report.report_file import load, report_to_json, sweep_to_json
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.report.tables import report_table, sweep_table
from kvrelay.loadtest.report.timeline import PoolSample, Sample, Scaling, Timeline
from kvrelay.loadtest.reuse import Reuse
from kvrelay.loadtest.senders import sse
from kvrelay.loadtest.slo import parse_slos
from kvrelay.loadtest.sweep import Sweep
from kvrelay.loadtest.traces.trace_file import guess_format, read_trace
from kvrelay.types.requests import Attempt, Handoff, Ledger

# Traces

_MOONCAKE = [
    {"timestamp": 1500 + at, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}
    for at in (0, 100, 5000)
]
_AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 "
    "18:15:50.9951690,396,109\n"
)
_SERVEGEN = "0,2.5,1.1,Gamma,0.8,0.5\n600,0,1,,,\n1200,3,1,Weibull,1.2,0.3\n".replace(
    ",,,\n", ",,1,1\n"
)
_LENGTHS = {
    "0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{3: 1.0}"},
    "600": {"input_tokens": "{}", "output_tokens": "{}"},
}
_NAMES = ("trace.jsonl", "trace.csv", "chunk-0-trace.csv", "chunk-0-dataset.json")
REQUESTS = 500  # that are read of a trace


def trace(draw: random.Random) -> bytes:
    """Begins with the number of its kind."""
    kind = draw.randrange(len(_NAMES))
    match kind:
        case 0:
            lines = [
                json_bytes(draw, spoiled(draw, one))
                if draw.random() < 0.5
                else json.dumps(one).encode()
                for one in _MOONCAKE
            ]
            return bytes([kind]) + b"\n".join(lines)
        case 3:
            return bytes([kind]) + json_bytes(
                draw, spoiled(draw, _LENGTHS, ["{1: 1e999}", "{-5: 1}", "{1: '1'}", "[1]"])
            )
    good = text(
        draw,
        _AZURE if kind == 1 else _SERVEGEN,
        ["\n", ",", '"', "1e308", "nan", "inf", "-1", "9" * 30, "0"],
    )
    data = good.encode(errors="replace")
    return bytes([kind]) + (garbled(draw, data) if draw.random() < 0.2 else data)


@contextmanager
def tracing() -> Iterator[Feed]:
    with tempfile.TemporaryDirectory() as folder:
        servegen = Path(folder, _NAMES[2])

        def feed(data: bytes) -> str:
            path = Path(folder, _NAMES[data[0]])
            if data[0] == 3:
                servegen.write_text(_SERVEGEN)
            path.write_bytes(data[1:])
            source = servegen if data[0] == 3 else path
            try:
                before = 0.0
                for one in islice(
                    read_trace(source, guess_format(source), 0, 0.0, Uniform(9, 9), Uniform(3, 3)),
                    REQUESTS,
                ):
                    assert one.at >= before, "requests come in the order of their times"
                    assert one.input_tokens >= 1
                    assert one.output_tokens >= 0
                    before = one.at
            except InvalidArgument as error:
                return refusal(error.message, names=str(folder))
            finally:
                path.unlink()
            return "taken"

        yield feed


# Reports

_LEDGER = Ledger(
    *((("queue", 0.1), ("prefill", 0.2)), 0.3, 0.1, 0.5, 0.9),
    Handoff("shm", 2, 64, 128, 0, 0.1, 0.05, "same host"),
    (Attempt("disaggregated", "x", "p", "d", "finished"),),
)
_REPORT = Report(
    {"rate": 2.0, "cut": {"requests": 1, "tokens": 5, "of_tokens": 50}},
    parse_slos(["ttft:300", "tpot:60"]),
    (
        Row(0.0, 0.001, 0.1, (0.05, 0.05), 0.2, 10, 4, 3, "length", "disaggregated", "policy"),
        Row(
            1.0,
            0.002,
            0.3,
            (0.1,),
            0.4,
            20,
            0,
            2,
            "stop",
            "local",
            "short",
            ledger=_LEDGER,
            request_id="r",
        ),
        Row(1.8, 0.004, output_tokens=7, error="RESOURCE_EXHAUSTED", message="full"),
    ),
    Timeline(
        (Sample(0.5, 1, 2, {"prefill": PoolSample(1, 2, 3, 4, 5, 0.5, 6.0)}),),
        (Scaling(0.4, "prefill", 1, 2, "queue_depth"),),
        1,
    ),
    Reuse(16, 60, 20, 10, 4, PrefixCache(4, 60)),
)
_DOCUMENTS = (
    json.loads(json.dumps(report_to_json(_REPORT))),
    json.loads(json.dumps(sweep_to_json(Sweep(0.9, ((2.0, _REPORT),))))),
)


def report(draw: random.Random) -> bytes:
    return json_bytes(draw, spoiled(draw, draw.choice(_DOCUMENTS)))


@contextmanager
def reporting() -> Iterator[Feed]:
    """As `kvrelay loadtest report FILE --html PAGE` does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")

        def feed(data: bytes) -> str:
            path.write_bytes(data)
            try:
                found = load(path)
            except InvalidArgument as error:
                return refusal(error.message, names=str(folder))
            console = Console(file=io.StringIO())
            console.print(sweep_table(found) if isinstance(found, Sweep) else report_table(found))
            page(found)
            return "taken"

        yield feed


# A server's answers

_EVENTS: list[Any] = [
    {
        "choices": [{"index": 0, "text": "a", "token_ids": [1], "finish_reason": None}],
        "usage": {"completion_tokens": 1},
    },
    {
        "choices": [{"text": "b", "finish_reason": "length"}],
        "kvrelay": {"path": "local", "why": "x", "ledger": None},
    },
]


def answer(draw: random.Random) -> bytes:
    lines = ["HTTP/1.1 200 OK", "content-type: text/event-stream", "transfer-encoding: chunked", ""]
    chunks = [b"data: " + json_bytes(draw, spoiled(draw, one)) + b"\n\n" for one in _EVENTS] + [
        b"data: [DONE]\n\n"
    ]
    if draw.random() < 0.3:
        lines[0] = text(draw, lines[0])
    body = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in chunks) + b"0\r\n\r\n"
    data = "\r\n".join(lines).encode(errors="replace") + b"\r\n" + body
    return garbled(draw, data) if draw.random() < 0.5 else data


@contextmanager
def being_answered() -> Iterator[Feed]:
    class Writer:
        def write(self, data: bytes) -> None: ...

        async def drain(self) -> None: ...

    async def read(data: bytes) -> str:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        writer: Any = Writer()
        try:
            response = await sse.request(reader, writer, "host", "POST", "/v1/completions", {})
            count = len([one async for one in response.events()])
        except KvRelayError as error:
            return type(error).__name__
        return f"{count} events"

    with asyncio.Runner() as runner:
        yield lambda data: runner.run(read(data))


PARSERS = (
    Parser("trace", trace, tracing),
    Parser("report", report, reporting),
    Parser("sse", answer, being_answered),
)
