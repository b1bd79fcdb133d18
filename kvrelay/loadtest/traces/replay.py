"""Replays a trace as a load: scaled, cut to the context of the model, with prompts that share
prefixes as in the trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import islice, takewhile
from pathlib import Path
from random import Random
from typing import Any

from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.lengths import Lengths
from kvrelay.loadtest.traces.trace import TraceRequest
from kvrelay.loadtest.traces.trace_file import read_trace
from kvrelay.loadtest.traces.trace_mooncake import BLOCK_TOKENS
from kvrelay.loadtest.workload import PlannedRequest


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a replay that did not fit into the model's context."""

    requests: int
    # Tokens of prompts and answers that were not sent or not requested.
    tokens: int
    # Tokens of the whole replay.
    of_tokens: int


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace, and the scales and bounds of its replay."""

    trace: Path
    # One of trace_file.FORMATS.
    form: str
    # Second of the trace at which the replay begins.
    begin: float
    # Factor of the times between requests.
    time_scale: Fraction
    # Factor of prompt and answer lengths.
    length_scale: Fraction
    num_requests: int | None
    # Seconds of the test.
    duration: float | None
    # For traces without lengths.
    prompt_tokens: Lengths
    output_tokens: Lengths
    seed: int

    def requests(self) -> list[TraceRequest]:
        """Returns the scaled requests, at least one. Raises TraceError, InvalidArgument."""
        recorded = read_trace(
            self.trace, self.form, self.seed, self.begin, self.prompt_tokens, self.output_tokens
        )
        end = math.inf if self.duration is None else self.duration
        times = scaled(recorded, self.begin, self.time_scale, self.length_scale)
        found = list(islice(takewhile(lambda one: one.at < end, times), self.num_requests))
        if not found:
            raise InvalidArgument(
                f"{self.trace} has no request in the selected time; change --trace-start or "
                "--duration",
                field="trace",
            )
        return found

    def plan(self, vocab_size: int, max_model_len: int = 0) -> Iterator[PlannedRequest]:
        """Returns the planned requests. Token ids are below vocab_size. max_model_len: 0 if
        unknown. Raises TraceError, InvalidArgument.
        """
        requests = self.requests()
        blocks = block_size(self.length_scale) if any(one.blocks for one in requests) else 0
        return planned(fitted(requests, max_model_len), blocks, vocab_size, self.seed)

    def cut(self, max_model_len: int) -> Cut:
        """Returns how much of the replay does not fit into the context. Raises TraceError,
        InvalidArgument.
        """
        requests = self.requests()
        tokens = [one.input_tokens + one.output_tokens for one in requests]
        lost = [
            before - one.input_tokens - one.output_tokens
            for before, one in zip(tokens, fitted(requests, max_model_len), strict=True)
        ]
        return Cut(sum(one > 0 for one in lost), sum(lost), sum(tokens))

    def options(self) -> dict[str, Any]:
        """Returns the options of the replay as JSON values."""
        return {
            "trace": str(self.trace),
            "trace_format": self.form,
            "trace_start": self.begin,
            "time_scale": str(self.time_scale),
            "length_scale": str(self.length_scale),
            "num_requests": self.num_requests,
            "duration": self.duration,
            "seed": self.seed,
        }


def scaled(
    requests: Iterable[TraceRequest], begin: float, time_scale: Fraction, length_scale: Fraction
) -> Iterator[TraceRequest]:
    """Multiplies the times from second `begin` on and the lengths by their scales. Lengths are
    rounded up.
    """
    for one in requests:
        yield replace(
            one,
            at=(one.at - begin) * float(time_scale),
            input_tokens=math.ceil(one.input_tokens * length_scale),
            output_tokens=max(1, math.ceil(one.output_tokens * length_scale)),
        )


def fitted(requests: Iterable[TraceRequest], max_model_len: int) -> Iterator[TraceRequest]:
    """Cuts each request to the context: first the end of the prompt, down to half the context, then
    the answer. max_model_len 0 means that no limit is known.
    """
    for one in requests:
        if max_model_len == 0 or one.input_tokens + one.output_tokens <= max_model_len:
            yield one
        else:
            prompt = min(
                one.input_tokens, max_model_len - min(one.output_tokens, max_model_len // 2)
            )
            output = min(one.output_tokens, max_model_len - prompt)
            yield replace(one, input_tokens=prompt, output_tokens=output)


def block_size(length_scale: Fraction) -> int:
    """Returns the tokens of a scaled block. Raises InvalidArgument if the number is not whole."""
    size = BLOCK_TOKENS * length_scale
    if size.denominator != 1:
        raise InvalidArgument(
            f"--length-scale {length_scale} does not scale the trace's blocks of "
            f"{BLOCK_TOKENS} tokens to a whole number of tokens; give for example 1/32, which "
            f"makes {BLOCK_TOKENS // 32}",
            field="length_scale",
        )
    return size.numerator


def planned(
    requests: Iterable[TraceRequest], block_tokens: int, vocab_size: int, seed: int
) -> Iterator[PlannedRequest]:
    """Yields the requests with prompts of random token ids. The tokens of a block are derived from
    its id, so equal ids give equal tokens.
    """
    random = Random(seed)
    # A list shares its int objects: millions of drawn tokens then take one pointer each, not one
    # int each.
    ids = list(range(vocab_size))
    block = _blocks(block_tokens, ids, seed)
    for one in requests:
        if one.blocks:
            tokens = tuple(token for number in one.blocks for token in block(number))[
                : one.input_tokens
            ]
        else:
            tokens = tuple(random.choices(ids, k=one.input_tokens))
        yield PlannedRequest(one.at, None, tokens, one.output_tokens, random.getrandbits(31))


def _blocks(block_tokens: int, ids: list[int], seed: int) -> Callable[[int], tuple[int, ...]]:
    @cache
    def block(number: int) -> tuple[int, ...]:
        return tuple(Random(f"{seed}/{number}").choices(ids, k=block_tokens))

    return block
