"""Reads a trace as load per interval, for callers that need no single requests."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path

from autoscaler.queueing_model import Requests
from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.lengths import Lengths
from kvrelay.loadtest.traces.trace import TraceRequest
from kvrelay.loadtest.traces.trace_file import guess_format, read_trace
from kvrelay.loadtest.traces.trace_servegen import Client, read_clients


def read_load(
    path: Path, interval: float, prompt_tokens: Lengths, output_tokens: Lengths
) -> Iterator[Requests]:
    """Yields the load of each `interval` seconds from the start of the trace to its end. The
    lengths are for ServeGen's rates.

    For ServeGen files, the load is the expected one: rate times mean length. Raises
    InvalidArgument.
    """
    form = guess_format(path)
    if form == "servegen":
        return _expected(read_clients(path, (0.0, prompt_tokens, output_tokens)), interval)
    return _counted(read_trace(path, form, 0, 0.0, prompt_tokens, output_tokens), interval)


def span(path: Path, prompt_tokens: Lengths, output_tokens: Lengths) -> float:
    """Returns the seconds from the start of the trace to its end. Raises InvalidArgument."""
    form = guess_format(path)
    if form == "servegen":
        return max(client.end for client in read_clients(path, (0.0, prompt_tokens, output_tokens)))
    last = max(
        (one.at for one in read_trace(path, form, 0, 0.0, prompt_tokens, output_tokens)),
        default=None,
    )
    if last is None:
        raise InvalidArgument(f"{path}: the trace has no requests", field="metrics")
    return last


def _counted(requests: Iterable[TraceRequest], interval: float) -> Iterator[Requests]:
    end, number, prompts, answers = interval, 0, 0, 0
    for one in requests:
        while one.at >= end:
            yield Requests(number, prompts, answers)
            end, number, prompts, answers = end + interval, 0, 0, 0
        number, prompts, answers = (
            number + 1,
            prompts + one.input_tokens,
            answers + one.output_tokens,
        )
    yield Requests(number, prompts, answers)


def _expected(clients: list[Client], interval: float) -> Iterator[Requests]:
    for index in range(math.ceil(max(client.end for client in clients) / interval)):
        at = index * interval
        number = prompts = answers = 0.0
        for client in clients:
            place = bisect_right(client.windows, at, key=lambda one: one.begin) - 1
            if place < 0 or at >= client.end:
                continue
            # A recording may end within the last interval.
            requests = client.windows[place].rate * min(interval, client.end - at)
            _, prompt, answer = client.lengths[
                bisect_right(client.lengths, at, key=lambda one: one[0]) - 1
            ]
            number += requests
            prompts += requests * prompt.mean
            answers += requests * answer.mean
        yield Requests(number, prompts, answers)
