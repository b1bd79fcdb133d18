"""Mooncake's traces: JSON lines with the hashes of each prompt's blocks (Qin et al., FAST '25)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvrelay.loadtest.traces.trace import TraceError, TraceRequest, check_order

# Tokens per entry of hash_ids.
BLOCK_TOKENS = 512
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_mooncake(file: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Yields the requests. Timestamps are in milliseconds from the start of the trace. Raises
    TraceError.
    """
    before = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        request = _request(file, number, line)
        check_order(file, number, request.at, before)
        before = request.at
        yield request


def _request(file: Path, number: int, line: str) -> TraceRequest:
    try:
        found = json.loads(line)
        timestamp, prompt, answer, ids = (found[name] for name in _FIELDS)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError(
            file, number, f"expected a JSON object with {', '.join(_FIELDS)}"
        ) from error
    whole = isinstance(ids, list) and all(type(one) is int for one in (prompt, answer, *ids))
    if not whole or type(timestamp) not in (int, float) or not 0 <= timestamp < 2**53:
        raise TraceError(
            file,
            number,
            "timestamp, lengths and hash_ids must be whole numbers of 0 or more",
        )
    if prompt < 1 or answer < 0:
        raise TraceError(file, number, "input_length must be at least 1, output_length at least 0")
    if len(ids) != -(-prompt // BLOCK_TOKENS):
        raise TraceError(
            file,
            number,
            f"{len(ids)} hash_ids of {BLOCK_TOKENS} tokens do not match input_length {prompt}",
        )
    return TraceRequest(timestamp / 1000, prompt, answer, tuple(ids))
