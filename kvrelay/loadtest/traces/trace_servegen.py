"""ServeGen's clients: rate and burstiness per time window, and request lengths (arXiv 2505.09999).

A client is a file `chunk-N-trace.csv` without a header. Its columns are the start of the window in
seconds, requests per second, the coefficient of variation of the gaps, the distribution fitted to
the gaps (Gamma, Weibull or none), and its shape and scale. The scale is not used, because gaps are
stretched to the rate of the window. `chunk-N-dataset.json` beside it holds the lengths per window.
"""

from __future__ import annotations

import ast
import heapq
import json
import math
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from random import Random
from typing import Any

from kvrelay.config.bounded_file import bounded_lines, file_bytes
from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.lengths import Lengths
from kvrelay.loadtest.rate import Stage, arrivals
from kvrelay.loadtest.traces.trace import TraceError, TraceRequest, csv_rows

SUFFIX = "-trace.csv"
_WINDOW_S = 600.0
# Bytes of the lengths of a client.
_MAX_DATASET = 2**28
# Below the lower bound, the mean of a Weibull distribution is too large for a float. Recorded
# shapes are 0.01 to 365.
_SHAPES = (0.006, 1e6)


@dataclass(frozen=True, slots=True)
class Window:
    """The arrivals of a client in one time window. `rate` is in requests per second."""

    # Seconds.
    begin: float
    rate: float
    distribution: str
    shape: float

    def gap(self, random: Random) -> float:
        """Draws a gap with mean 1."""
        if self.distribution == "Gamma":
            return random.gammavariate(self.shape, 1 / self.shape)
        if self.distribution == "Weibull":
            return random.weibullvariate(1, self.shape) / math.gamma(1 + 1 / self.shape)
        return random.expovariate(1)


@dataclass(frozen=True, slots=True)
class Empirical:
    """Lengths with their cumulative weights. The weights need not sum to 1."""

    values: tuple[int, ...]
    cumulative: tuple[float, ...]
    mean: float
    low = 1

    @property
    def longest(self) -> int:
        """Longest length."""
        return max(self.values)

    @classmethod
    def of(cls, weights: dict[int, float]) -> Empirical:
        """Builds the distribution from weights by length. Raises TypeError or ValueError for
        invalid weights.
        """
        cumulative = tuple(accumulate(map(float, weights.values())))
        if not 0 < cumulative[-1] < math.inf or min(weights.values()) < 0:
            raise ValueError("probabilities must be 0 or more, and not all 0")
        values = tuple(max(cls.low, int(value)) for value in weights)
        mean = math.fsum(map(mul, values, map(float, weights.values()))) / cumulative[-1]
        return cls(values, cumulative, mean)

    def draw(self, random: Random) -> int:
        """Draws one length."""
        return random.choices(self.values, cum_weights=self.cumulative)[0]


@dataclass(frozen=True, slots=True)
class Client:
    """One recorded client. The first entry of `lengths` applies where nothing is recorded."""

    name: str
    windows: tuple[Window, ...]
    lengths: tuple[tuple[float, Lengths, Lengths], ...]

    @property
    def end(self) -> float:
        """The end of the recording in seconds. The last window has ServeGen's window length."""
        return self.windows[-1].begin + _WINDOW_S if self.windows else 0.0


def read_servegen(
    path: Path, seed: int, begin: float, prompt_tokens: Lengths, output_tokens: Lengths
) -> Iterator[TraceRequest]:
    """Returns the requests from `begin` seconds on, for the file of one client or for all clients
    in a folder.

    The given lengths apply to clients without a dataset. Raises TraceError, InvalidArgument.
    """
    clients = read_clients(path, (0.0, prompt_tokens, output_tokens))
    return heapq.merge(
        *(_requests(client, seed, begin) for client in clients), key=lambda request: request.at
    )


def read_clients(path: Path, default: tuple[float, Lengths, Lengths]) -> list[Client]:
    """Reads the file of one client, or all clients in a folder. Raises TraceError, InvalidArgument,
    OSError.
    """
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise InvalidArgument(f"{path} contains no file named *{SUFFIX}", field="trace")
    clients = []
    for file in files:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            windows = tuple(_windows(file, bounded_lines(lines)))
        lengths = _lengths(file.with_name(file.name.removesuffix(SUFFIX) + "-dataset.json"))
        clients.append(Client(file.name, windows, (default, *lengths)))
    return clients


def _requests(client: Client, seed: int, begin: float) -> Iterator[TraceRequest]:
    ends = [*(window.begin for window in client.windows), client.end][1:]
    both = [(window, end) for window, end in zip(client.windows, ends, strict=True) if end > begin]
    if not both:
        return
    random = Random(f"{seed}/{client.name}")
    first = both[0][0].begin
    stages = [Stage(window.rate, window.rate, end - window.begin) for window, end in both]
    # Without an initial gap, all clients would begin together.
    before = both[0][0].gap(random)
    for at in arrivals(stages, lambda number: both[number][0].gap(random), before):
        _, prompt, answer = client.lengths[
            bisect_right(client.lengths, first + at, key=lambda one: one[0]) - 1
        ]
        yield TraceRequest(first + at, prompt.draw(random), answer.draw(random))


def _windows(file: Path, lines: Iterable[str]) -> Iterator[Window]:
    before = -math.inf
    for number, row in csv_rows(file, lines):
        try:
            begin, rate, _variation, distribution, shape, _scale = row
            window = Window(float(begin), float(rate), distribution, float(shape))
        except ValueError as error:
            raise TraceError(
                file, number, "expected six columns: start,rate,cv,pattern,shape,scale"
            ) from error
        if distribution not in ("", "Gamma", "Weibull"):
            raise TraceError(
                file, number, f"pattern is {distribution!r:.40}; allowed are Gamma and Weibull"
            )
        shaped = not distribution or _SHAPES[0] <= window.shape <= _SHAPES[1]
        if not (0 <= window.rate < math.inf and shaped and before < window.begin < math.inf):
            allowed = (
                "starts must be finite and ascend, rates not be negative, shapes be from {:g} to "
                "{:g}".format(*_SHAPES)
            )
            raise TraceError(file, number, allowed)
        before = window.begin
        yield window


def _literal(text: str) -> Any:
    """The value of a literal of Python. Raises what `ast.literal_eval` raises; warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.literal_eval(text)


def _lengths(file: Path) -> list[tuple[float, Lengths, Lengths]]:
    """Returns the length distributions of prompts and answers, with the second from which they
    apply. A window without data keeps the distributions of the previous window.
    """
    if not file.exists():
        return []
    found = []
    try:
        for begin, entry in json.loads(file_bytes(file, _MAX_DATASET)).items():
            both = [_literal(entry[name]) for name in ("input_tokens", "output_tokens")]
            if all(both):
                prompts, answers = map(Empirical.of, both)
                found.append((float(begin), prompts, answers))
    except (
        ValueError,
        SyntaxError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        MemoryError,
        OverflowError,
    ) as error:
        what = "not windows of input_tokens and output_tokens, each a text of {length: probability}"
        raise InvalidArgument(f"{file}: {what}: {error!r:.200}", field="trace") from error
    return sorted(found, key=lambda one: one[0])
