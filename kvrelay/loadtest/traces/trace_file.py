"""Opens a trace of any supported format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvrelay.config.bounded_file import bounded_lines
from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.lengths import Lengths
from kvrelay.loadtest.traces import trace_azure, trace_servegen
from kvrelay.loadtest.traces.trace import TraceRequest, from_second
from kvrelay.loadtest.traces.trace_azure import read_azure
from kvrelay.loadtest.traces.trace_mooncake import read_mooncake
from kvrelay.loadtest.traces.trace_servegen import read_servegen

FORMATS = ("mooncake", "azure", "servegen")


def read_trace(
    path: Path, form: str, seed: int, begin: float, prompt_tokens: Lengths, output_tokens: Lengths
) -> Iterator[TraceRequest]:
    """Yields the requests from second `begin` on, in order of arrival. Times count from the start
    of the trace.

    The seed and the lengths are for traces that record only rates. Raises TraceError for a line
    that does not match the format, and InvalidArgument for a file that cannot be read.
    """
    try:
        if form == "servegen":
            yield from from_second(
                read_servegen(path, seed, begin, prompt_tokens, output_tokens), begin
            )
            return
        with path.open(encoding="utf-8-sig", newline="") as lines:
            read = read_mooncake if form == "mooncake" else read_azure
            yield from from_second(read(path, bounded_lines(lines)), begin)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="trace") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: not a text file; unpack it first", field="trace") from error


def guess_format(path: Path) -> str:
    """Guesses the format from the name and the first line. Raises InvalidArgument if that is not
    possible.
    """
    if path.is_dir() or path.name.endswith(trace_servegen.SUFFIX):
        return "servegen"
    try:
        with path.open(encoding="utf-8-sig") as lines:
            first = lines.readline(4096)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="trace") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: not a text file; unpack it first", field="trace") from error
    if first.startswith("{"):
        return "mooncake"
    if first.strip() == ",".join(trace_azure.HEADER):
        return "azure"
    raise InvalidArgument(
        f"{path}: the format is unknown; give --trace-format {'|'.join(FORMATS)}", field="trace"
    )
