"""Prediction of a request's TTFT, and of what its prompt does to running answers, on either path.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay.config.schema import ClusterConfig
from kvrelay.prompt_rate import chunk_within, least_chunk
from kvrelay.types.requests import Slo
from router.core.worker_view import WorkerView

# A path that misses the TTFT too has to be shorter by this factor, since predictions are inexact.
_CLEARLY = 0.8


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the SLO asks for a request, and what is ahead of the request."""

    ttft_s: float
    # Of answers on a worker that reports no other.
    itl_s: float
    # Most and fewest prompt tokens of a decode worker's step.
    chunk_tokens: int
    least_chunk: int
    # Time since the request's arrival.
    waited_s: float = 0.0
    # Tokens of the prompts that wait for a prefill worker and come before.
    tokens_ahead: int = 0


def outlook_of(
    config: ClusterConfig, slo: Slo, waited_s: float, tokens_ahead: int
) -> Outlook | None:
    """Returns what a request's own SLO asks, completed from the configured one; None if neither has
    a TTFT.
    """
    common, chunk_tokens = config.slo, config.decode.chunk_tokens
    if slo.ttft_ms is not None:
        ttft_s = slo.ttft_ms / 1000
    elif common is not None:
        ttft_s = common.ttft_s
    else:
        return None
    itl_s = math.inf if common is None else common.itl_s
    least = least_chunk(chunk_tokens, config.pool_kv("decode").block_size)
    return Outlook(ttft_s, itl_s, chunk_tokens, least, waited_s, tokens_ahead)


@dataclass(frozen=True, slots=True)
class Better:
    """The path that keeps more requests within the SLO than the path by default."""

    # The decode worker that prefills; None for the disaggregated path.
    helper: WorkerView | None
    # Predicted TTFT in seconds on the path by default, and on this one.
    before_s: float
    after_s: float


def better_than_waiting(
    decoders: Sequence[WorkerView],
    prefillers: Sequence[WorkerView],
    num_tokens: int,
    outlook: Outlook,
) -> Better | None:
    """Returns the decode worker that should prefill a prompt because the prefill workers would miss
    its TTFT. Its running answers keep their ITL.
    """
    remote_s = _remote_ttft(prefillers, num_tokens, outlook)
    if remote_s is None or remote_s <= outlook.ttft_s:
        return None
    rate = _mean_rate(prefillers)
    found = [
        (local_s, one.last_assigned, one)
        for one in decoders
        if one.takes_prompt
        and not one.full
        and _spares_time(one, outlook, rate)
        and (local_s := _local_ttft(one, num_tokens, outlook, rate)) is not None
    ]
    if not found:
        return None
    local_s, _, helper = min(found, key=lambda one: one[:2])
    if local_s <= max(outlook.ttft_s, _CLEARLY * remote_s):
        return Better(helper, remote_s, local_s)
    return None


def better_than_delaying(
    decode: WorkerView, prefillers: Sequence[WorkerView], num_tokens: int, outlook: Outlook
) -> Better | None:
    """Returns the disaggregated path if a prefill on the decode worker would miss the TTFT or raise
    the ITL of its running answers above the SLO, and the disaggregated path would not.
    """
    free = [one for one in prefillers if not one.full]
    remote_s = _remote_ttft(free, num_tokens, outlook)
    local_s = _local_ttft(decode, num_tokens, outlook, _mean_rate(prefillers))
    if remote_s is None or local_s is None or remote_s > outlook.ttft_s:
        return None
    spoils = decode.step_s <= (decode.itl_s or outlook.itl_s) and not _spares_time(
        decode, outlook, _mean_rate(prefillers), num_tokens - decode.cached_tokens
    )
    if local_s > outlook.ttft_s or spoils:
        return Better(None, local_s, remote_s)
    return None


def _remote_ttft(
    prefillers: Sequence[WorkerView], num_tokens: int, outlook: Outlook
) -> float | None:
    """Returns the TTFT in seconds with the best prefill worker; None without a measured rate."""
    mean = _mean_rate(prefillers)
    if not mean:
        return None
    ahead_s = outlook.tokens_ahead / (mean * len(prefillers))
    computed_s = min(
        (one.queued_tokens + num_tokens - one.cached_tokens) / (one.prompt_rate or mean)
        for one in prefillers
    )
    return outlook.waited_s + ahead_s + computed_s


def _local_ttft(
    decode: WorkerView, num_tokens: int, outlook: Outlook, default_rate: float
) -> float | None:
    """Returns the TTFT in seconds if the decode worker prefills; None without a measured rate."""
    rate = decode.prompt_rate or default_rate
    if not rate:
        return None
    if decode.streams:
        chunk = max(_chunk(decode, outlook, rate), outlook.least_chunk)
        rate = chunk / (decode.step_s + chunk / rate)
    tokens = decode.queued_tokens + num_tokens - decode.cached_tokens
    return outlook.waited_s + tokens / rate


def _spares_time(
    decode: WorkerView, outlook: Outlook, default_rate: float, tokens: int | None = None
) -> bool:
    """Whether the worker can compute a chunk of a prompt, or its `tokens` if they are fewer, in a
    step without raising the ITL of its answers above the SLO.
    """
    rate = decode.prompt_rate or default_rate
    least = outlook.least_chunk if tokens is None else min(tokens, outlook.least_chunk)
    return not decode.streams or _chunk(decode, outlook, rate) >= least


def _chunk(decode: WorkerView, outlook: Outlook, rate: float) -> int:
    itl_s = decode.itl_s or outlook.itl_s
    return chunk_within(outlook.chunk_tokens, itl_s, decode.step_s, rate)


def _mean_rate(workers: Iterable[WorkerView]) -> float:
    """Returns the mean of the measured rates; 0 without any."""
    rates = [one.prompt_rate for one in workers if one.prompt_rate]
    return sum(rates) / len(rates) if rates else 0.0
