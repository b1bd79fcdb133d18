"""A trace as a load: scaled, cut to what the model takes, with prompts that share prefixes where
they did.
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
    """What did not fit in the model's context."""

    requests: int
    tokens: int  # of their prompts and answers, not sent or not asked for
    of_tokens: int  # in the whole replay


@dataclass(frozen=True, slots=True)
class Replay:
    trace: Path
    form: str  # one of trace_file.FORMATS
    begin: float  # seconds of the trace
    time_scale: Fraction  # of the times between requests
    length_scale: Fraction  # of prompts and answers
    num_requests: int | None
    duration: float | None  # seconds of the test
    prompt_tokens: Lengths  # where the trace does not say
    output_tokens: Lengths
    seed: int

    def requests(self) -> list[TraceRequest]:
        """Scaled; at least one. Raises TraceError, InvalidArgument."""
        recorded = read_trace(
            self.trace, self.form, self.seed, self.begin, self.prompt_tokens, self.output_tokens
        )
        end = math.inf if self.duration is None else self.duration
        times = scaled(recorded, self.begin, self.time_scale, self.length_scale)
        found = list(islice(takewhile(lambda one: one.at < end, times), self.num_requests))
        if not found:
            raise InvalidArgument(
                f"{self.trace} has no request in the time asked for", field="trace"
            )
        return found

    def plan(self, vocab_size: int, max_model_len: int = 0) -> Iterator[PlannedRequest]:
        """Token ids are below vocab_size. Raises TraceError, InvalidArgument."""
        requests = self.requests()
        blocks = block_size(self.length_scale) if any(one.blocks for one in requests) else 0
        return planned(fitted(requests, max_model_len), blocks, vocab_size, self.seed)

    def cut(self, max_model_len: int) -> Cut:
        requests = self.requests()
        tokens = [one.input_tokens + one.output_tokens for one in requests]
        lost = [
            before - one.input_tokens - one.output_tokens
            for before, one in zip(tokens, fitted(requests, max_model_len), strict=True)
        ]
        return Cut(sum(one > 0 for one in lost), sum(lost), sum(tokens))

    def options(self) -> dict[str, Any]:
        """What was asked for, as JSON's values."""
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
    """Times from second `begin` on and lengths, multiplied by their scales; lengths are rounded
    up.
    """
    for one in requests:
        yield replace(
            one,
            at=(one.at - begin) * float(time_scale),
            input_tokens=math.ceil(one.input_tokens * length_scale),
            output_tokens=max(1, math.ceil(one.output_tokens * length_scale)),
        )


def fitted(requests: Iterable[TraceRequest], max_model_len: int) -> Iterator[TraceRequest]:
    """Each within the context: the prompt's end is cut, down to half of it, then the answer. 0: no
    limit is known.
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
    """Tokens of a scaled block. Raises InvalidArgument if they are not a whole number."""
    size = BLOCK_TOKENS * length_scale
    if size.denominator != 1:
        raise InvalidArgument(
            f"--length-scale {length_scale} does not make whole tokens of the trace's blocks of "
            f"{BLOCK_TOKENS}; give one like 1/32, which makes {BLOCK_TOKENS // 32}",
            field="length_scale",
        )
    return size.numerator


def planned(
    requests: Iterable[TraceRequest], block_tokens: int, vocab_size: int, seed: int
) -> Iterator[PlannedRequest]:
    """Prompts of random token ids. A block's tokens follow from its id, so equal ids are equal
    tokens.
    """
    random = Random(seed)
    # Millions of drawn tokens then are so many pointers, not so many numbers
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
