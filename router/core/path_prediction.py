"""Prediction of a request's TTFT on either path. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay.config.model_sections import SloConfig
from kvrelay.types.requests import Slo
from router.core.worker_view import WorkerView

# Decode workers help once the predicted TTFT exceeds this share of the objective, because prompts
# on both paths at a time slow each other down where they share memory or cores.
_HELPED_FROM = 0.5
# An unmeasured decode worker counts as slower than the prefill workers by this factor, since
# answers take a part of its time.
_UNMEASURED = 0.5


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the SLO asks for a request, and what is ahead of the request."""

    ttft_s: float
    # Time since the request's arrival.
    waited_s: float = 0.0
    # Tokens that the prefill pool computes before, of prompts that have no prefill worker yet.
    tokens_ahead: int = 0


def outlook_of(common: SloConfig, slo: Slo, waited_s: float, tokens_ahead: int) -> Outlook:
    """Returns the outlook of a request with its own `slo`.

    A request may ask for a longer TTFT than the common one. A shorter one would take the decode
    workers' time from other requests.
    """
    ttft_s = max(common.ttft_s, (slo.ttft_ms or 0.0) / 1000)
    return Outlook(ttft_s, waited_s, tokens_ahead)


@dataclass(frozen=True, slots=True)
class Better:
    """The path that keeps more requests within the SLO than the path by default."""

    # The decode worker that prefills; None for the disaggregated path.
    helper: WorkerView | None
    # Predicted TTFT in seconds on the path by default, and on this one. Infinite on a decode worker
    # whose answers leave no time.
    before_s: float
    after_s: float


def better_than_waiting(
    decoders: Sequence[WorkerView],
    prefillers: Sequence[WorkerView],
    num_tokens: int,
    outlook: Outlook,
) -> Better | None:
    """Returns the decode worker that should prefill a prompt because the prefill workers would take
    too much of its TTFT. Its running answers keep their ITL.
    """
    remote_s = _remote_s(prefillers, num_tokens, outlook)
    if remote_s is None or outlook.waited_s + remote_s <= _HELPED_FROM * outlook.ttft_s:
        return None
    found = [
        (local_s, one.last_assigned, one)
        for one in decoders
        if one.takes_prompt
        and not one.full
        and (local_s := _local_s(one, num_tokens, prefillers)) is not None
    ]
    if not found:
        return None
    local_s, _, helper = min(found, key=lambda one: one[:2])
    if local_s <= _HELPED_FROM * outlook.ttft_s - outlook.waited_s or local_s < remote_s:
        return Better(helper, outlook.waited_s + remote_s, outlook.waited_s + local_s)
    return None


def better_than_delaying(
    decode: WorkerView, prefillers: Sequence[WorkerView], num_tokens: int, outlook: Outlook
) -> Better | None:
    """Returns the disaggregated path if a prefill on the decode worker would miss the TTFT or raise
    the ITL of its running answers above the SLO, and a free prefill worker would not miss the TTFT.
    """
    free = [one for one in prefillers if not one.full]
    remote_s = _remote_s(free, num_tokens, outlook)
    if remote_s is None or outlook.tokens_ahead or decode.prompt_rate is None:
        return None
    local_s = _local_s(decode, num_tokens, prefillers)
    local_s = math.inf if local_s is None else local_s
    if outlook.waited_s + remote_s <= outlook.ttft_s < outlook.waited_s + local_s:
        return Better(None, outlook.waited_s + local_s, outlook.waited_s + remote_s)
    return None


def prompt_seconds(worker: WorkerView, num_tokens: int, mean_rate: float) -> float:
    """Returns the time until a worker has computed a prompt, after those before it. An unmeasured
    worker has the mean rate.
    """
    rate = worker.prompt_rate or mean_rate
    return (worker.queued_tokens + num_tokens - worker.cached_tokens) / rate


def mean_prompt_rate(workers: Iterable[WorkerView]) -> float:
    """Returns the mean of the measured rates; 0 without any."""
    rates = [one.prompt_rate for one in workers if one.prompt_rate]
    return sum(rates) / len(rates) if rates else 0.0


def _remote_s(prefillers: Sequence[WorkerView], num_tokens: int, outlook: Outlook) -> float | None:
    """Returns the seconds until the fittest prefill worker has computed the prompt; None without a
    measured rate.
    """
    mean = mean_prompt_rate(prefillers)
    if not mean:
        return None
    ahead_s = outlook.tokens_ahead / (mean * len(prefillers))
    return ahead_s + min(prompt_seconds(one, num_tokens, mean) for one in prefillers)


def _local_s(decode: WorkerView, num_tokens: int, prefillers: Sequence[WorkerView]) -> float | None:
    """Returns the seconds until the decode worker has computed the prompt; None if its answers
    leave it no time, or without a measured rate.
    """
    if decode.prompt_rate == 0:
        return None
    mean = _UNMEASURED * mean_prompt_rate(prefillers)
    return prompt_seconds(decode, num_tokens, mean) if decode.prompt_rate or mean else None
